"""The bench of the loader: what it reports of a version whose files are in pages."""

from __future__ import annotations

import pytest

from benchmarks import train_loader
from shared.dataset_version import load_version
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.support.paged_versions import make_versions_paged
from tests.support.versions import commit_version, striped_digits


def test_each_of_two_ranks_reads_about_half_of_a_version_in_pages(
    file_store: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(file_store)
    make_versions_paged(monkeypatch)
    images, labels = striped_digits(2000)
    commit_version(store, train_loader.VERSION, {"train": (images, labels)})
    assert load_version(store, train_loader.VERSION).manifest.pages is not None
    assert 0.5 < train_loader.bytes_read_times_workers(store, 2) < 2.5
