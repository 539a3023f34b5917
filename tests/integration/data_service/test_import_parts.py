"""On a real cluster: an import whose parts are tasks of Ray makes the version that one process makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.ray_head import RayHead

TIMEOUT_S = 400.0
ROWS, FILES = 3000, 4
# Imports the files twice: by tasks, and one part after the other in its own process.
PROGRAM = """
import functools, json, sys, time, uuid
from pathlib import Path
import ray
from data_service.domain.import_spec import BadRows, ColumnType, HoldOut, ImportSpec, Source
from data_service.formats import interface
from data_service.imports import job as import_job, plan
from data_service.parallel import run_on_ray
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import JobRecord, Jobs
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt
from shared.settings import StoreSettings
from shared.storage import open_store

folder = Path(sys.argv[2])
store = open_store(StoreSettings(url=(folder / "store").as_uri()))
plan.SMALL_BYTES = 0
plan.MAX_PART_BYTES = interface.PART_BYTES = 20_000
passes = []

def run_parts(context, folder, work, parts, **options):
    inner = getattr(work.work, "_work", work.work)
    passes.append([type(inner).__name__, len(parts)])
    yield from run_on_ray(context, folder, work, parts, **options)

def run(version, spec):
    name, jobs, now = f"datasets/d/versions/{version}", Jobs(store, IMPORT_KIND), time.time()
    recorded = {"import": spec.as_record(), "import_roots": [str(folder)], "request_id": ""}
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec=recorded, create_time=now, update_time=now))
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    run_attempt(functools.partial(import_job.run_import, run_parts=run_parts), store, IMPORT_KIND, name, 1)
    job = jobs.get(name, name)
    return job.result.get("manifest_sha256", ""), job.error

def source(format, pattern):
    return Source(split="train", format=format, uris={f"{format}.uri": f"{folder.as_uri()}/{pattern}"})

ray.init(address=sys.argv[1], log_to_driver=False)
good = ImportSpec(
    sources=[source("parquet", "*.parquet"), source("csv", "*.csv")],
    hold_outs=[HoldOut(from_split="train", to_split="test", fraction=0.1, seed=1)],
    column_types=[ColumnType(column="n", arrow_type="int64")],
    bad_rows=BadRows(action="quarantine"),
    checks=[{"column": "n", "unique": {}, "action": "ACTION_QUARANTINE"}],
)
at_once = ImportSpec(sources=good.sources[:1], hold_outs=[], column_types=good.column_types, bad_rows=good.bad_rows)
refused = ImportSpec(sources=good.sources, hold_outs=[], column_types=good.column_types)
specs = {"good": good, "at once": at_once, "refused": refused}
in_tasks = {name: run(f"t{number}", spec) for number, (name, spec) in enumerate(specs.items())}
import_job._Opened.in_tasks = False
in_order = {name: run(f"o{number}", spec) for number, (name, spec) in enumerate(specs.items())}
(folder / "found").write_text(json.dumps([in_tasks, in_order, passes]))  # Ray prints at any time
"""


def test_parts_on_ray_make_the_version_that_one_process_makes(data_ray: RayHead, tmp_path: Path) -> None:
    for file in range(FILES):
        numbers = np.arange(file * ROWS, (file + 1) * ROWS)
        numbers[5] -= ROWS  # a repeat of the file before
        texts = list(map(str, numbers))
        texts[7] = "x"  # no number
        table = pa.table({"n": texts, "noise": np.random.default_rng(file).normal(size=ROWS)})
        if file % 2:
            pq.write_table(table, tmp_path / f"{file}.parquet", row_group_size=500)
        else:
            lines = [f"{n},{noise}" for n, noise in zip(texts, table["noise"].to_pylist(), strict=True)]
            (tmp_path / f"{file}.csv").write_text("\n".join(["n,noise", *lines]))

    program = [sys.executable, "-c", PROGRAM, data_ray.address, str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    in_tasks, in_order, passes = json.loads((tmp_path / "found").read_text())

    assert in_tasks == in_order
    for name in ("good", "at once"):
        digest, error = in_tasks[name]
        assert (len(digest), error) == (64, None)
    digest, error = in_tasks["refused"]
    assert (digest, error["reason"]) == ("", "BAD_ROW")
    assert "1.parquet, row 8" in error["message"]
    # Bad rows come to light only as the parts are written; those after the first stand elsewhere then.
    (counting, counted), (writing, written), (first, at_first), (again, moved) = passes[:4]
    assert (counting, writing, first, again) == ("CountPart", "WritePart", "WritePart", "WritePart")
    assert counted == written > FILES
    assert FILES / 2 < at_first > moved > 0
