"""Sharded, in half precision, compiled, in local mode, or with rows that Ray Data prepares: a run of whose processes
some are killed reads every row once an epoch, and ends with the weights of an undisturbed run on as many workers.

As `test_train_exactly_once` has it for runs of the plainest kind; that the two runs' weights are equal shows besides
that such runs are the same whenever they are done.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from millrace.common.v1 import transform_pb2
from millrace.train.v1 import resources_pb2 as res
from shared.settings import StoreSettings
from tests.support import custom_functions
from tests.support.data_place import Gate
from tests.support.faults import Faults
from tests.support.numbered_rows import ROWS, STEPS_PER_EPOCH, lone_processes
from tests.support.waiting import wait_until
from tests.support.witnessed import (
    BATCHES_TIMEOUT_S,
    Account,
    WitnessedStack,
    account_of,
    killed_beside_undisturbed,
    witnessed_spec,
    witnessed_stack,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

SEED, WORKERS, KILLS, EPOCHS = 23, 2, 2, 2
KINDS: dict[str, dict[str, Any]] = {
    "FSDP": {"placement": res.Placement(parallel="FSDP")},
    "rows by Ray Data": {"ingest": res.TrainingSpec.INGEST_RAY_DATA},
    "bfloat16": {"precision": res.TrainingSpec.PRECISION_BFLOAT16},
    "float16": {"precision": res.TrainingSpec.PRECISION_FLOAT16},
    # Of fewer kinds of layers: compiling takes most of its time.
    "compiled": {"compile": True, "model": res.Model(builder="torchvision.squeezenet1_1")},
}
ATTEMPT, PREPARES = "ray::AttemptActor.run", "ray::MapBatches(prepare:"
# Actors that Ray Data keeps beside its streams, which are threads of the workers.
RAY_DATAS_OWN = ("ray::_StatsActor", "ray::_AutoscalingCoordinatorActor")
SLOW = f"{custom_functions.MODULE}:slow"
STRUCK_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def place(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WitnessedStack]:
    """Its workers inherit where the gate is."""
    assert gate
    folder: Path = tmp_path_factory.mktemp("kinds")
    with (
        mock.patch.dict(os.environ, {"MILLRACE_CUSTOM_TRANSFORMS": SLOW}),
        witnessed_stack(StoreSettings(url=(folder / "store").as_uri()), folder) as started,
    ):
        yield started


@pytest.mark.parametrize("kind", KINDS)
def test_killed_workers_lose_and_repeat_no_row_and_change_no_bit(
    place: WitnessedStack, faults: Faults, kind: str
) -> None:
    proof = killed_beside_undisturbed(
        place, workers=WORKERS, kills=KILLS, epochs=EPOCHS, seed=SEED, changes=KINDS[kind]
    )
    faults.add("SIGKILL worker", f"training, {kind}", "file", len(proof.strikes))
    proof.publish(f"kills-{kind.replace(' ', '-')}", seed=SEED)

    assert_the_same(proof.disturbed, proof.undisturbed, EPOCHS)
    assert (proof.disturbed.attempts, proof.undisturbed.attempts) == (KILLS + 1, 1)
    assert any(step % STEPS_PER_EPOCH for step in proof.disturbed.began_at), "resumed in the middle of an epoch"


def assert_the_same(struck: Account, calm: Account, epochs: int) -> None:
    assert (struck.missing_rows, struck.repeated_rows) == (calm.missing_rows, calm.repeated_rows) == (0, 0)
    assert struck.reported == calm.reported == (ROWS * epochs, 0, 0)
    assert struck.weights_sha256 == calm.weights_sha256


def test_killed_tasks_that_prepare_rows_lose_and_repeat_no_row_and_end_no_attempt(
    place: WitnessedStack, gate: Gate, faults: Faults
) -> None:
    client = place.stack.client
    spec = witnessed_spec(epochs=EPOCHS, workers=WORKERS, ingest=res.TrainingSpec.INGEST_RAY_DATA)
    spec.transform.steps.add().custom.MergeFrom(transform_pb2.Custom(function=SLOW, columns=["image"]))
    spec.transform.steps.reverse()
    with gate.slow():
        job = client.create(spec)
        client.watch(job.name).until("attempt_started")
        for _ in range(3):
            # The first ones import for seconds, later ones take half a second each.
            faults.add("SIGKILL preparing tasks", "training, rows by Ray Data", "file", kill(place, PREPARES))
        for helper in RAY_DATAS_OWN:
            faults.add(f"SIGKILL {helper}", "training, rows by Ray Data", "file", kill(place, helper))
    client.finished(job.name)
    calm = client.create(spec)
    client.finished(calm.name)

    struck, undisturbed = account_of(place, job.name), account_of(place, calm.name)
    assert_the_same(struck, undisturbed, EPOCHS)
    assert struck.attempts == 1


def test_in_local_mode_the_killed_process_of_an_attempt_loses_and_repeats_no_row(
    place: WitnessedStack, faults: Faults
) -> None:
    client, spec, before = place.stack.client, witnessed_spec(epochs=EPOCHS, workers=0), files(place)
    job = client.create(spec)
    watch = client.watch(job.name, timeout_s=900)
    for attempt in range(1, KILLS + 1):
        watch.until("attempt_started", lambda event, attempt=attempt: event.attempt == attempt)  # type: ignore[misc]
        enough = place.batches() + 7 * attempt
        wait_until(lambda enough=enough: place.batches() >= enough, "some batches", BATCHES_TIMEOUT_S)  # type: ignore[misc]
        faults.add("SIGKILL attempt", "training, local mode", "file", kill(place, ATTEMPT))
    watch.rest()
    struck = lone_processes(place.witness, before)
    before = files(place)
    calm = client.create(spec)
    client.finished(calm.name)

    account = account_of(place, job.name, struck)
    assert_the_same(account, account_of(place, calm.name, lone_processes(place.witness, before)), EPOCHS)
    assert account.attempts == KILLS + 1
    assert any(step % STEPS_PER_EPOCH for step in account.began_at), "resumed in the middle of an epoch"


def files(place: WitnessedStack) -> Sequence[Path]:
    return list(place.witness.glob("*.jsonl"))


def kill(place: WitnessedStack, title: str) -> int:
    """Kill the processes whose title begins so, once there are any. How many it struck, which is never none."""
    struck: list[int] = []

    def strike() -> bool:
        for pid in place.head.processes(title):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                struck.append(pid)
        return bool(struck)

    wait_until(strike, f"a process {title}", STRUCK_TIMEOUT_S, interval_s=0.01)
    return len(struck)
