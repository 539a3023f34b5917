"""Runs whose rows carry their ids in the pixels, and the account of them that a training step writes.

So the proof that no row is lost or read twice rests on pixels, the names of Ray's runs and the bytes of weights.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.support.example import install_example
from tests.support.ray_head import RayHead, ray_head
from tests.support.training import TrainStack, Watch, digits_spec, train_stack
from tests.support.versions import commit_version, striped_digits
from tests.support.waiting import wait_until
from train_service.rows import Array

VERSION = "datasets/numbered/versions/v1"
ROWS, BATCH = 600, 30
STEPS_PER_EPOCH = ROWS // BATCH
WORKER = "ray::RayTrainWorker"
ATTEMPT_WITHIN_S = 2000.0
BATCHES_WITHIN_S = 300.0


@dataclass
class WitnessedStack:
    """A train service on a Ray head of its own, and the folder in which training steps write what they are given."""

    stack: TrainStack
    head: RayHead
    witness: Path

    def batches(self) -> int:
        """That all processes were given so far."""
        return sum(len(path.read_text().splitlines()) for path in self.witness.glob("*.jsonl"))

    def processes_of(self, job_name: str) -> dict[int, list[list[list[int]]]]:
        """By attempt, and of each of its processes: the ids of its batches, in order."""
        found: dict[int, list[list[list[int]]]] = {}
        for path in self.witness.glob("*.jsonl"):
            # A process that was killed may have left a torn line.
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
            job_id, _, attempt = entries[0]["run"].rpartition("-attempt-") if entries else ("", "", "")
            if job_id == job_name.rpartition("/")[2]:
                found.setdefault(int(attempt), []).append([entry["ids"] for entry in entries])
        return found


@contextmanager
def witness_environment(folder: Path) -> Iterator[Path]:
    """For what is started meanwhile: the example package, and the folder of its witness, which is returned."""
    witness = folder / "witness"
    witness.mkdir(parents=True)
    environ = {"PYTHONPATH": str(install_example(folder / "example")), "MILLRACE_WITNESS": str(witness)}
    with mock.patch.dict(os.environ, environ):
        yield witness


@contextmanager
def witnessed_stack(settings: StoreSettings, folder: Path, *, num_cpus: int = 4) -> Iterator[WitnessedStack]:
    with witness_environment(folder) as witness:
        commit_version(open_store(settings), VERSION, {"train": numbered_digits()})
        with (
            ray_head(num_cpus=num_cpus) as head,
            train_stack(settings, head.address, folder) as stack,
        ):
            yield WitnessedStack(stack, head, witness)


def numbered_digits() -> tuple[Array, Array]:
    """600 images uint8 (600, 28, 28) whose first four pixels are the row's id, and their labels."""
    images, labels = striped_digits(ROWS)
    digits = np.array([[int(digit, 16) for digit in f"{row:04x}"] for row in range(ROWS)], np.uint8)
    images[:, 0, :4] = digits * 17
    return images, labels


