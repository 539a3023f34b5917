"""Rows of similar length share steps; each row is still trained once an epoch, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shared.dataset_version import DatasetVersion, load_version
from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.transforming import commit_tables
from train_service.domain.order import grouped_by_length
from train_service.domain.spec import TrainingSpec
from train_service.loading.loader import Batch, LoaderFactory
from train_service.loading.preprocessing import fitted

VERSION = "datasets/texts/versions/v1"
ROWS, LENGTH = 700, 32
SPEC = TrainingSpec(
    dataset_version=VERSION,
    input_column="x",
    transform={"steps": [{"concat": {"columns": ["ids", "mask"], "into": "x"}}]},
    model=ModelSpec(builder="mlp", in_channels=2 * LENGTH, num_classes=2),
    group_by_length="mask",
    epochs=2,
    global_batch_size=48,
    seed=5,
    num_workers=3,
)


def table() -> pa.Table:
    lengths = np.random.default_rng(0).integers(1, LENGTH + 1, ROWS)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    return pa.table(
        {
            "ids": pa.FixedShapeTensorArray.from_numpy_ndarray(mask * 7),
            "mask": pa.FixedShapeTensorArray.from_numpy_ndarray(mask),
            "text": ["x" * length for length in lengths.tolist()],
            "share": lengths / LENGTH,
            "label": pa.array([0] * ROWS),
        }
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    store = open_store(StoreSettings(url=(tmp_path_factory.mktemp("texts") / "store").as_uri()))
    commit_tables(store, {"train": table()}, VERSION)
    return store


def version(store: ObjectStore) -> DatasetVersion:
    return load_version(store, VERSION)


def batches(
    store: ObjectStore, spec: TrainingSpec = SPEC, rank: int = 0, ranks: int = 1, first: int = 0
) -> list[Batch]:
    loader = LoaderFactory(store, version(store), spec).loader(rank, ranks)
    return list(loader.batches(first))


def widths(made: Sequence[Batch]) -> list[int]:
    """Tokens that each step computes: its rows times the longest of them."""
    return [len(batch.inputs) * int(batch.inputs[:, LENGTH:].sum(1).max()) for batch in made]


def steps_of(made: Sequence[Batch]) -> list[list[int]]:
    return [sorted(batch.row_ids.tolist()) for batch in made]


def test_each_epoch_has_each_row_once_and_another_order(texts: ObjectStore) -> None:
    made = steps_of(batches(texts))
    per_epoch = len(made) // 2

    for epoch in (made[:per_epoch], made[per_epoch:]):
        assert sorted(row for step in epoch for row in step) == list(range(ROWS))
    assert made[:per_epoch] != made[per_epoch:]


def test_the_longest_row_of_a_step_is_near_to_the_others(texts: ObjectStore) -> None:
    real = 2 * int(np.asarray([len(text) for text in table()["text"].to_pylist()]).sum())

    grouped, plain = sum(widths(batches(texts))), sum(widths(batches(texts, replace(SPEC, group_by_length=""))))

    assert plain > 1.8 * real
    assert grouped < 1.4 * real


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_has_the_same_rows_on_any_number_of_workers(texts: ObjectStore, ranks: int) -> None:
    alone = steps_of(batches(texts))

    shares = [steps_of(batches(texts, rank=rank, ranks=ranks)) for rank in range(ranks)]

    assert [sorted(row for share in step for row in share) for step in zip(*shares, strict=True)] == alone


@pytest.mark.parametrize("first", [1, 7, 16])
def test_a_resumed_run_goes_on_with_the_same_batches(texts: ObjectStore, first: int) -> None:
    whole = batches(texts)

    for one, other in zip(batches(texts, first=first), whole[first:], strict=True):
        assert one.step == other.step
        assert np.array_equal(one.row_ids, other.row_ids)
        assert one.inputs.tobytes() == other.inputs.tobytes()


def test_the_order_in_several_windows_is_as_exact(texts: ObjectStore) -> None:
    small = replace(SPEC, window_rows=16)

    made, parts = batches(texts, small), [batches(texts, small, rank, 2) for rank in range(2)]

    assert sorted(row for step in steps_of(made[: len(made) // 2]) for row in step) == list(range(ROWS))
    assert [sorted([*one, *other]) for one, other in zip(*map(steps_of, parts), strict=True)] == steps_of(made)


def test_texts_group_as_their_tokens_do(texts: ObjectStore) -> None:
    by_text: dict[str, Any] = {"oneHotEncode": {"categories": ["x"], "unknown": "UNKNOWN_VALUE_ENCODE"}}
    steps = [{"column": "text", **by_text}, {"concat": {"columns": ["text", "ids", "mask"], "into": "x"}}]
    spec = replace(SPEC, transform={"steps": steps}, group_by_length="text")

    same = zip(steps_of(batches(texts, spec)), steps_of(batches(texts)), strict=True)

    assert all(one == other for one, other in islice(same, 5))


@pytest.mark.parametrize("column", ["nothing", "share", "text"])
def test_a_column_without_lengths_or_that_is_not_read_is_refused(texts: ObjectStore, column: str) -> None:
    steps = [{"concat": {"columns": ["ids", "mask", "share"], "into": "x"}}]
    model = replace(SPEC.model, in_channels=2 * LENGTH + 1)

    with pytest.raises(InvalidArgument, match=rf"spec\.group_by_length: '{column}'.*use one of ids, mask"):
        fitted(texts, replace(SPEC, transform={"steps": steps}, model=model, group_by_length=column))


def test_rows_of_one_chunk_stand_together_and_equal_ones_keep_their_order() -> None:
    shuffle, lengths = np.asarray([3, 0, 2, 1, 4]), np.asarray([5, 1, 5, 1, 9])

    made = grouped_by_length(shuffle, lengths, 2, np.asarray([1, 0]))

    # By length: 3 and 1 of length 1, then 0 and 2 of length 5, and 4 of length 9, which is no whole chunk.
    assert made.tolist() == [0, 2, 3, 1, 4]
