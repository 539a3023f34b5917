"""The record of consumed rows: gathered from all ranks, chained over checkpoints, answered for an epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, CoveragePart
from shared.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, OutOfRange, Unavailable
from shared.jobs import JobRecord, Jobs
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from tests.support.flaky_store import FlakyStore
from tests.support.training_records import JOB, commit, make_job
from tests.support.versions import commit_version, striped_digits
from tests.unit.train_service.consuming import what_a_rank_consumed
from tests.unit.train_service.in_ranks import in_ranks
from train_service.checkpoints import coverage_records
from train_service.checkpoints.coverage_records import CoverageChain, gather, orphans, read_part, row_ids_of
from train_service.checkpoints.saving import ConsumedRows
from train_service.domain.spec import TrainingSpec
from train_service.jobs.run_records import RunRecords
from train_service.jobs.training_jobs import TrainingJobs
from train_service.learning.ranks import Ranks
from train_service.records.event_log import TRAIN_KIND

VERSION = "datasets/digits/versions/v1"
ALONE = Ranks(0, 1, torch.device("cpu"))
# Rows of the split `train`, and steps of an epoch at the batch of `make_job`.
ROWS, STEPS = 1000, 10


def table(*steps: int, rows: int = 100, shift: int = 0) -> pa.Table:
    """What one rank consumes in these steps: rows in their order, `rows` a step."""
    noted = ConsumedRows()
    for step in steps:
        first = step % STEPS * 100 + shift
        noted.add(step, step // STEPS, np.arange(first, first + rows, dtype=np.int64))
    taken = gather(ALONE, noted.take())
    assert taken is not None
    return taken


@pytest.fixture
def records(store: ObjectStore) -> RunRecords:
    """Of a job of two epochs on a version of 1,000 rows, with a second split behind them."""
    commit_version(store, VERSION, {"validation": striped_digits(30), "train": striped_digits(ROWS, 1)})
    make_job(store, VERSION)
    return RunRecords(store)


def epoch(*parts: tuple[int, ...]) -> list[pa.Table]:
    return [table(*steps, shift=30) for steps in parts]


@pytest.mark.parametrize("world_size", [1, 2])
def test_rank_0_gets_what_every_rank_consumed_in_the_order_of_steps(world_size: int, tmp_path: Path) -> None:
    if world_size == 1:
        answers = [what_a_rank_consumed(ALONE)]
    else:
        answers = in_ranks(world_size, what_a_rank_consumed, tmp_path)

    assert answers[1:] == [None] * (world_size - 1)
    rows, nothing = answers[0]
    assert nothing == 0
    assert rows == [
        {"step": step, "epoch": step // 2, "rank": rank, "row_id": 1000 * step + 100 * rank + row, "skipped": 0}
        for step in range(3)
        for rank in range(world_size)
        for row in range(2 * rank)
    ]


def test_take_returns_only_rows_added_since_the_last_take() -> None:
    noted = ConsumedRows()
    noted.add(4, 0, np.asarray([7, 8], np.int64))
    assert noted.take().row_ids.tolist() == [7, 8]
    noted.add(5, 0, np.asarray([9], np.int64))
    assert noted.take().row_ids.tolist() == [9]


def test_a_chain_of_many_checkpoints_stays_short_and_keeps_every_row(store: ObjectStore) -> None:
    chain = CoverageChain(store, JOB)
    for step in range(200):
        parts = chain.append(table(step, rows=90 + step % 7))

    assert len(parts) <= 12
    assert [part.first_step for part in parts[1:]] == [part.end_step for part in parts[:-1]]
    assert (parts[0].first_step, parts[-1].end_step) == (0, 200)
    tables = [read_part(store, part) for part in parts]
    assert [one.num_rows for one in tables] == [part.row_count for part in parts]
    expected = pa.concat_tables([table(step, rows=90 + step % 7) for step in range(200)])
    assert pa.concat_tables(tables).to_pylist() == expected.to_pylist()


def test_parts_that_are_large_enough_are_not_written_again(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage_records, "PART_ROWS", 400)
    chain = CoverageChain(store, JOB)
    for step in range(12):
        chain.append(table(step))

    assert [part.row_count for part in chain.parts] == [400, 400, 400]
    written = {info.key for info in store.list(f"{JOB}/coverage")}
    assert len(written) == 12


def test_a_record_of_many_rows_becomes_several_parts_between_steps(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads it holds one part at a time, however long a run went without a checkpoint."""
    monkeypatch.setattr(coverage_records, "PART_ROWS", 400)
    noted = ConsumedRows()
    for step, rows in enumerate([150, 150, 150, 1000, 20, 30, 400, 1]):
        noted.add(step, 0, np.arange(rows, dtype=np.int64), skipped=step % 2 == 1)
    whole = gather(ALONE, noted.take())
    assert whole is not None
    flaky = FlakyStore(store)
    chain = CoverageChain(flaky, JOB)
    flaky.go_away()
    with pytest.raises(Unavailable):
        chain.append(whole)
    flaky.come_back()

    parts = chain.append(whole)

    assert [part.row_count for part in parts] == [300, 150, 1000, 50, 400, 1]
    assert [(part.first_step, part.end_step) for part in parts] == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7), (7, 8)]
    read = pa.concat_tables([read_part(store, part) for part in parts])
    assert read.to_pylist() == whole.to_pylist()
    assert chain.append(whole) == parts