def witnessed_spec(*, epochs: int, workers: int, checkpoint_every_steps: int = 3) -> res.TrainingSpec:
    """Of a network with 1.4 MB of weights, whose attempts may be lost as often as one likes."""
    spec = digits_spec(
        dataset_version=VERSION,
        epochs=epochs,
        global_batch_size=BATCH,
        num_workers=workers,
        checkpoint_every_steps=checkpoint_every_steps,
        max_failures=1000,
        training_step="witness",
    )
    del spec.transform.steps[1:]  # to_float alone: the pixels stay what they are
    return spec


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a run that has ended did. Rows are counted over all epochs, steps over all attempts."""

    attempts: int
    missing_rows: int
    repeated_rows: int
    recomputed_steps: int
    # What the service says of its coverage: rows seen once, missing and repeated.
    told: tuple[int, int, int]
    weights_sha256: str
    weights_bytes: int


def account_of(place: WitnessedStack, job_name: str) -> Account:
    """Which rows went into the weights: of each attempt the steps up to where the next one began."""
    client = place.stack.client
    job, watch = client.get(job_name), client.watch(job_name)
    watch.rest()
    begun = [(event.attempt, event.attempt_started) for event in watch.events if event.HasField("attempt_started")]
    total_steps = job.spec.epochs * STEPS_PER_EPOCH
    ends = [started.step for _, started in begun[1:]] + [total_steps]
    processes = place.processes_of(job_name)
    counts, steps_taken = Counter[tuple[int, int]](), 0
    for (attempt, started), end in zip(begun, ends, strict=True):
        first, workers = started.step, started.num_workers
        ranks = [_by_steps(calls, BATCH // workers) for calls in processes.get(attempt, [])]
        steps_taken += max(map(len, ranks), default=0)
        # One that was lost before its first checkpoint may have lost a rank before that one's first batch.
        assert end == first or len(ranks) == workers, f"attempt {attempt} ran in {len(ranks)} processes"
        for steps in ranks:
            for step, ids in zip(range(first, end), steps, strict=False):
                counts.update((step // STEPS_PER_EPOCH, row) for row in ids)
    weights = place.stack.weights(f"{job_name}/checkpoints/final")
    rows = [(epoch, row) for epoch in range(job.spec.epochs) for row in range(ROWS)]
    assert set(counts) <= set(rows), "ids that no row has"
    told = [
        client.rpc.GetCoverage(pb.GetCoverageRequest(name=job_name, epoch=epoch), timeout=60)
        for epoch in range(job.spec.epochs)
    ]
    return Account(
        attempts=job.attempt,
        missing_rows=sum(counts[row] == 0 for row in rows),
        repeated_rows=sum(counts[row] > 1 for row in rows),
        recomputed_steps=steps_taken - total_steps,
        told=(sum(one.seen_once for one in told), sum(one.missing for one in told), sum(one.repeated for one in told)),
        weights_sha256=hashlib.sha256(weights).hexdigest(),
        weights_bytes=len(weights),
    )


def _by_steps(calls: list[list[int]], rows: int) -> list[list[int]]:
    """The ids of a rank's calls by step, of which each has `rows`: 24 lanes are even among 1, 2 or 3 ranks, and so are
    the batches. A step may be computed in several calls; one that was cut off is left out."""
    ids = list(itertools.chain.from_iterable(calls))
    ends = set(itertools.accumulate(map(len, calls)))
    whole = range(rows, len(ids) + 1, rows)
    assert ends.issuperset(whole), "calls that are not of one step"
    return [ids[end - rows : end] for end in whole]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A run that was struck beside one of the same specification that was left alone."""

    workers: int
    strikes: list[str]
    disturbed: Account
    undisturbed: Account

    def figures(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "strikes": len(self.strikes),
            "attempts": self.disturbed.attempts,
            "missing_rows": self.disturbed.missing_rows,
            "repeated_rows": self.disturbed.repeated_rows,
            "recomputed_steps_per_kill": round(self.disturbed.recomputed_steps / len(self.strikes), 2),
            "weights_bytes": self.disturbed.weights_bytes,
            "disturbed_weights_sha256": self.disturbed.weights_sha256,
            "undisturbed_weights_sha256": self.undisturbed.weights_sha256,
        }

    def publish(self, name: str, **more: Any) -> None:
        """Prints it, and keeps it as `name`.json in MILLRACE_PROOF_DIR where that is set."""
        text = json.dumps({**self.figures(), **more}, indent=2)
        print(f"\n{name}: {text}")
        if folder := os.environ.get("MILLRACE_PROOF_DIR"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.json").write_text(text + "\n")


def killed_beside_undisturbed(place: WitnessedStack, *, workers: int, kills: int, epochs: int, seed: int) -> Proof:
    """Runs both, one after the other. Each attempt of the first loses a worker to SIGKILL at a seeded batch, until
    `kills` have been."""
    client = place.stack.client
    spec = witnessed_spec(epochs=epochs, workers=workers)
    job = client.create(spec)
    strikes = _kill_workers(place, client.watch(job.name, within_s=ATTEMPT_WITHIN_S), workers, kills, seed)
    watch = client.watch(job.name, within_s=ATTEMPT_WITHIN_S)
    watch.rest()
    calm = client.create(spec)
    client.finished(calm.name)
    return Proof(
        workers=workers,
        strikes=strikes,
        disturbed=account_of(place, job.name),
        undisturbed=account_of(place, calm.name),
    )


def _kill_workers(place: WitnessedStack, watch: Watch, workers: int, kills: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    strikes = []
    for attempt in range(1, kills + 1):
        watch.until("attempt_started", lambda event, attempt=attempt: event.attempt == attempt)  # type: ignore[misc]
        # Somewhere within what is left, counted from here: seeded, and different each time.
        enough = place.batches() + workers * (1 + chance.randrange(7))
        wait_until(lambda enough=enough: place.batches() >= enough, "some batches", BATCHES_WITHIN_S)  # type: ignore[misc]
        os.kill(chance.choice(sorted(place.head.processes(WORKER))), signal.SIGKILL)
        strikes.append(f"a worker of attempt {attempt}")
    watch.cancel()
    return strikes
