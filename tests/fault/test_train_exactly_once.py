"""A run whose workers are killed ten times reads every row once an epoch, and ends with the weights of one left alone.

The proof rests on ids in the pixels, which a training step of an installed package writes down.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millrace.train.v1 import train_service_pb2 as pb
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.support.example import install_example
from tests.support.ray_head import RayHead, ray_head
from tests.support.training import State, TrainStack, Watch, digits_spec, train_stack
from tests.support.versions import commit_version, striped_digits
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]

VERSION = "datasets/numbered/versions/v1"
ROWS, BATCH, EPOCHS, WORKERS = 600, 30, 12, 2
STEPS_PER_EPOCH = ROWS // BATCH
KILLS = 10
SEED = 11


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example(tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="module")
def stack(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainStack, RayHead, Path]]:
    folder = tmp_path_factory.mktemp("exactly-once")
    (folder / "witness").mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(site))
        environment.setenv("MILLRACE_WITNESS", str(folder / "witness"))
        settings = StoreSettings(url=(folder / "store").as_uri())
        images, labels = striped_digits(ROWS)
        digits = np.array([[int(digit, 16) for digit in f"{row:04x}"] for row in range(ROWS)], np.uint8)
        images[:, 0, :4] = digits * 17
        commit_version(open_store(settings), VERSION, {"train": (images, labels)})
        with ray_head(num_cpus=4) as head, train_stack(settings, head.address, folder) as started:
            yield started, head, folder / "witness"


def test_ten_kills_lose_and_repeat_no_row_and_change_no_bit(
    stack: tuple[TrainStack, RayHead, Path],
) -> None:
    started, head, witness = stack
    client = started.client
    spec = digits_spec(
        dataset_version=VERSION,
        epochs=EPOCHS,
        global_batch_size=BATCH,
        num_workers=WORKERS,
        checkpoint_every_steps=3,
        max_failures=2 * KILLS,
        training_step="witness",
    )
    del spec.transform.steps[1:]  # to_float alone: the pixels stay what they are

    job = client.create(spec)
    watch = client.watch(job.name, within_s=2000)
    chance = random.Random(SEED)
    for kill in range(KILLS):
        attempt = kill + 1
        _await_attempt(watch, attempt)
        # Somewhere within what is left, counted from here: seeded, and different each time.
        at_least = 1 + chance.randrange(7)
        _await_batches(witness, WORKERS * at_least)
        os.kill(chance.choice(sorted(head.processes("ray::RayTrainWorker"))), signal.SIGKILL)
    watch.rest()
    done = client.get(job.name)
    assert done.state == State.STATE_SUCCEEDED, done
    assert done.attempt == KILLS + 1

    counts = _counted(witness, watch)
    for epoch in range(EPOCHS):
        assert [row for row in range(ROWS) if counts[epoch][row] != 1] == [], f"epoch {epoch}"
        coverage = client.rpc.GetCoverage(pb.GetCoverageRequest(name=job.name, epoch=epoch), timeout=60)
        assert (coverage.seen_once, coverage.missing, coverage.repeated) == (ROWS, 0, 0)

    calm = client.create(spec)
    assert client.finished(calm.name).attempt == 1
    assert started.weights(f"{job.name}/checkpoints/final") == started.weights(f"{calm.name}/checkpoints/final")


def _await_attempt(watch: Watch, attempt: int) -> None:
    watch.until("attempt_started", lambda event: event.attempt == attempt)


def _await_batches(witness: Path, count: int) -> None:
    def batches() -> int:
        return sum(len(path.read_text().splitlines()) for path in witness.glob("*.jsonl"))

    before = batches()
    wait_until(lambda: batches() >= before + count, "some batches", 300.0)


def _counted(folder: Path, watch: Watch) -> list[Counter[int]]:
    """How often each row went into the weights, by epoch: of each attempt the steps up to where the next one began."""
    processes = [
        [(entry["time"], entry["ids"]) for entry in map(json.loads, path.read_text().splitlines())]
        for path in folder.glob("*.jsonl")
    ]
    begun = [event for event in watch.events if event.WhichOneof("event") == "attempt_started"]
    ends = [event.attempt_started.step for event in begun[1:]] + [EPOCHS * STEPS_PER_EPOCH]
    times = [event.time.ToNanoseconds() / 1e9 for event in begun] + [float("inf")]
    counts: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]
    for event, end, (after, before) in zip(begun, ends, itertools.pairwise(times), strict=True):
        ranks = [batches for batches in processes if after <= batches[0][0] < before]
        assert len(ranks) in (0, WORKERS), f"attempt {event.attempt} ran in {len(ranks)} processes"
        first = event.attempt_started.step
        for batches in ranks:
            for step, (_, ids) in zip(range(first, end), batches, strict=False):
                counts[step // STEPS_PER_EPOCH].update(ids)
    return counts
