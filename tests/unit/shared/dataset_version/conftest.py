from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.versions import commit_version

NAME = "datasets/digits/versions/v1"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=(tmp_path / "store").as_uri()))


@pytest.fixture
def committed(store: ObjectStore) -> str:
    """A version of 600 + 100 rows: three row groups and one."""
    splits = {}
    for split, rows in (("train", 600), ("test", 100)):
        images = np.arange(rows * 784, dtype=np.uint32).astype(np.uint8).reshape(rows, 28, 28)
        splits[split] = (images, np.arange(rows) % 10)
    commit_version(store, NAME, splits)
    return NAME
