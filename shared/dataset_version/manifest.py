"""The manifest of a dataset version: every file with its size and SHA-256, as canonical JSON.

It contains nothing that differs between two runs on the same rows (no time, no attempt, no machine), so equal inputs
give equal digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.durable import fields_of
from shared.errors import DataLoss

FORMAT = "millrace.dataset-version/2"
REPORT = "report.json"
QUARANTINE = "quarantine.jsonl"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a version.

    `arrow_type` is the logical type in Arrow's own spelling. `shape` is that of one row, empty for a scalar.
    `value_names` names the values 0, 1, …, if the source had names for them.
    """

    name: str
    arrow_type: str
    shape: list[int]
    value_names: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split: `row_count` consecutive row ids from `first_row_id` on."""

    name: str
    first_row_id: int
    row_count: int


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A Parquet file. `path` is relative to the manifest's folder; `row_groups` lists the rows of each group."""

    path: str
    split: str
    first_row_id: int
    row_count: int
    row_groups: list[int]
    size_bytes: int
    sha256: str
    # The SHA-256 of the file's last `footer_bytes`, which page checksums do not cover.
    footer_bytes: int
    footer_sha256: str
    # The size of the values as `shared.dataset_version.writer.raw_bytes` counts it. Older manifests lack it.
    raw_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The version that this one was made from, as it was at that time."""

    version: str
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The checkpoint that predicted `columns`, and the version that it was `trained_on`, as they were at that time."""

    checkpoint: str
    checkpoint_sha256: str
    trained_on: str
    columns: list[str]


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A file beside the rows: `REPORT` or `QUARANTINE`. `path` is relative to the manifest's folder."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    columns: list[Column]
    splits: list[Split]
    # In the order of row ids.
    files: list[DataFile]
    parents: list[Parent] = field(default_factory=list)
    # The columns of the rows as ingested: those of the oldest ancestor in a chain of transforms.
    ingested: list[Column] = field(default_factory=list)
    # The transforms applied since, oldest first, each a frozen `Transform` as JSON.
    transforms: list[dict[str, Any]] = field(default_factory=list)
    attachments: list[Attachment] = field(default_factory=list)
    quarantined_row_count: int = 0
    # Set only for a version of predictions.
    prediction: Prediction | None = None

    def attachment(self, path: str) -> Attachment | None:
        return next((one for one in self.attachments if one.path == path), None)

    @property
    def row_count(self) -> int:
        return sum(split.row_count for split in self.splits)

    @property
    def size_bytes(self) -> int:
        """The total size of all files."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> bytes:
        record = {**asdict(self), "format": FORMAT, "row_count": self.row_count, "size_bytes": self.size_bytes}
        if self.prediction is None:
            del record["prediction"]  # keeps the digests of versions that were made before this field existed
        for file in record["files"]:
            if file["raw_bytes"] is None:
                del file["raw_bytes"]  # likewise
        return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes, expected_sha256: str) -> Manifest:
        """Parse a manifest. Raises `DataLoss` unless the bytes have that digest (hex)."""
        if sha256_hex(data) != expected_sha256:
            raise DataLoss(
                "the manifest does not have the digest that its commit names",
                reason="MANIFEST_DIGEST",
                metadata={"expected_sha256": expected_sha256, "found_sha256": sha256_hex(data)},
            )
        record: Mapping[str, Any] = json.loads(data)
        if record["format"] != FORMAT:
            raise DataLoss(f"the manifest has the format {record['format']!r}; this program reads {FORMAT!r}")
        return cls(
            columns=[Column(**fields_of(Column, column)) for column in record["columns"]],
            splits=[Split(**fields_of(Split, split)) for split in record["splits"]],
            files=[DataFile(**fields_of(DataFile, file)) for file in record["files"]],
            parents=[Parent(**fields_of(Parent, parent)) for parent in record["parents"]],
            ingested=[Column(**fields_of(Column, column)) for column in record["ingested"]],
            transforms=record["transforms"],
            attachments=[Attachment(**fields_of(Attachment, attachment)) for attachment in record["attachments"]],
            quarantined_row_count=record["quarantined_row_count"],
            prediction=Prediction(**fields_of(Prediction, record["prediction"])) if "prediction" in record else None,
        )


def sha256_hex(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
