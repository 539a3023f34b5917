"""A committed version in a store of its own, read by all tests of the loader, and never written again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shared.dataset_version import VersionReader, load_version
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.own_code_checks import check_in_this_process
from tests.support.versions import commit_version, striped_digits
from train_service.loading.loader import RowCache

VERSION = "datasets/digits/versions/v1"
TRAIN_ROWS, VALIDATION_ROWS = 700, 90


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Committed:
    """`datasets/digits/versions/v1`: 700 rows `train`, in three row groups, then 90 rows `validation`."""

    store: ObjectStore
    name: str = VERSION

    def cache(self, split: str = "train", *, num_classes: int = 10, capacity: int = 2**30) -> RowCache:
        """`capacity` in bytes."""
        reader = VersionReader(self.store, load_version(self.store, self.name))
        return RowCache(reader, split, ["image"], "label", num_classes, capacity)


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    store = open_store(StoreSettings(url=(tmp_path_factory.mktemp("train") / "store").as_uri()))
    commit_version(
        store, VERSION, {"train": striped_digits(TRAIN_ROWS), "validation": striped_digits(VALIDATION_ROWS, 1)}
    )
    return Committed(store)


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of code bundles are checked in this process, not in a child."""
    check_in_this_process(monkeypatch)


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    """An empty store of the test's own."""
    return open_store(file_store)
