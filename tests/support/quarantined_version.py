"""A version with every kind of attachment: a report, and rows that were left out."""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path

import pyarrow as pa

from data_service.domain.splits import SplitRange
from data_service.version_attempt import columns_of, commit_version
from shared.dataset_version import SplitWriter
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, succeed
from shared.storage import ObjectStore

ROWS = 3


def commit_with_quarantine(store: ObjectStore, name: str, lines: bytes) -> str:
    """The version's folder, in which `lines` lie as `quarantine.jsonl` where there are any."""
    folder = f"{name}/data/a00001-{uuid.uuid4().hex[:8]}"
    jobs = Jobs(store, IMPORT_KIND)
    now = time.time()
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec={}, create_time=now, update_time=now))
    jobs.transition(name, lambda newest: begin_attempt(newest, now), attempt=1)
    table = pa.table({"label": range(ROWS)})
    with tempfile.TemporaryDirectory() as scratch:
        writer = SplitWriter(store, folder, Path(scratch), schema=table.schema, split="train", first_row_id=0)
        writer.write(table)
        quarantine = Path(scratch, "quarantine.jsonl")
        quarantine.write_bytes(lines)
        result = commit_version(
            store,
            folder,
            columns=columns_of(table.schema, {}),
            ranges=[SplitRange("train", 0, ROWS)],
            files=writer.close(),
            report={},
            quarantine=quarantine,
            quarantined_row_count=lines.count(b"\n"),
        )
    jobs.transition(name, lambda newest: succeed(newest, result, now), attempt=1)
    return folder
