"""A program's shard gives every rank its rows of the version, in one order, from wherever the run goes on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from ray.data.collate_fn import NumpyBatchCollateFn

from shared.errors import FailedPrecondition, InvalidArgument
from shared.model_spec import ModelSpec
from tests.support.versions import striped_digits
from tests.unit.train_service.conftest import TRAIN_ROWS, VALIDATION_ROWS, VERSION, Committed
from train_service.domain.coverage_counts import count_given, is_epoch_done, merge_reports
from train_service.domain.order import blocks_of, epoch_order
from train_service.domain.spec import CONTINUE, KEEP, Program, TrainingSpec
from train_service.program.shards import ProgramShards, VersionShard

PROGRAM = Program(code_bundle=f"codeBundles/{'0' * 64}", entry="train:loop")
SPEC = TrainingSpec(
    dataset_version=VERSION,
    validation_split="validation",
    model=ModelSpec(builder="", in_channels=0, num_classes=0),
    epochs=0,
    global_batch_size=0,
    seed=3,
    window_rows=8,
    program=PROGRAM,
)
CONTINUING = replace(SPEC, program=replace(PROGRAM, data_resume=CONTINUE))
KEEPING = replace(SPEC, program=replace(PROGRAM, remainder=KEEP))
ROW_OF = {image.tobytes(): row for row, image in enumerate(striped_digits(TRAIN_ROWS)[0])}


class Ranks:
    """W ranks of one attempt, which report to the same checkpoint."""

    def __init__(
        self, committed: Committed, world_size: int, spec: TrainingSpec = SPEC, positions: dict[str, Any] | None = None
    ) -> None:
        self.before = positions or {}
        self.shards = [
            ProgramShards(committed.store, spec, rank, world_size, self.before) for rank in range(world_size)
        ]
        self.train: list[VersionShard] = [one.get("train") for one in self.shards]

    def read(self, batch_size: int = 16, batches: int | None = None) -> list[list[int]]:
        """The rows of the next pass by rank, or of its first `batches`."""
        return [rows_of(islice(shard.iter_batches(batch_size=batch_size), batches)) for shard in self.train]

    def report(self) -> dict[str, Any]:
        """The positions of a checkpoint that is taken now."""
        return merge_reports([[one.take() for one in self.shards]], len(self.shards), self.before)


def rows_of(batches: Iterable[Any]) -> list[int]:
    return [ROW_OF[image.tobytes()] for batch in batches for image in batch["image"]]


def order_of(committed: Committed, epoch: int) -> Any:
    blocks = blocks_of(committed.cache().row_groups, SPEC.lanes)
    return epoch_order(blocks, SPEC.lanes, SPEC.seed, epoch, SPEC.window_rows)


def coverage(committed: Committed, positions: dict[str, Any], epoch: int) -> Any:
    return count_given(positions["train"]["given"], order_of(committed, epoch), 0)


def test_one_rank_reads_the_order_of_the_built_in_loop(committed: Committed) -> None:
    (rows,) = Ranks(committed, 1).read()
    assert rows == order_of(committed, 0).rows(np.arange(TRAIN_ROWS)).tolist()


@pytest.mark.parametrize("world_size", [2, 3, 4, 24])
def test_ranks_share_an_epoch_equally_and_the_remainder_is_named(committed: Committed, world_size: int) -> None:
    ranks = Ranks(committed, world_size)
    by_rank = ranks.read()
    assert {len(rows) for rows in by_rank} == {TRAIN_ROWS // world_size}
    times = Counter(row for rows in by_rank for row in rows)
    assert set(times.values()) == {1}
    found = coverage(committed, positions := ranks.report(), 0)
    assert (found.seen_once, found.repeated) == (len(times), 0)
    assert found.missing_row_ids == sorted(set(range(TRAIN_ROWS)) - set(times))
    assert found.missing == TRAIN_ROWS % world_size
    assert is_epoch_done(positions["train"], 0)
    assert positions["train"]["given"] == [[0, 0, TRAIN_ROWS - found.missing, 1]]


def test_a_kept_remainder_gives_every_row_once(committed: Committed) -> None:
    ranks = Ranks(committed, 3, KEEPING)
    by_rank = ranks.read()
    assert sorted(row for rows in by_rank for row in rows) == list(range(TRAIN_ROWS))
    assert [len(rows) for rows in by_rank] == [234, 233, 233]
    assert coverage(committed, ranks.report(), 0).seen_once == TRAIN_ROWS


def test_a_rank_that_is_out_of_rows_stays_in_the_epoch_until_all_are(committed: Committed) -> None:
    """Of 700 rows on 3 ranks rank 0 has one more, a batch for itself."""
    ranks = Ranks(committed, 3, KEEPING)
    iterators = [iter(shard.iter_batches(batch_size=233)) for shard in ranks.train]
    for batches in iterators:
        next(batches)
    assert ranks.report()["train"]["places"] == [[0, 0, 233]]

    for batches in iterators[1:]:
        assert next(batches, None) is None
    positions = ranks.report()
    assert positions["train"]["places"] == [[0, 0, 233]]
    assert not is_epoch_done(positions["train"], 0)
    assert {len(rows) for rows in Ranks(committed, 3, KEEPING, positions).read()} == {233, 234}  # epoch 0 again
    continuing = replace(KEEPING, program=replace(PROGRAM, remainder=KEEP, data_resume=CONTINUE))
    for world_size in (2, 3):
        rest = Ranks(committed, world_size, continuing, positions).read()
        assert list(itertools.chain(*rest)) == order_of(committed, 0).rows(np.array([699])).tolist()

    assert len(rows_of(iterators[0])) == 1
    positions = ranks.report()
    assert positions["train"]["places"] == [[1, 0, 0]]
    assert is_epoch_done(positions["train"], 0)
    assert {len(rows) for rows in ranks.read()} == {233, 234}
    assert ranks.report()["train"]["places"] == [[2, 0, 0]]


def test_an_epoch_of_which_all_ranks_have_their_last_batch_is_done_where_the_remainder_is_kept(
    committed: Committed,
) -> None:
    ranks = Ranks(committed, 3, KEEPING)
    iterators = [iter(shard.iter_batches(batch_size=TRAIN_ROWS)) for shard in ranks.train]
    for batches in iterators:
        next(batches)  # and no more: they do not know yet that it was the last one
    assert ranks.report()["train"]["places"] == [[1, 0, 0]]


def test_ranks_at_different_epochs_all_replay_the_earliest(committed: Committed) -> None:
    ranks = Ranks(committed, 2)
    ranks.read()
    rows_of(ranks.train[1].iter_batches(batch_size=16))
    resumed = Ranks(committed, 2, positions=ranks.report())
    assert [rows[0] for rows in resumed.read()] == order_of(committed, 1).rows(np.arange(2)).tolist()


def test_each_pass_is_an_epoch_in_an_order_of_its_own(committed: Committed) -> None:
    ranks = Ranks(committed, 2)
    first, second = ranks.read(), ranks.read()
    assert first != second
    assert Ranks(committed, 2).read() == first
    assert second[1] == order_of(committed, 1).rows(np.arange(1, TRAIN_ROWS, 2)).tolist()


def test_a_pass_that_is_left_early_is_over(committed: Committed) -> None:
    ranks = Ranks(committed, 1)
    ranks.read(batches=3)
    assert ranks.read() == [order_of(committed, 1).rows(np.arange(TRAIN_ROWS)).tolist()]


def test_rows_that_are_only_read_ahead_do_not_count(committed: Committed) -> None:
    ranks = Ranks(committed, 2)
    for shard in ranks.train:
        batches = iter(shard.iter_batches(batch_size=10, prefetch_batches=8))
        next(batches)
        next(batches)
    assert ranks.report()["train"]["given"] == [[0, 0, 40, 1]]


def test_after_a_checkpoint_in_an_epoch_it_is_replayed_in_the_same_order(committed: Committed) -> None:
    ranks = Ranks(committed, 2)
    ranks.read(batches=5)
    resumed = Ranks(committed, 2, positions=ranks.report())
    whole = resumed.read()
    assert whole == Ranks(committed, 2).read()
    found = coverage(committed, resumed.report(), 0)
    assert (found.seen_once, found.repeated, found.missing) == (TRAIN_ROWS - 160, 160, 0)
    assert found.repeated_row_ids == sorted(row for rows in whole for row in rows[:80])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_that_continues_reads_the_rest_on_any_number_of_ranks(committed: Committed, world_size: int) -> None:
    ranks = Ranks(committed, 2, CONTINUING)
    ranks.read(batches=5)
    resumed = Ranks(committed, world_size, CONTINUING, ranks.report())
    resumed.read()
    found = coverage(committed, resumed.report(), 0)
    left_out = (TRAIN_ROWS - 160) % world_size
    assert (found.seen_once, found.repeated, found.missing) == (TRAIN_ROWS - left_out, 0, left_out)
    assert resumed.report()["train"]["places"] == [[1, 0, 0]]


def test_at_the_end_of_an_epoch_the_next_one_follows(committed: Committed) -> None:
    ranks = Ranks(committed, 2)
    ranks.read()
    assert (
        Ranks(committed, 2, positions=ranks.report()).read()[0]
        == order_of(committed, 1).rows(np.arange(0, TRAIN_ROWS, 2)).tolist()
    )


def test_the_last_batch_ends_the_epoch_before_the_loop_has_asked_for_another(committed: Committed) -> None:
    ranks = Ranks(committed, 1)
    batches = iter(ranks.train[0].iter_batches(batch_size=TRAIN_ROWS))
    next(batches)
    assert ranks.report()["train"]["places"] == [[1, 0, 0]]


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_state_of_one_rank_is_good_for_all(committed: Committed, world_size: int) -> None:
    ranks = Ranks(committed, 2)
    batches = ranks.train[0].iter_torch_batches(batch_size=16, device="cpu")
    list(islice(batches, 5))
    state = batches.state_dict()
    assert {type(value) for value in state.values()} == {int, str}
    others = Ranks(committed, world_size)
    rows = [rows_of(shards.get("train", state_dict=state).iter_batches(batch_size=16)) for shards in others.shards]
    assert rows == [
        order_of(committed, 0)
        .rows(np.arange(160 + rank, TRAIN_ROWS, world_size))
        .tolist()[: (TRAIN_ROWS - 160) // world_size]
        for rank in range(world_size)
    ]


def test_the_state_of_other_data_is_refused(committed: Committed) -> None:
    (shard,) = Ranks(committed, 1).train
    state = shard.state_dict()
    for wrong in ({**state, "seed": 4}, {**state, "split": "validation"}, {**state, "rows": TRAIN_ROWS + 1}, {}):
        with pytest.raises(InvalidArgument, match="this job"):
            shard.load_state_dict(wrong)


def test_ranks_that_are_not_in_step_go_on_where_each_was(committed: Committed) -> None:
    ranks = Ranks(committed, 2, CONTINUING)
    given = [rows_of(islice(shard.iter_batches(batch_size=10), 2 + rank)) for rank, shard in enumerate(ranks.train)]
    resumed = Ranks(committed, 2, CONTINUING, positions := ranks.report())
    rest = resumed.read()
    assert [one + other for one, other in zip(given, rest, strict=True)] == Ranks(committed, 2).read()
    assert coverage(committed, resumed.report(), 0).seen_once == TRAIN_ROWS
    with pytest.raises(FailedPrecondition, match="resume on 2 workers"):
        Ranks(committed, 3, CONTINUING, positions)


def test_a_shard_that_only_one_rank_reads_goes_on_with_its_next_epoch_on_any_number_of_ranks(
    committed: Committed,
) -> None:
    """As where rank 0 alone validates, after each epoch."""
    ranks = Ranks(committed, 2, CONTINUING)
    ranks.read()
    list(ranks.shards[0].get("eval").iter_batches(batch_size=16))
    for world_size, spec in itertools.product((1, 2, 3), (SPEC, CONTINUING)):
        resumed = Ranks(committed, world_size, spec, ranks.report())
        resumed.read()
        for _ in resumed.shards[0].get("eval").iter_batches(batch_size=16):
            pass
        assert resumed.report()["train"]["places"] == [[2, 0, 0]]
        place, *others = resumed.report()["validation"]["places"]
        assert place == [2, 0, 0]
        assert all(other in (None, [1, 0, 0]) for other in others)


def test_a_shard_that_one_rank_has_half_read_goes_on_on_as_many_ranks_only(committed: Committed) -> None:
    ranks = Ranks(committed, 2, CONTINUING)
    list(islice(ranks.shards[0].get("eval").iter_batches(batch_size=16), 1))
    positions = ranks.report()
    with pytest.raises(FailedPrecondition, match="resume on 2 workers"):
        Ranks(committed, 3, CONTINUING, positions).shards[0].get("eval")
    shard = Ranks(committed, 2, CONTINUING, positions).shards[0].get("eval")
    assert sum(len(batch["label"]) for batch in shard.iter_batches(batch_size=16)) == VALIDATION_ROWS // 2 - 16


def test_a_loop_that_skips_by_itself_trains_on_each_row_once(committed: Committed) -> None:
    """As loops do that keep the number of their batch: with CONTINUE it would skip twice."""
    ranks = Ranks(committed, 1)
    trained = ranks.read(batches=7)[0]
    (shard,) = Ranks(committed, 1, positions=ranks.report()).train
    for number, batch in enumerate(shard.iter_batches(batch_size=16)):
        if number < 7:
            continue
        trained += rows_of([batch])
    assert sorted(trained) == list(range(TRAIN_ROWS))


def test_reports_without_a_checkpoint_add_up(committed: Committed) -> None:
    ranks = Ranks(committed, 2)
    reports = []
    iterators = [iter(shard.iter_batches(batch_size=10)) for shard in ranks.train]
    for _ in range(3):
        for batches in iterators:
            next(batches)
        reports.append([one.take() for one in ranks.shards])
    assert merge_reports(reports, 2, {})["train"]["given"] == [[0, 0, 60, 1]]


def test_a_rank_that_never_asks_for_a_shard_does_not_hold_the_others_up(committed: Committed) -> None:
    ranks = Ranks(committed, 2)
    list(ranks.shards[0].get("eval").iter_batches(batch_size=16))
    positions = ranks.report()["validation"]
    assert positions["places"] == [[1, 0, 0], None]
    assert is_epoch_done(positions, 0)
    assert positions["given"] == [[0, 0, VALIDATION_ROWS, 2]]


def test_batches_are_those_of_ray(committed: Committed) -> None:
    (shard,) = Ranks(committed, 1).train
    batch = next(iter(shard.iter_torch_batches(batch_size=4, dtypes={"image": torch.float32, "label": torch.int32})))
    assert (batch["image"].dtype, batch["image"].shape) == (torch.float32, (4, 28, 28))
    assert (batch["label"].dtype, batch["label"].shape) == (torch.int32, (4,))
    assert str(batch["image"].device) == "cpu"

    class Sum(NumpyBatchCollateFn):
        def __call__(self, batch: dict[str, Any]) -> Any:
            return torch.as_tensor(int(batch["label"].sum()))

    total = sum(int(one) for one in shard.iter_torch_batches(batch_size=100, collate_fn=Sum()))
    assert total == striped_digits(TRAIN_ROWS)[1].sum()
    assert [len(one["label"]) for one in shard.iter_batches(batch_size=300, batch_format="pandas")] == [300, 300, 100]
    assert [one.num_rows for one in shard.iter_batches(batch_size=300, batch_format="pyarrow", drop_last=True)] == [
        300
    ] * 2
    row = next(iter(shard.iter_rows()))
    assert (row["image"].shape, int(row["label"]) in range(10)) == ((28, 28), True)
    assert shard.schema().names == ["image", "label"]


def test_names_of_tutorials_mean_the_validation_split(committed: Committed) -> None:
    shards = ProgramShards(committed.store, SPEC, 0, 1, {})
    assert shards.get("eval") is shards.get("validation") is shards.get("val")
    assert shards.get("") is shards.get("train")
    with pytest.raises(InvalidArgument, match="has the splits train, validation"):
        shards.get("test")


def test_two_passes_at_once_are_refused(committed: Committed) -> None:
    (shard,) = Ranks(committed, 1).train
    first = iter(shard.iter_batches(batch_size=8))
    next(first)
    next(iter(shard.iter_batches(batch_size=8)))
    with pytest.raises(FailedPrecondition, match="iterated twice"):
        next(first)


def test_a_job_without_a_version_says_what_to_set(committed: Committed) -> None:
    with pytest.raises(FailedPrecondition, match=r"set spec\.dataset_version"):
        ProgramShards(committed.store, replace(SPEC, dataset_version=""), 0, 1, {})


def test_an_error_of_reading_reaches_the_program(committed: Committed, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = Ranks(committed, 1).train

    def lost(*_: object) -> None:
        raise FailedPrecondition("the rows are gone", reason="GONE")

    monkeypatch.setattr(shard._rows._cache, "rows", lost)
    with pytest.raises(FailedPrecondition, match="the rows are gone"):
        list(shard.iter_batches(batch_size=8))
