"""Batches are a pure function of position: whoever seeks to a step gets what a walk to it would have met."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.transforms import RowKeys
from tests.support.versions import SCHEMA, columns_of, striped_digits
from tests.support.waiting import wait_until
from tests.unit.train_service.conftest import TRAIN_ROWS, VERSION, Committed
from train_service.domain.order import WINDOW_ROWS, BatchPlan, Ints, blocks_of, epoch_order, rank_positions, step_bounds
from train_service.domain.spec import TrainingSpec
from train_service.loading.loader import Batch, Loader, RowCache
from train_service.loading.preprocessing import Array, Preprocessing, RowBuffers, Rows

# The version is only ever read, so examples may share it.
SHARED = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**64 - 1)


SPEC = TrainingSpec(
    dataset_version=VERSION,
    transform={"steps": [{"toFloat": {}}]},
    model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
    epochs=1,
    global_batch_size=64,
)


def to_float() -> Preprocessing:
    return Preprocessing(SPEC, columns_of(SCHEMA))


def loader(
    committed: Committed,
    *,
    seed: int = 3,
    lanes: int = 24,
    global_batch: int = 64,
    epochs: int = 2,
    rank: int = 0,
    world_size: int = 1,
    capacity: int = 2**30,
    window_rows: int = WINDOW_ROWS,
) -> Loader:
    plan = BatchPlan(seed, lanes, global_batch, epochs, rank, world_size, window_rows)
    return Loader(committed.cache(capacity=capacity), to_float(), plan)


def same(one: Batch, other: Batch) -> bool:
    return (one.step, one.epoch, one.step_rows) == (other.step, other.epoch, other.step_rows) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("inputs", "labels", "row_ids")
    )


@SHARED
@given(SEEDS, st.integers(1, 48), st.integers(20, 300), st.integers(1, 3), st.integers(0, 2))
def test_seeking_to_a_step_gives_the_batches_that_walking_there_gives(
    committed: Committed, seed: int, lanes: int, global_batch: int, world_size: int, rank: int
) -> None:
    def made() -> Loader:
        return loader(
            committed,
            seed=seed,
            lanes=max(lanes, world_size),
            global_batch=global_batch,
            rank=rank % world_size,
            world_size=world_size,
        )

    walked = list(made().batches(0))

    for first in {0, 1, len(walked) // 2 - 1, len(walked) // 2, len(walked) // 2 + 1, len(walked) - 1, len(walked)}:
        sought = list(made().batches(first))
        assert len(sought) == len(walked) - first
        assert all(same(one, other) for one, other in zip(sought, walked[first:], strict=True))


@SHARED
@given(SEEDS, st.integers(3, 48), st.integers(20, 300))
def test_workers_together_compute_the_same_rows_in_each_step_whatever_their_number(
    committed: Committed, seed: int, lanes: int, global_batch: int
) -> None:
    def steps(world_size: int) -> list[list[int]]:
        ranks = [
            loader(committed, seed=seed, lanes=lanes, global_batch=global_batch, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        walked = [[batch.row_ids.tolist() for batch in one.batches(0)] for one in ranks]
        return [sorted(chain(*parts)) for parts in zip(*walked, strict=True)]

    alone = steps(1)

    assert steps(2) == alone
    assert steps(3) == alone
    per_epoch = len(alone) // 2
    for epoch in (alone[:per_epoch], alone[per_epoch:]):
        assert sorted(chain(*epoch)) == list(range(TRAIN_ROWS))
        assert max(map(len, epoch)) - min(map(len, epoch)) <= 1
    assert alone[:per_epoch] != alone[per_epoch:]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_batches_that_cross_shuffle_windows_have_the_rows_of_the_order(committed: Committed, world_size: int) -> None:
    lanes, seed = 12, 5
    ranks = [
        loader(committed, seed=seed, lanes=lanes, global_batch=100, rank=rank, world_size=world_size, window_rows=7)
        for rank in range(world_size)
    ]
    epochs = [
        epoch_order(blocks_of(committed.cache().row_groups, lanes), lanes, seed, epoch, 7).rows(np.arange(TRAIN_ROWS))
        for epoch in range(2)
    ]

    for rank, one in enumerate(ranks):
        for batch in one.batches(0):
            of_epoch = batch.step - batch.epoch * one.steps_per_epoch
            begin, end = step_bounds(TRAIN_ROWS, one.steps_per_epoch, of_epoch)
            planned = epochs[batch.epoch][rank_positions(begin, end, lanes, rank, world_size)]
            assert batch.row_ids.tolist() == planned.tolist()


@pytest.mark.parametrize(("lanes", "window_rows"), [(3, 233), (349, 2)])
def test_ranks_without_a_row_in_the_last_window_go_on_and_no_window_is_written_over_another(
    committed: Committed, lanes: int, window_rows: int
) -> None:
    images, labels = striped_digits(TRAIN_ROWS)
    ranks = [
        loader(committed, lanes=lanes, window_rows=window_rows, epochs=1, rank=rank, world_size=3) for rank in range(3)
    ]

    batches = [batch for one in ranks for batch in one.batches(0)]

    assert sorted(chain.from_iterable(batch.row_ids.tolist() for batch in batches)) == list(range(TRAIN_ROWS))
    for batch in batches:
        assert np.array_equal(np.rint(batch.inputs[:, 0] * 255), images[batch.row_ids])
        assert np.array_equal(batch.labels, labels[batch.row_ids])


def test_each_row_arrives_with_its_own_pixels_and_label(committed: Committed) -> None:
    images, labels = striped_digits(TRAIN_ROWS)

    for batch in loader(committed, epochs=1).batches(0):
        assert np.array_equal(batch.labels, labels[batch.row_ids])
        assert np.array_equal(batch.inputs, images[batch.row_ids][:, None].astype(np.float32) / np.float32(255))
        assert batch.inputs.dtype == np.float32
        assert batch.step_rows == len(batch.labels)


def test_a_cache_too_small_for_the_split_changes_no_batch(committed: Committed) -> None:
    roomy, tight = loader(committed).batches(0), loader(committed, capacity=1).batches(0)

    assert all(same(one, other) for one, other in zip(roomy, tight, strict=True))


def test_a_loader_can_be_walked_again(committed: Committed) -> None:
    one = loader(committed, epochs=1)
    first = [batch.row_ids.tolist() for batch in one.batches(0)]

    assert [batch.row_ids.tolist() for batch in one.batches(0)] == first


def test_the_windows_of_all_epochs_use_the_same_memory(committed: Committed, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is slow at its first use, and the GPU would wait for it at the beginning of each epoch."""
    addresses: list[int] = []
    rows_of = RowCache.rows

    def noted(cache: RowCache, positions: Ints, into: RowBuffers | None = None) -> Rows:
        rows = rows_of(cache, positions, into)
        assert into is not None
        addresses.append(into["image"].ctypes.data)
        return rows

    monkeypatch.setattr(RowCache, "rows", noted)
    kept = [batch.row_ids for batch in loader(committed, epochs=3).batches(0)]

    assert len(addresses) == 3
    assert len(set(addresses)) == 1
    assert sum(map(len, kept)) == 3 * TRAIN_ROWS


