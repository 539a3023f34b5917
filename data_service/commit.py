"""The last act of every job that makes a version: what lies beside the rows, and then the manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_service.domain.layout import SplitRange
from shared.dataset_version.columns import shape_of
from shared.dataset_version.manifest import (
    QUARANTINE,
    REPORT,
    Attachment,
    Column,
    DataFile,
    Manifest,
    Parent,
    Prediction,
    Split,
    sha256_hex,
)
from shared.storage import ObjectStore


def columns_of(schema: pa.Schema, value_names: Mapping[str, Sequence[str]]) -> list[Column]:
    """The manifest's columns for a logical schema without `_row_id`."""
    return [
        Column(
            name=field.name,
            arrow_type=str(field.type),
            shape=shape_of(field.type),
            value_names=list(value_names.get(field.name, [])),
        )
        for field in schema
    ]


def commit_version(
    store: ObjectStore,
    folder: str,
    *,
    columns: Sequence[Column],
    ranges: Sequence[SplitRange],
    files: Sequence[DataFile],
    report: Mapping[str, Any],
    quarantine: Path | None,
    quarantined_row_count: int,
    parents: Sequence[Parent] = (),
    ingested: Sequence[Column] | None = None,
    transforms: Sequence[dict[str, Any]] = (),
    prediction: Prediction | None = None,
) -> dict[str, Any]:
    """Writes report, quarantined rows and manifest below `folder`, and returns the job's result, which names the
    manifest: only that makes the version. `report` is a QualityReport as JSON, `quarantine` a local file of JSON lines.
    """
    attachments = [_attach(store, folder, REPORT, json.dumps(report, sort_keys=True, separators=(",", ":")).encode())]
    if quarantine is not None and quarantine.stat().st_size:
        attachments.append(_attach_file(store, folder, QUARANTINE, quarantine))
    manifest = Manifest(
        columns=list(columns),
        splits=[Split(name=one.name, first_row_id=one.first_row_id, row_count=one.row_count) for one in ranges],
        files=sorted(files, key=lambda file: file.first_row_id),
        parents=list(parents),
        ingested=list(columns if ingested is None else ingested),
        transforms=list(transforms),
        attachments=attachments,
        quarantined_row_count=quarantined_row_count,
        prediction=prediction,
    )
    data = manifest.to_json()
    key = f"{folder}/manifest.json"
    store.put(key, data)
    return {"manifest": key, "manifest_sha256": sha256_hex(data)}


def _attach(store: ObjectStore, folder: str, path: str, data: bytes) -> Attachment:
    store.put(f"{folder}/{path}", data)
    return Attachment(path=path, size_bytes=len(data), sha256=sha256_hex(data))


def _attach_file(store: ObjectStore, folder: str, path: str, local: Path) -> Attachment:
    with local.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    store.upload_file(local, f"{folder}/{path}")
    return Attachment(path=path, size_bytes=local.stat().st_size, sha256=digest)
