"""Two engines, one order: what Ray Data's tasks prepare is, batch for batch, what the worker's own thread would."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from shared import ray_data_stream
from shared.dataset_version import VersionReader, load_version
from shared.errors import InvalidArgument, Unavailable
from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.process_states import stop_process
from tests.support.ray_head import RayHead
from tests.support.versions import commit_version, striped_digits
from train_service.domain.order import BatchPlan
from train_service.domain.spec import TrainingSpec
from train_service.loading import cluster_loader
from train_service.loading.cluster_loader import ClusterLoader
from train_service.loading.loader import Batch, Loader, RowCache
from train_service.loading.preprocessing import Preprocessing

VERSION = "datasets/digits/versions/v1"
ROWS = 3000
# More than one window a lane, and an augmentation, which is drawn for each row.
LANES = 2
SPEC = TrainingSpec(
    dataset_version=VERSION,
    transform={"steps": [{"randomFlip": {"horizontalProbability": 0.5}}, {"toFloat": {}}]},
    model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
    epochs=2,
    global_batch_size=70,
)


@pytest.fixture(scope="module")
def store(train_ray: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    folder: Path = tmp_path_factory.mktemp("cluster-loader")
    store = open_store(StoreSettings(url=(folder / "store").as_uri()))
    commit_version(store, VERSION, {"train": striped_digits(ROWS)})
    ray.init(address=train_ray.address, log_to_driver=False)
    yield store
    ray.shutdown()


def both(store: ObjectStore, rank: int, world_size: int, spec: TrainingSpec = SPEC) -> tuple[Loader, Loader]:
    version = load_version(store, VERSION)
    preprocessing = Preprocessing(spec, version.columns)
    reader, classes = VersionReader(store, version), spec.model.num_classes
    cache = RowCache(reader, "train", preprocessing.columns, "label", classes, 1 << 28)
    plan = BatchPlan(5, LANES, spec.global_batch_size, spec.epochs, rank, world_size)
    # Small pieces: steps lie across them, and a task makes many.
    cluster = ClusterLoader(cache, preprocessing, plan, spec, store.settings, piece_bytes=1 << 20, run="r")
    return Loader(cache, preprocessing, plan), cluster


def same(one: Batch, other: Batch) -> bool:
    return (one.step, one.epoch, one.step_rows) == (other.step, other.epoch, other.step_rows) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("inputs", "labels", "row_ids")
    )


@pytest.mark.parametrize(("rank", "world_size", "first_step"), [(0, 1, 0), (1, 2, 31)])
def test_both_engines_give_identical_batches(store: ObjectStore, rank: int, world_size: int, first_step: int) -> None:
    threads, cluster = both(store, rank, world_size)

    made = list(cluster.batches(first_step))

    wanted = list(threads.batches(first_step))
    assert len(made) == len(wanted) == threads.total_steps - first_step
    assert all(map(same, made, wanted))
    assert made[0].inputs.flags.writeable


def test_a_run_that_stops_early_leaves_no_task(store: ObjectStore) -> None:
    _, cluster = both(store, 0, 1)

    with closing(cluster.batches(0)) as batches:
        assert len(list(islice(batches, 2))) == 2

    assert len(list(islice(cluster.batches(0), 1))) == 1, "and another can begin"


class Clock:
    """The machine's clock, until it runs faster."""

    def __init__(self) -> None:
        self._rate = 1.0
        self._since = self._shown = time.monotonic()

    def run_faster(self, rate: float) -> None:
        self._shown, self._since = self.monotonic(), time.monotonic()
        self._rate = rate

    def monotonic(self) -> float:
        return self._shown + (time.monotonic() - self._since) * self._rate

    def time(self) -> float:
        return time.time() + self.monotonic() - time.monotonic()


def test_a_task_that_stands_still_on_the_last_free_cpu_is_reported_as_a_fault(
    store: ObjectStore, train_ray: RayHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a want of room: that ends no run, however often it comes."""
    clock = Clock()
    monkeypatch.setattr(cluster_loader, "time", clock)
    monkeypatch.setattr(cluster_loader, "ASKED_TIMEOUT_S", 120)
    monkeypatch.setattr(ray_data_stream, "TASKS_END_TIMEOUT_S", 1.0)
    others = placement_group([{"CPU": 1}] * 3)
    assert others.wait(60)
    _, cluster = both(store, 0, 1, replace(SPEC, epochs=400))
    stopped: list[int] = []
    try:
        with closing(cluster.batches(0)) as batches:
            # As batches are taken, for else enough is prepared soon.
            while not (stopped := train_ray.processes("ray::MapBatches(prepare:r)")):
                next(batches)
            for pid in stopped:
                stop_process(pid)
            clock.run_faster(cluster_loader.NEXT_TIMEOUT_S / 10.0)
            with pytest.raises(Unavailable) as raised:
                list(batches)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        remove_placement_group(others)

    assert raised.value.specific_reason == "PREPARATION_STALLED", raised.value


def test_a_row_that_cannot_be_prepared_is_reported_as_by_the_other_engine(store: ObjectStore) -> None:
    spec = replace(SPEC, model=replace(SPEC.model, num_classes=5))
    threads, cluster = both(store, 0, 1, spec)
    with pytest.raises(InvalidArgument) as wanted:
        list(threads.batches(0))

    with pytest.raises(InvalidArgument) as raised:
        list(cluster.batches(0))

    assert raised.value.specific_reason == wanted.value.specific_reason == "LABEL_OUT_OF_RANGE"