def test_an_error_of_reading_is_raised_where_the_batches_are_taken(committed: Committed) -> None:
    plan = BatchPlan(3, 24, 64, 1, 0, 1)

    with pytest.raises(InvalidArgument, match="num_classes"):
        list(Loader(committed.cache(num_classes=9), to_float(), plan).batches(0))


def test_the_reading_thread_ends_when_nobody_takes_batches_any_more(committed: Committed) -> None:
    before = set(threading.enumerate())

    def reading() -> list[threading.Thread]:
        return [thread for thread in set(threading.enumerate()) - before if thread.name == "loader"]

    batches: Iterator[Batch] = loader(committed, epochs=100).batches(0)
    assert len(list(islice(batches, 3))) == 3
    assert reading()

    del batches
    gc.collect()

    wait_until(lambda: not reading(), "the loader's thread to end")


class Choosy(Preprocessing):
    """Takes all rows but one, and counts its calls."""

    refused, calls = -1, 0

    def __call__(self, rows: Rows, keys: RowKeys | None = None) -> Array:
        self.calls += 1
        if self.refused in rows.row_ids:
            raise InvalidArgument(f"row {self.refused} is refused")
        return super().__call__(rows, keys)


def test_the_batches_before_a_row_that_is_refused_are_given(committed: Committed) -> None:
    wanted = list(loader(committed).batches(0))
    choosy = Choosy(SPEC, columns_of(SCHEMA))
    choosy.refused = int(wanted[6].row_ids[5])
    given: list[Batch] = []

    with pytest.raises(InvalidArgument, match="is refused"):
        given.extend(Loader(committed.cache(), choosy, BatchPlan(3, 24, 64, 2, 0, 1)).batches(0))

    assert len(given) == 6
    assert all(map(same, given, wanted))


def test_small_batches_are_prepared_together(committed: Committed) -> None:
    choosy = Choosy(SPEC, columns_of(SCHEMA))
    given = list(Loader(committed.cache(), choosy, BatchPlan(3, 24, 64, 2, 0, 1)).batches(0))

    assert choosy.calls < len(given) / 2
    assert all(map(same, given, loader(committed).batches(0)))
