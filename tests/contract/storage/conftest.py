from __future__ import annotations

from datetime import timedelta

import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store, opening


@pytest.fixture
def store(store_settings: StoreSettings) -> ObjectStore:
    """An empty store; a test that takes it runs on every backend."""
    return open_store(store_settings)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a store that is away or full waits for two seconds here, not for ten."""
    monkeypatch.setattr(opening, "RETRY_FOR", timedelta(seconds=2))
