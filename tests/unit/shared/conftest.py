from __future__ import annotations

from pathlib import Path

import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """An empty store in a directory of the test's own."""
    return open_store(StoreSettings(url=(tmp_path / "store").as_uri()))
