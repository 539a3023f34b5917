from __future__ import annotations

from datetime import timedelta

import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectStore, object_store, open_store


@pytest.fixture
def store(store_settings: StoreSettings) -> ObjectStore:
    """An empty store; a test that takes it runs on every backend."""
    return open_store(store_settings)


@pytest.fixture(autouse=True)
def long_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes over a request, what is to succeed at last does."""
    monkeypatch.setattr(object_store, "RETRY_FOR", timedelta(seconds=240))
    monkeypatch.setattr(object_store, "RETRY_TIMEOUT_S", 240.0)


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stays away or full is waited for two seconds here, not ten."""
    monkeypatch.setattr(object_store, "RETRY_FOR", timedelta(seconds=2))
    monkeypatch.setattr(object_store, "RETRY_TIMEOUT_S", 1.0)
