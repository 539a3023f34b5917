from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.jobs import Jobs
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support import toy_jobs
from tests.support.ray_head import RayHead, ray_head
from tests.support.toy_processes import Toys


@pytest.fixture(scope="package")
def ray() -> Iterator[RayHead]:
    with ray_head(dashboard=False) as head:
        yield head


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    return open_store(file_store)


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    return Jobs(store, toy_jobs.KIND)


@pytest.fixture
def toys(file_store: StoreSettings, ray: RayHead, tmp_path: Path) -> Iterator[Toys]:
    toys = Toys(file_store, ray, tmp_path)
    yield toys
    toys.end()
