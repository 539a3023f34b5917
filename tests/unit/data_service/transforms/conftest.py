from __future__ import annotations

import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    return open_store(file_store)
