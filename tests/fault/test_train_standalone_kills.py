"""Under torchrun: a rank, then the whole machine, then torchrun alone is killed; the same command goes on each time.

Without Ray and without services. Every row is read once an epoch, and the weights are those of a run left alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf import json_format

from shared.checkpoint import load_checkpoint, resolve
from shared.checkpoint.format import WEIGHTS
from shared.jobs import Jobs, JobState
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.faults import Faults
from tests.support.numbered_rows import (
    LANES,
    ROWS,
    STEPS_PER_EPOCH,
    Begun,
    numbered_digits,
    processes_of,
    seen_in,
    steps_of_an_epoch,
)
from tests.support.service_process import store_environ
from tests.support.versions import commit_version
from tests.support.waiting import wait_until
from tests.support.witnessed import VERSION, witness_environment, witnessed_spec
from train_service.jobs.run_records import RunRecords
from train_service.records.event_log import TRAIN_KIND, EventKind, EventLog

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

EPOCHS, RANKS = 12, 2
# Among so many neither the lanes nor the steps of so many rows are even.
MANY_RANKS, UNEVEN_ROWS, FEW_EPOCHS = 5, 613, 4
# Of all ranks together, since the attempt began: in the middle of an epoch, some steps behind a checkpoint.
BATCHES_BEFORE_A_FAULT = 31
STARTED_TIMEOUT_S, ENDS_TIMEOUT_S = 180.0, 240.0
TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--local-addr=127.0.0.1", "--nproc-per-node"]
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass
class Runs:
    store: ObjectStore
    witness: Path
    spec: Path
    ranks: int
    row_count: int
    epochs: int

    def start(self, job: str, attempt: int) -> subprocess.Popen[bytes]:
        """The command, the same each time but for what the witness calls the attempt."""
        environ = {**store_environ(self.store.settings), **LOOPBACK}
        environ["MILLRACE_WITNESS_RUN"] = f"{job}-attempt-{attempt}"
        arguments = [*TORCHRUN, str(self.ranks), "-m", "train_service.torchrun_main", str(self.spec), "--job", job]
        with (self.spec.parent / f"{job}.log").open("ab") as log:
            return subprocess.Popen(
                arguments, env={**os.environ, **environ}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def at_work(self, job: str, attempt: int) -> None:
        """Return once the attempt has trained for a while."""

        def trained() -> bool:
            calls = processes_of(self.witness, job).get(attempt, [])
            return sum(map(len, calls)) >= BATCHES_BEFORE_A_FAULT

        wait_until(trained, f"attempt {attempt} to train", STARTED_TIMEOUT_S, interval_s=0.05)

    def begun(self, name: str) -> list[Begun]:
        reported = [event for event in EventLog(self.store, name).after(0) if event.kind is EventKind.ATTEMPT_STARTED]
        return [Begun(one.attempt, one.payload["step"], one.payload["num_workers"]) for one in reported]

    def weights(self, name: str) -> bytes:
        entry = resolve(self.store, "name", f"{name}/checkpoints/final")
        return load_checkpoint(self.store, entry.folder, entry.manifest_sha256).read(WEIGHTS)

    def coverage_counts(self, name: str, epoch: int) -> tuple[int, int, int]:
        counts = RunRecords(self.store).coverage(name, epoch, "").counts
        return counts.seen_once, counts.missing, counts.repeated

    def assert_each_row_once(self, name: str) -> None:
        """In every epoch, by what the ranks wrote down and by what the service tells."""
        seen = seen_in(self.begun(name), processes_of(self.witness, name), self.epochs, self.row_count)
        assert (seen.missing, seen.repeated) == (0, 0)
        assert {self.coverage_counts(name, epoch) for epoch in range(self.epochs)} == {(self.row_count, 0, 0)}


def runs_of(folder: Path, *, ranks: int, row_count: int, epochs: int) -> Runs:
    store = open_store(StoreSettings(url=(folder / "store").as_uri()))
    commit_version(store, VERSION, {"train": numbered_digits(row_count)})
    spec = folder / "spec.json"
    spec.write_text(json_format.MessageToJson(witnessed_spec(epochs=epochs, workers=ranks, lanes=LANES)))
    return Runs(store, folder / "witnessed" / "witness", spec, ranks, row_count, epochs)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def ranks_of(torchrun: subprocess.Popen[bytes]) -> list[int]:
    """The pids of its children, by rank."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            environ = dict(one.partition(b"=")[::2] for one in (entry / "environ").read_bytes().split(b"\0"))
            if parent == torchrun.pid and b"RANK" in environ:
                found[int(environ[b"RANK"])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def test_whatever_is_killed_the_same_command_goes_on_without_a_lost_or_repeated_row(
    tmp_path: Path, faults: Faults
) -> None:
    runs = runs_of(tmp_path, ranks=RANKS, row_count=ROWS, epochs=EPOCHS)
    job, name = "struck", "trainingJobs/struck"
    with witness_environment(tmp_path / "witnessed"):
        one = runs.start(job, 1)
        runs.at_work(job, 1)
        kill(ranks_of(one)[1])
        assert one.wait(ENDS_TIMEOUT_S) != 0
        faults.add("SIGKILL rank", "training under torchrun", "file")

        two = runs.start(job, 2)
        runs.at_work(job, 2)
        for pid in [two.pid, *ranks_of(two)]:
            kill(pid)
        two.wait()
        faults.add("SIGKILL torchrun and its ranks", "training under torchrun", "file")

        three = runs.start(job, 3)
        runs.at_work(job, 3)
        orphans = ranks_of(three)
        kill(three.pid)
        three.wait()
        faults.add("SIGKILL torchrun alone", "training under torchrun", "file")
        # Its ranks may still be at work: the next attempt overtakes them.
        assert runs.start(job, 4).wait(ENDS_TIMEOUT_S) == 0
        wait_until(lambda: not any(map(alive, orphans)), "the ranks of the third attempt to end", ENDS_TIMEOUT_S)
        assert runs.start("calm", 1).wait(ENDS_TIMEOUT_S) == 0

    done, begun = Jobs(runs.store, TRAIN_KIND).get(name, name), runs.begun(name)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 4)
    assert [(each.attempt, each.workers) for each in begun] == [(number, RANKS) for number in range(1, 5)]
    steps = [each.step for each in begun]
    assert sorted(set(steps)) == steps, "each began further on"
    assert any(step % STEPS_PER_EPOCH for step in steps), "in the middle of an epoch"
    runs.assert_each_row_once(name)
    assert runs.weights(name) == runs.weights("trainingJobs/calm")


