"""On a real cluster: the columns of a text source of 256 MiB, inferred in tasks, are those that one process infers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_service.formats.interface import LARGE_BYTES, PART_BYTES
from tests.support.ray_head import RayHead

pytestmark = pytest.mark.long

TIMEOUT_S = 1500.0
TEXT = "The quick brown fox, which has read \\ and /, jumps over the lazy dog. " * 14
# In the last part of the file "late" has its first double, and "text" its first word that is no date.
LATE = 0.99
# Rows that are left out: one at the beginning, one in the middle, and one close to the end.
BAD = (5, 60_000, 265_000)
ROWS = 275_000
# Imports the file twice: with tasks that infer the types of columns, and in one process alone.
PROGRAM = """
import functools, json, sys, time, uuid
from pathlib import Path
import ray
from data_service.domain.import_spec import BadRows, ImportSpec, Source
from data_service.formats import interface
from data_service.imports import job as import_job
from data_service.parallel import run_on_ray
from shared.dataset_version import load_version
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import JobRecord, Jobs
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt
from shared.settings import StoreSettings
from shared.storage import open_store

folder, kind = Path(sys.argv[2]), sys.argv[3]
store = open_store(StoreSettings(url=(folder / "store").as_uri()))
passes = []

def run_parts(context, folder, work, parts, **options):
    inner = getattr(work.work, "_work", None) or getattr(work.work, "work", work.work)
    passes.append([type(inner).__name__, len(parts)])
    yield from run_on_ray(context, folder, work, parts, **options)

def run(version):
    name, jobs, now = f"datasets/d/versions/{version}", Jobs(store, IMPORT_KIND), time.time()
    source = Source(split="train", format=kind, uris={f"{kind}.uri": (folder / "rows").as_uri()})
    spec = ImportSpec(sources=[source], hold_outs=[], column_types=[], bad_rows=BadRows(action="quarantine"))
    recorded = {"import": spec.as_record(), "import_roots": [str(folder)], "request_id": ""}
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec=recorded, create_time=now, update_time=now))
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    run_attempt(functools.partial(import_job.run_import, run_parts=run_parts), store, IMPORT_KIND, name, 1)
    job = jobs.get(name, name)
    if job.error:
        return {"error": job.error}
    manifest = load_version(store, name).manifest
    return {
        "digest": job.result["manifest_sha256"],
        "columns": {column.name: column.arrow_type for column in manifest.columns},
        "rows": manifest.row_count,
        "bad rows": manifest.quarantined_row_count,
    }

ray.init(address=sys.argv[1], log_to_driver=False)
in_tasks = run("tasks")
interface.LARGE_BYTES = 10**12
import_job._Opened.in_tasks = False
in_order = run("process")
(folder / "found").write_text(json.dumps([in_tasks, in_order, passes]))  # Ray prints at any time
"""


def csv_lines() -> Iterator[str]:
    yield "n,late,date,text\n"
    for row in range(ROWS):
        if row in BAD:
            yield f"{row},too few\n"
        else:
            late, date = values_of(row)
            yield f'{row},{late},{date},"{row}\n""{TEXT}"""\n'


def json_lines() -> Iterator[str]:
    for row in range(ROWS):
        if row in BAD:
            yield '{"n": ' + f"{row}\n"
        else:
            late, date = values_of(row)
            yield json.dumps({"n": row, "late": late, "date": date, "text": f'{row}\n"{TEXT}"'}) + "\n"


def values_of(row: int) -> tuple[float, str]:
    return (0.5, "tomorrow") if row == int(LATE * ROWS) else (row, "2024-02-29")


LINES = {"csv": csv_lines, "json_lines": json_lines}


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("kind", LINES)
def test_tasks_infer_the_columns_that_one_process_infers(data_ray: RayHead, tmp_path: Path, kind: str) -> None:
    with (tmp_path / "rows").open("w", newline="") as file:
        file.writelines(LINES[kind]())
    assert (tmp_path / "rows").stat().st_size > LARGE_BYTES
    program = [sys.executable, "-c", PROGRAM, data_ray.address, str(tmp_path), kind]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    in_tasks, in_order, passes = json.loads((tmp_path / "found").read_text())
    assert in_tasks == in_order
    assert in_tasks["columns"] == {"n": "int64", "late": "double", "date": "string", "text": "string"}
    assert (in_tasks["rows"], in_tasks["bad rows"]) == (ROWS - len(BAD), len(BAD))
    # One task finds the cuts; then each part is scanned by a task, and written by another one.
    assert [name for name, _ in passes] == ["ScanInChild", "ScanInChild", "WritePart"]
    cuts, scans, parts = (count for _, count in passes)
    assert cuts == 1
    assert scans >= LARGE_BYTES // PART_BYTES
    assert parts > 1
