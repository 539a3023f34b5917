"""Runs whose rows carry their ids in the pixels, and the account of them that a training step writes.

So the proof that no row is lost or read twice rests on pixels, the names of Ray's runs and the bytes of weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.support.example import install_example
from tests.support.numbered_rows import (
    BATCH,
    ROWS,
    Begun,
    Processes,
    numbered_digits,
    processes_of,
    seen_in,
    steps_of_an_epoch,
)
from tests.support.ray_head import RayHead, ray_head
from tests.support.training import TrainStack, Watch, digits_spec, train_stack
from tests.support.versions import commit_version
from tests.support.waiting import wait_until

VERSION = "datasets/numbered/versions/v1"
WORKER = "ray::RayTrainWorker"
ATTEMPT_TIMEOUT_S = 2000.0
# The first batch may wait for a compilation.
BATCHES_TIMEOUT_S = 600.0


@dataclass
class WitnessedStack:
    """A train service on a Ray head of its own, and the folder in which training steps write what they are given."""

    stack: TrainStack
    head: RayHead
    witness: Path

    def batches(self) -> int:
        """That all processes were given so far."""
        return sum(len(path.read_text().splitlines()) for path in self.witness.glob("*.jsonl"))

    def processes_of(self, job_name: str) -> Processes:
        return processes_of(self.witness, job_name)


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


def witnessed_spec(
    *, epochs: int, workers: int, checkpoint_every_steps: int = 3, dataset_version: str = VERSION, **changes: Any
) -> res.TrainingSpec:
    """Of a network with 1.4 MB of weights, whose attempts may be lost as often as one likes."""
    spec = digits_spec(
        dataset_version=dataset_version,
        epochs=epochs,
        global_batch_size=BATCH,
        num_workers=workers,
        checkpoint_every_steps=checkpoint_every_steps,
        max_failures=1000,
        training_step="witness",
        **changes,
    )
    del spec.transform.steps[1:]  # to_float alone: the pixels stay what they are
    return spec


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a run that has ended did. Rows are counted over all epochs, steps over all attempts."""

    attempts: int
    # The steps that they began with.
    began_at: tuple[int, ...]
    missing_rows: int
    repeated_rows: int
    recomputed_steps: int
    # What the service says of its coverage: rows seen once, missing and repeated.
    reported: tuple[int, int, int]
    weights_sha256: str
    weights_bytes: int


def account_of(
    place: WitnessedStack, job_name: str, processes: Processes | None = None, row_count: int = ROWS
) -> Account:
    """Of a job that has ended; `processes` where they are not known by its name, `row_count` an epoch."""
    client = place.stack.client
    job, watch = client.get(job_name), client.watch(job_name)
    watch.rest()
    begun = [
        Begun(event.attempt, event.attempt_started.step, event.attempt_started.num_workers)
        for event in watch.events
        if event.HasField("attempt_started")
    ]
    seen = seen_in(begun, processes or place.processes_of(job_name), job.spec.epochs, row_count)
    weights = place.stack.weights(f"{job_name}/checkpoints/final")
    reported = [
        client.rpc.GetCoverage(pb.GetCoverageRequest(name=job_name, epoch=epoch), timeout=60)
        for epoch in range(job.spec.epochs)
    ]
    return Account(
        attempts=job.attempt,
        began_at=tuple(one.step for one in begun),
        missing_rows=seen.missing,
        repeated_rows=seen.repeated,
        recomputed_steps=seen.steps_taken - job.spec.epochs * steps_of_an_epoch(row_count),
        reported=(
            sum(one.seen_once for one in reported),
            sum(one.missing for one in reported),
            sum(one.repeated for one in reported),
        ),
        weights_sha256=hashlib.sha256(weights).hexdigest(),
        weights_bytes=len(weights),
    )


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
        """Print it, and keep it as `name`.json in MILLRACE_PROOF_DIR where that is set."""
        text = json.dumps({**self.figures(), **more}, indent=2)
        print(f"\n{name}: {text}")
        if folder := os.environ.get("MILLRACE_PROOF_DIR"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.json").write_text(text + "\n")


def killed_beside_undisturbed(
    place: WitnessedStack,
    *,
    workers: int,
    kills: int,
    epochs: int,
    seed: int,
    changes: Mapping[str, Any] = MappingProxyType({}),
    row_count: int = ROWS,
) -> Proof:
    """Run both, one after the other. Each attempt of the first loses a worker to SIGKILL at a seeded batch, until
    `kills` have been. `changes` are those of the specification, whose version has `row_count` rows."""
    client = place.stack.client
    spec = witnessed_spec(epochs=epochs, workers=workers, **changes)
    job = client.create(spec)
    with contextlib.ExitStack() as failed:
        failed.callback(client.cancel, job.name)  # it would take its workers from the next test, and be struck for it
        strikes = _kill_workers(place, client.watch(job.name, timeout_s=ATTEMPT_TIMEOUT_S), workers, kills, seed)
        client.watch(job.name, timeout_s=ATTEMPT_TIMEOUT_S).rest()
        failed.pop_all()
    calm = client.create(spec)
    client.finished(calm.name)
    return Proof(
        workers=workers,
        strikes=strikes,
        disturbed=account_of(place, job.name, row_count=row_count),
        undisturbed=account_of(place, calm.name, row_count=row_count),
    )


def _kill_workers(place: WitnessedStack, watch: Watch, workers: int, kills: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    strikes = []
    for attempt in range(1, kills + 1):
        watch.until("attempt_started", lambda event, attempt=attempt: event.attempt == attempt)  # type: ignore[misc]
        # Somewhere within what is left, counted from here: seeded, and different each time.
        enough = place.batches() + workers * (1 + chance.randrange(7))
        wait_until(lambda enough=enough: place.batches() >= enough, "some batches", BATCHES_TIMEOUT_S)  # type: ignore[misc]
        os.kill(chance.choice(sorted(place.head.processes(WORKER))), signal.SIGKILL)
        strikes.append(f"a worker of attempt {attempt}")
    watch.cancel()
    return strikes
