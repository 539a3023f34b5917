"""The index of versions: `shared.jobs.index` over the jobs that make the versions of all datasets.

Its entries are in the order of their full names, so the versions of one dataset lie side by side. An entry has the
version as a list shows it, so a page of a list reads no manifest, unless a version has so many columns that its leaf
would become large.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

from data_service.convert import version_message
from data_service.datasets import Datasets
from data_service.version_catalog import SHOWN, ActiveVersion, Versions
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import JobRecord, Jobs
from shared.jobs.index import JobIndex
from shared.storage import ObjectStore

DATASETS = "datasets"
# A longer message is not kept in the index. A leaf has up to 128 entries.
SHOWN_BYTES = 8 * 1024


class VersionNames:
    """The names of all versions that ever were, see `shared.jobs.index.JobNames`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def all(self) -> Sequence[str]:
        folders = ((one, self._store.folders(_parent(one))) for one in self._store.folders(DATASETS))
        return sorted(f"{_parent(dataset)}/{version}" for dataset, versions in folders for version in versions)

    def after(self, name: str, most: int) -> Sequence[str]:
        _, dataset, _, version = name.split("/") if name.count("/") == 3 else ("", "", "", "")
        found: list[str] = []
        for one in self._datasets_from(dataset):
            behind = version if one == dataset else ""
            ids = self._store.folders_after(_parent(one), behind, most - len(found))
            found += [f"{_parent(one)}/{version_id}" for version_id in ids]
            if len(found) == most:
                break
        return found

    def _datasets_from(self, dataset: str) -> Iterator[str]:
        """Yield the datasets from this one on, in the order of their keys."""
        keys = sorted(f"{one}/" for one in self._store.folders(DATASETS))
        return (key[:-1] for key in keys if not dataset or key >= f"{dataset}/")


def open_version_index(store: ObjectStore) -> JobIndex:
    versions = Versions(store, Jobs(store, IMPORT_KIND), Datasets(store))
    return JobIndex(store, IMPORT_KIND, DATASETS, lambda job: _shown(versions, job), names=VersionNames(store))


def _shown(versions: Versions, job: JobRecord) -> dict[str, Any]:
    version = versions.listed(job)
    if not isinstance(version, ActiveVersion):
        return {}
    message = version_message(version, brief=True).SerializeToString()
    return {SHOWN: base64.b64encode(message).decode()} if len(message) <= SHOWN_BYTES else {}


def _parent(dataset: str) -> str:
    return f"{DATASETS}/{dataset}/versions"
