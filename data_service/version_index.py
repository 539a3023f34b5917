"""The index of versions: `shared.jobs.index` over the jobs that make the versions of all datasets.

Its entries are in the order of their full names, so the versions of one dataset lie side by side. An entry has the
version as a list shows it, so a page of a list reads no manifest, unless a version has so many columns that its leaf
would become large.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from data_service.convert import version_message
from data_service.datasets import SHOWN, ActiveVersion, Datasets, Versions
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import JobRecord, Jobs
from shared.jobs.index import JobIndex
from shared.storage import ObjectStore
from shared.storage.object_store import KEYS_A_LISTING

DATASETS, VERSIONS = "datasets", "versions"
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
        found: list[str] = []
        # Beyond every key that begins with the name and a slash.
        at = f"{name}0" if name.count("/") == 3 else DATASETS
        while len(found) < most and (keys := self._store.keys_after(DATASETS, at)):
            for key in keys:
                parts = key.split("/")
                if key <= at or len(found) == most or len(parts) < 4:
                    continue
                _, dataset, folder, version = parts[:4]
                if folder == VERSIONS and len(parts) > 4:
                    found.append(f"{_parent(dataset)}/{version}")
                    at = f"{found[-1]}0"
                elif f"{folder}/" < f"{VERSIONS}/":
                    at = _parent(dataset)
                elif folder != VERSIONS:
                    at = f"{DATASETS}/{dataset}0"
            if len(keys) < KEYS_A_LISTING:
                break
            at = max(at, keys[-1])
        return found


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
    return f"{DATASETS}/{dataset}/{VERSIONS}"
