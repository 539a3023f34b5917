"""The format of a dataset version: Parquet files, and a manifest with the digest of each."""

from shared.dataset_version.manifest import ROW_ID, Manifest
from shared.dataset_version.pages import RowGroup, RowGroups
from shared.dataset_version.reader import VersionReader
from shared.dataset_version.version import DatasetVersion, load_version
from shared.dataset_version.writer import SplitWriter

__all__ = [
    "ROW_ID",
    "DatasetVersion",
    "Manifest",
    "RowGroup",
    "RowGroups",
    "SplitWriter",
    "VersionReader",
    "load_version",
]
