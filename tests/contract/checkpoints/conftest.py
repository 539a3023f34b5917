from __future__ import annotations

import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store


@pytest.fixture
def store(store_settings: StoreSettings) -> ObjectStore:
    """An empty store; a test that takes it runs on every backend."""
    return open_store(store_settings)