def test_a_resumed_run_goes_on_with_the_chain_of_its_checkpoint(store: ObjectStore) -> None:
    first = CoverageChain(store, JOB)
    at_checkpoint = first.append(table(0, 1, 2))
    first.append(table(3, 4))  # lost: no checkpoint names it

    parts = CoverageChain(store, JOB, at_checkpoint).append(table(3))

    consumed = np.concatenate([row_ids_of(read_part(store, part), 0) for part in parts])
    assert consumed.tolist() == list(range(400))


def test_an_outage_leaves_the_chain_as_it_was_and_the_table_can_be_added_again(store: ObjectStore) -> None:
    flaky = FlakyStore(store)
    chain = CoverageChain(flaky, JOB)
    before = chain.append(table(0))
    flaky.go_away()
    with pytest.raises(Unavailable):
        chain.append(table(1))
    assert chain.parts == before

    flaky.come_back()
    after = chain.append(table(1))

    assert chain.append(table(1)) == after
    assert sum(part.row_count for part in after) == 200
    with pytest.raises(ValueError, match="overlap"):
        chain.append(table(1, 2))


def test_a_damaged_part_is_named_as_it_is_and_the_run_goes_on(store: ObjectStore) -> None:
    chain = CoverageChain(store, JOB)
    (part,) = chain.append(table(0))
    store.put(part.path, b"damaged")

    parts = CoverageChain(store, JOB, [part]).append(table(1))

    assert parts[0] == part
    assert (parts[1].first_step, parts[1].row_count) == (1, 100)


def test_an_epoch_is_answered_from_the_newest_checkpoint(store: ObjectStore, records: RunRecords) -> None:
    chain = CoverageChain(store, JOB)
    for step, one in zip((4, 10, 14), epoch((0, 1, 2, 3), tuple(range(4, 10)), tuple(range(10, 14))), strict=True):
        commit(store, step, chain.append(one))

    whole, half = records.coverage(JOB, 0, ""), records.coverage(JOB, 1, "")

    assert (whole.counts.seen_once, whole.counts.missing, whole.counts.repeated) == (ROWS, 0, 0)
    assert whole.epoch_done
    assert whole.checkpoint == f"{JOB}/checkpoints/step-00000014"
    assert (half.counts.seen_once, half.counts.missing, half.counts.repeated) == (400, 600, 0)
    assert half.counts.missing_row_ids == list(range(430, 1030))
    assert not half.epoch_done
    early = records.coverage(JOB, 0, f"{JOB}/checkpoints/step-00000004")
    assert (early.counts.missing, early.epoch_done) == (600, False)
    assert records.coverage(JOB, 0, f"{JOB}/checkpoints/step-00000010").epoch_done


def test_the_final_checkpoint_can_be_asked_by_its_alias(store: ObjectStore, records: RunRecords) -> None:
    alias = f"{JOB}/checkpoints/final"
    with pytest.raises(NotFound, match="final"):
        records.coverage(JOB, 0, alias)
    chain = CoverageChain(store, JOB)
    entry = commit(store, 20, chain.append(table(*range(20), shift=30)), final=True)

    assert records.coverage(JOB, 1, alias).checkpoint == entry.name


def test_rows_that_were_consumed_twice_are_reported_by_their_ids(store: ObjectStore, records: RunRecords) -> None:
    chain = CoverageChain(store, JOB)
    chain.append(table(0, shift=30))
    commit(store, 2, chain.append(table(1, shift=-20)))

    counts = records.coverage(JOB, 0, "").counts

    assert counts.repeated_row_ids == list(range(80, 130))
    assert (counts.seen_once, counts.missing) == (100, 850)


def test_before_the_first_checkpoint_every_row_is_missing(records: RunRecords) -> None:
    answer = records.coverage(JOB, 0, "")
    assert (answer.checkpoint, answer.counts.missing, answer.epoch_done) == ("", ROWS, False)


def test_consumed_rows_are_reported_when_the_version_is_gone(store: ObjectStore) -> None:
    commit_version(store, VERSION, {"validation": striped_digits(30), "train": striped_digits(ROWS, 1)})
    model = ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10)
    spec = TrainingSpec(dataset_version=VERSION, model=model, epochs=2, global_batch_size=100)
    config = {"training": spec.as_config(), "request_id": ""}
    TrainingJobs(store).make(JobRecord(uid="u", name=JOB, spec=config, create_time=0, update_time=0), spec)
    commit(store, 10, CoverageChain(store, JOB).append(table(*range(10), shift=30)))
    records = RunRecords(store)
    before = [records.coverage(JOB, epoch, "") for epoch in range(2)]

    store.delete_folder(VERSION)

    assert [records.coverage(JOB, epoch, "") for epoch in range(2)] == before
    assert [one.counts.missing for one in before] == [0, ROWS]


