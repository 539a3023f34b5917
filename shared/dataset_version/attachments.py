"""What lies beside the rows of a version: its quality report, and the rows that were left out."""

from __future__ import annotations

import json
from typing import Any

from shared.dataset_version.manifest import REPORT, sha256_hex
from shared.dataset_version.version import DatasetVersion, check_not_deleted
from shared.errors import DataLoss
from shared.storage import ObjectMissing, ObjectStore


def read_attachment(store: ObjectStore, version: DatasetVersion, path: str) -> bytes | None:
    """None where the version has none of that name. Raises `DataLoss` where it is not what was committed, and
    `NotFound` where the version was deleted meanwhile."""
    attachment = version.manifest.attachment(path)
    if attachment is None:
        return None
    try:
        data = store.get(f"{version.folder}/{path}")
    except ObjectMissing:
        check_not_deleted(store, version)
        data = b""
    if sha256_hex(data) != attachment.sha256:
        raise DataLoss(
            f"{path} of {version.name} is not what was committed",
            reason="DAMAGED_FILE",
            metadata={"resource": version.name, "file": path},
        )
    return data


def read_report(store: ObjectStore, version: DatasetVersion) -> dict[str, Any]:
    """The QualityReport as JSON; empty where the version has none. Raises as `read_attachment`."""
    data = read_attachment(store, version, REPORT)
    report: dict[str, Any] = json.loads(data) if data else {}
    return report
