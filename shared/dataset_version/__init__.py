"""The format of a dataset version: Parquet files, and a manifest with the digest of each."""

from shared.dataset_version.manifest import ROW_ID, DatasetVersion, Manifest
from shared.dataset_version.pages import RowGroup, RowGroups
from shared.dataset_version.parquet import SplitWriter, VersionReader
from shared.dataset_version.version import load_version

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