def test_a_later_releases_note_of_a_jobs_rows_is_read(store: ObjectStore, records: RunRecords) -> None:
    split = {"name": "train", "row_count": ROWS, "first_row_id": 30, "colour": "red"}
    Jobs(store, TRAIN_KIND).transition(JOB, lambda job: replace(job, spec={**job.spec, "train_split": split}))

    assert records.coverage(JOB, 0, "").counts.missing == ROWS


def test_a_job_that_did_not_note_its_rows_says_that_its_version_is_gone(
    store: ObjectStore, records: RunRecords
) -> None:
    store.delete_folder(VERSION)
    with pytest.raises(FailedPrecondition, match=VERSION) as refused:
        records.coverage(JOB, 0, "")
    assert refused.value.specific_reason == "VERSION_GONE"


@pytest.mark.parametrize("how", ["flipped", "missing", "of other rows"])
def test_a_damaged_record_is_data_loss(store: ObjectStore, records: RunRecords, how: str) -> None:
    chain = CoverageChain(store, JOB)
    (part,) = chain.append(table(0, shift=5000 if how == "of other rows" else 30))
    commit(store, 1, (part,))
    if how == "flipped":
        data = bytearray(store.get(part.path))
        data[len(data) // 2] ^= 1
        store.put(part.path, data)
    elif how == "missing":
        store.delete(part.path)

    with pytest.raises(DataLoss):
        records.coverage(JOB, 0, "")
    assert records.coverage(JOB, 1, "").counts.missing == ROWS  # the other epoch's rows are not in that part


class Retiring(ObjectStore):
    """The same objects as `store`, of whose checkpoints `entry` is retired as its manifest is about to be read."""

    def __init__(self, store: ObjectStore, entry: CheckpointEntry) -> None:
        self.__dict__.update(vars(store))
        self._store = store
        self._entry: CheckpointEntry | None = entry

    def get(self, key: str) -> bytes:
        if self._entry is not None and key.startswith(self._entry.folder):
            entry, self._entry = self._entry, None
            assert CheckpointRegistry(self._store, JOB).retire([entry]) == [entry]
        return super().get(key)


@pytest.mark.usefixtures("records")
def test_a_checkpoint_that_is_retired_meanwhile_is_no_damage(store: ObjectStore) -> None:
    chain = CoverageChain(store, JOB)
    stays = commit(store, 4, chain.append(table(0, 1, 2, 3, shift=30)))
    going = commit(store, 8, chain.append(table(4, 5, 6, 7, shift=30)))

    answer = RunRecords(Retiring(store, going)).coverage(JOB, 0, "")

    assert (answer.checkpoint, answer.counts.missing) == (stays.name, 600)


@pytest.mark.usefixtures("records")
def test_a_checkpoint_asked_by_name_that_is_retired_meanwhile_is_not_found(store: ObjectStore) -> None:
    entry = commit(store, 4, CoverageChain(store, JOB).append(table(0, 1, 2, 3, shift=30)))

    with pytest.raises(NotFound, match="step-00000004"):
        RunRecords(Retiring(store, entry)).coverage(JOB, 0, entry.name)


def test_an_invalid_query_of_coverage_is_refused_by_its_field(records: RunRecords) -> None:
    for wrong in (-1, 2):
        with pytest.raises(OutOfRange, match="use 0 to 1"):
            records.coverage(JOB, wrong, "")
    with pytest.raises(NotFound, match="step-9"):
        records.coverage(JOB, 0, f"{JOB}/checkpoints/step-9")
    with pytest.raises(InvalidArgument, match="checkpoint"):
        records.coverage(JOB, 0, "trainingJobs/other/checkpoints/c")
    with pytest.raises(NotFound, match="trainingJobs/none"):
        records.coverage("trainingJobs/none", 0, "")


def test_only_records_that_no_checkpoint_names_are_orphans(store: ObjectStore) -> None:
    chain = CoverageChain(store, JOB)
    kept = commit(store, 1, chain.append(table(0)))
    gone: tuple[CoveragePart, ...] = chain.append(table(1))
    chain.append(table(2))
    named = {part.path for part in (*chain.parts, *CoverageChain(store, JOB, ()).parts)}

    left = orphans(store, JOB, [kept], chain.parts)

    assert set(left).isdisjoint(named)
    assert len(left) + len(named) + 1 == len(list(store.list(f"{JOB}/coverage")))
    assert {part.path for part in gone} - named <= set(left)

    coverage_records.delete_coverage(store, JOB)
    assert not list(store.list(f"{JOB}/coverage"))