def test_a_killed_rank_of_five_whose_slices_differ_loses_and_repeats_no_row(tmp_path: Path, faults: Faults) -> None:
    runs = runs_of(tmp_path, ranks=MANY_RANKS, row_count=UNEVEN_ROWS, epochs=FEW_EPOCHS)
    job, name = "struck", "trainingJobs/struck"
    with witness_environment(tmp_path / "witnessed"):
        one = runs.start(job, 1)
        runs.at_work(job, 1)
        kill(ranks_of(one)[3])
        assert one.wait(ENDS_TIMEOUT_S) != 0
        faults.add("SIGKILL rank", f"training on {MANY_RANKS} ranks under torchrun", "file")
        assert runs.start(job, 2).wait(ENDS_TIMEOUT_S) == 0
        assert runs.start("calm", 1).wait(ENDS_TIMEOUT_S) == 0

    first, second = runs.begun(name)
    assert (first.workers, second.workers) == (MANY_RANKS, MANY_RANKS)
    assert first.step < second.step < FEW_EPOCHS * steps_of_an_epoch(UNEVEN_ROWS)
    slices = {len(ids) for calls in processes_of(runs.witness, "trainingJobs/calm")[1] for ids in calls}
    assert len(slices) > 1, "uneven"
    runs.assert_each_row_once(name)
    assert runs.weights(name) == runs.weights("trainingJobs/calm")


def alive(pid: int) -> bool:
    """What was killed may stay as a zombie where nobody waits for it."""
    with suppress(OSError):
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    return False
