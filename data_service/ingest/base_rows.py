"""The rows of the version that an import appends to."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from shared.dataset_version import DatasetVersion, VersionReader
from shared.storage import ObjectStore


class BaseRows:
    """Raises `DataLoss` where the version cannot be read."""

    def __init__(self, store: ObjectStore, version: DatasetVersion) -> None:
        self.version = version
        self._reader = VersionReader(store, version)
        self.schema: pa.Schema = self._reader.select(None)
        self.splits = [split.name for split in version.manifest.splits]

    def tables(self, split: str) -> Iterator[pa.Table]:
        """In the order of row ids; none for a split that the version does not have."""
        if split in self.splits:
            for group in self._reader.row_groups_from(split, 0):
                yield self._reader.read(group)
