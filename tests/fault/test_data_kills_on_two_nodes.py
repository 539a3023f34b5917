"""SIGKILLs to workers, nodes, attempts and services while an import and a transform work on two nodes of Ray.

The version is the one that a single worker makes, and eight workers make. Each part that was kept is never done again.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.longrunning import operations_pb2

from data_service.imports.plan import MAX_PART_BYTES
from millrace.data.v1 import data_service_pb2 as pb
from shared.dataset_version.manifest import tensor_array
from shared.settings import StoreSettings
from tests.fault.test_data_kept_parts import (
    LOST_ATTEMPTS,
    STRIKE_TIMEOUT_S,
    Watched,
    images_stream,
    strike_node,
    strike_worker,
    two_nodes,
)
from tests.fault.test_data_kills_while_fitting import judged
from tests.support.data_place import AT_WORK, WORKER, DataPlace, Gate
from tests.support.data_strikes import uploaded
from tests.support.faults import Faults
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

# Of each job.
STRIKES = ["worker"] * 5 + ["attempt"] * 2 + ["node"] * 2 + ["service"]
SEED = 1
# Two of these files are more than a part may have, so each is a part. Hold-outs are two passes over them.
FILES, FILE_ROWS, SIDE = 6, 4_300, 64
# An undisturbed job on one busy core.
UNDISTURBED_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Job:
    """A job that is started again and again; all runs make the same version."""

    place: DataPlace
    start: Callable[[], operations_pb2.Operation]
    strikes: Mapping[str, Callable[[Watched], bool]]

    def digest(self) -> str:
        """The digest of the version that a run makes which nothing disturbs."""
        started = self.start()
        done = self.place.ended(started, UNDISTURBED_TIMEOUT_S)
        version = self.place.get(self.place.version_of(started))
        return self.place.assert_made_once(done, version.manifest_sha256).manifest_sha256


def write_files(folder: Path) -> str:
    """Return a pattern of the files' URIs."""
    generator = np.random.default_rng(7)
    images = generator.integers(0, 256, (FILE_ROWS, SIDE, SIDE), np.uint8)
    table = pa.table({"n": np.arange(FILE_ROWS), "image": tensor_array(images)})
    first = folder / "000.parquet"
    pq.write_table(table, first, use_dictionary=False, compression="none")
    assert first.stat().st_size > MAX_PART_BYTES / 2
    for number in range(1, FILES):
        shutil.copyfile(first, folder / f"{number:03d}.parquet")
    return f"{folder.as_uri()}/*.parquet"


def import_job(place: DataPlace, folder: Path) -> Job:
    source = pb.ImportSource(split="train", parquet=pb.ParquetSource(uri=write_files(folder)))

    def start() -> operations_pb2.Operation:
        request = place.import_request(source)
        request.hold_outs.add(from_split="train", to_split="test", fraction=0.1, seed=1)
        return place.client.data.ImportVersion(request, timeout=60)

    return Job(place, start, {"worker": kill_any_worker, "node": replace_node})


def transform_job(place: DataPlace, _: Path) -> Job:
    source = place.imported(uploaded(place, images_stream())).name
    # A custom function would be to blame for two deaths on the same part.
    strikes = {"worker": strike_worker, "node": strike_node}
    return Job(place, lambda: place.start_transform(source, **judged()), strikes)


JOBS = {"import": import_job, "transform": transform_job}


def attempt_number(watched: Watched) -> int:
    return int(watched.attempt[1:].partition("-")[0] or 0)


def kill_any_worker(watched: Watched) -> bool:
    busy = watched.cluster.processes(WORKER)
    if busy:
        watched.place.strike_pids(busy[:1])
    return bool(busy)


def replace_node(watched: Watched) -> bool:
    watched.cluster.replace_node()
    return True


def kill_attempt(watched: Watched) -> bool:
    attempt = watched.attempt
    for pid in watched.cluster.processes(AT_WORK):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: watched.is_over() or watched.attempt > attempt, "the next attempt", STRIKE_TIMEOUT_S, 0.1)
    return True


def kill_service(watched: Watched) -> bool:
    watched.place.strike_service()
    watched.place.service.start()
    return True


def strike(job: Job, watched: Watched, kind: str) -> bool:
    """Return whether something was killed. A job fails with the fourth attempt that is lost, so that one is let go."""
    if kind == "service":
        return kill_service(watched)
    if attempt_number(watched) > LOST_ATTEMPTS:
        return False
    return {"attempt": kill_attempt, **job.strikes}[kind](watched)


def strike_until_over(job: Job, watched: Watched, kinds: list[str]) -> list[str]:
    """Kill in the order of `kinds`, each once another part was kept. Return what is left of `kinds`."""
    left = list(kinds)
    while not watched.is_over():
        if left and strike(job, watched, left[0]):
            left.pop(0)
        watched.wait_for_progress(1)
    return left


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", JOBS)
def test_kills_change_no_digest_and_repeat_no_part_that_was_kept(
    s3_store: StoreSettings, gate: Gate, tmp_path: Path, faults: Faults, kind: str
) -> None:
    left = random.Random(SEED).sample(STRIKES, len(STRIKES))
    with two_nodes(s3_store, tmp_path) as cluster:
        job = JOBS[kind](cluster.place, tmp_path)
        cluster.remove_node()
        digest = job.digest()
        cluster.add_node()
        while left:
            with gate.slow():
                started = job.start()
                watched = Watched(cluster, started, cluster.place.version_of(started))
                watched.wait_for_progress(2)
                struck, left = left, strike_until_over(job, watched, left)
            assert len(left) < len(struck), "the job was over before anything was killed"
            for victim in struck[: len(struck) - len(left)]:
                faults.add(f"SIGKILL {victim}", f"{kind} on two nodes", "S3")
            cluster.place.assert_made_once(cluster.place.ended(started, UNDISTURBED_TIMEOUT_S), digest)
            assert watched.done_again == []
        cluster.add_node(6)
        assert job.digest() == digest
