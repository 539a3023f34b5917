"""The indices that a program's own DataLoaders gave it: counted as it gets them, and told as coverage."""

from __future__ import annotations

import builtins
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train
import ray.train.torch
import torch
from ray.train.torch.train_loop_utils import _WrappedDataLoader
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2.api import train_fn_utils as train_fn_api
from ray.train.v2.torch import train_loop_utils
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from shared.errors import InvalidArgument
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt
from shared.storage import ObjectStore
from tests.unit.train_service.program.test_reports import JOB, Attempt
from train_service.domain import coverage_counts as domain
from train_service.domain.coverage_counts import check_drawn, decode
from train_service.jobs.run_records import GIVEN, INDICES, NO_WITNESS, RunRecords
from train_service.program import worker as counting
from train_service.program.worker import DrawnIndices
from train_service.records.event_log import TRAIN_KIND

ROWS = 20


def loader(rank: int = 0, world_size: int = 1, batch: int = 3, **options: Any) -> Any:
    """As Ray prepares one: a sampler for this rank, and a wrapper that has the next batch on its way."""
    data = TensorDataset(torch.arange(ROWS))
    sampler: Any = DistributedSampler(data, world_size, rank, seed=3) if world_size > 1 else None
    return _WrappedDataLoader(
        DataLoader(data, batch, shuffle=sampler is None, sampler=sampler, **options), torch.device("cpu"), True
    )


def rows_of(batches: Any) -> list[int]:
    return [row for (rows,) in batches for row in rows.tolist()]


def given_of(said: dict[str, Any], number: int, name: str = "loader-0") -> tuple[list[int], list[int]]:
    """The indices that were given, and those that were given again."""
    seen, again = (np.flatnonzero(decode(text, ROWS)).tolist() for text in said[name]["passes"][str(number)])
    return seen, again


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["here", "in a process"])
def test_an_index_counts_once_the_program_has_got_its_batch(options: dict[str, Any]) -> None:
    drawn = DrawnIndices()
    batches = iter(drawn.watch(loader(**options)))
    got = rows_of([next(batches), next(batches)])
    said = drawn.take()
    assert given_of(said, 0) == (sorted(got), [])
    assert said["loader-0"]["done"] == 0
    rest = rows_of(batches)
    said = drawn.take()
    assert given_of(said, 0) == (sorted(rest), []), "since the last report"
    assert said["loader-0"]["done"] == 1
    assert sorted(rest + got) == list(range(ROWS))
    assert drawn.take() == {}


def test_the_prepared_loader_is_as_it_was_to_its_program() -> None:
    plain, watched = loader(1, 2), DrawnIndices().watch(loader(1, 2))
    for epoch in range(2):
        plain.sampler.set_epoch(epoch)
        watched.sampler.set_epoch(epoch)
        assert [one[0].tolist() for one in watched] == [one[0].tolist() for one in plain]
    assert len(watched) == len(plain)
    assert isinstance(watched, _WrappedDataLoader)
    sampler: Any = watched.batch_sampler
    assert sampler.batch_size == 3


def test_passes_are_numbered_by_set_epoch_or_one_after_the_other() -> None:
    drawn = DrawnIndices({"loader-0": {"done": 4}})
    first = drawn.watch(loader(0, 2))
    list(first)
    list(first)
    assert sorted(drawn.take()["loader-0"]["passes"]) == ["4", "5"]
    first.sampler.set_epoch(2)
    list(first)
    list(first)
    said = drawn.take()
    assert (sorted(said["loader-0"]["passes"]), said["loader-0"]["done"]) == (["2", "3"], 6)


def test_a_pass_that_is_left_and_begun_again_repeats_its_indices() -> None:
    drawn = DrawnIndices()
    data = drawn.watch(loader(0, 2, batch=2))
    for _ in range(2):
        data.sampler.set_epoch(0)
        batches = iter(data)
        got = next(batches)[0].tolist()
    assert given_of(drawn.take(), 0) == (sorted(got), sorted(got))


def test_a_pass_that_ended_after_a_report_is_in_the_next_report() -> None:
    drawn = DrawnIndices({"loader-0": {"done": 2}})
    for _ in drawn.watch(DataLoader(TensorDataset(torch.arange(ROWS)), 3)):
        said = drawn.take()
    assert said["loader-0"]["done"] == 2, "a plain loader's last batch does not show that it is the last"
    assert drawn.take() == {"loader-0": {"row_count": ROWS, "done": 3, "passes": {}}}
    assert drawn.take() == {}


def test_a_pass_that_is_left_is_done_once_the_next_begins() -> None:
    drawn = DrawnIndices()
    data = drawn.watch(loader())
    for epoch in range(3):
        next(iter(data))
        assert drawn.take()["loader-0"]["done"] == epoch


def test_a_pass_is_done_with_its_last_batch() -> None:
    drawn = DrawnIndices()
    done = [drawn.take()["loader-0"]["done"] for _ in drawn.watch(loader())]
    assert done == [0] * (len(done) - 1) + [1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_more_passes_than_a_report_holds_are_not_counted(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (domain, counting):
        monkeypatch.setattr(module, "MAX_PASSES_A_REPORT", 3)
    drawn = DrawnIndices()
    data = drawn.watch(loader(0, world_size))
    for _ in range(5):
        list(data)
    said = drawn.take()
    check_drawn(0, said, {})
    assert (sorted(said["loader-0"]["passes"]), said["loader-0"]["done"]) == (["0", "1", "2"], 3)
    assert len(given_of(said, 2)[0]) == ROWS // world_size
    list(data)
    assert drawn.take() == {}


def test_a_pass_whose_number_is_too_large_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    drawn = DrawnIndices()
    data = drawn.watch(loader(0, 2))
    list(data)
    data.sampler.set_epoch(3_000_000_000)
    with caplog.at_level(logging.INFO, "train_service.program.worker"):
        assert len(rows_of(data)) == ROWS // 2
        list(data)
    said = drawn.take()
    check_drawn(0, said, {})
    assert (sorted(said["loader-0"]["passes"]), said["loader-0"]["done"]) == (["0"], 1)
    assert [one.getMessage().split(":")[0] for one in caplog.records] == ["loader-0 is not counted any more"]


def test_the_passes_that_ended_wait_for_the_report_as_text() -> None:
    drawn = DrawnIndices()
    data = drawn.watch(loader(0, 2))
    for epoch in (0, 1, 0):
        data.sampler.set_epoch(epoch)
        got = rows_of(data)
    kept = drawn._loaders[0]._passes
    assert all(isinstance(text, str) for number in (0, 1) for text in kept[number])
    said = drawn.take()
    assert given_of(said, 0) == (sorted(got), sorted(got))
    assert len(given_of(said, 1)[0]) == ROWS // 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


def test_a_loader_without_indices_is_left_alone() -> None:
    drawn = DrawnIndices()
    for one in (DataLoader(Stream(), batch_size=2), DataLoader(TensorDataset(torch.arange(4)), batch_size=None)):
        kind = type(one)
        watched: Any = drawn.watch(one)
        assert watched is one
        assert type(watched) is kind
        assert len(list(watched)) > 0
    assert drawn.take() == {}


def test_a_loader_that_a_program_prepares_by_rays_function_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    from train_service.program import ray_hooks

    kept = [(ray.train.torch, "prepare_data_loader"), (train_loop_utils, "prepare_data_loader")]
    kept += [(ray.train, "get_dataset_shard"), (train_fn_api, "get_dataset_shard")]
    kept += [(builtins, "print"), (train_fn_utils, "_train_fn_utils")]
    for module, name in kept:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(train_loop_utils, "prepare_data_loader", lambda given, **_: given)
    seen: list[Any] = []

    class Utils:
        def is_distributed(self) -> bool:
            return False

    ray_hooks.install(Utils(), lambda given: seen.append(given) or given)  # type: ignore[arg-type, func-returns-value]
    first, second = DataLoader(TensorDataset(torch.arange(2))), DataLoader(TensorDataset(torch.arange(3)))
    assert ray.train.torch.prepare_data_loader(first, move_to_device=False) is first
    assert train_loop_utils.prepare_data_loader(second) is second
    assert seen == [first, second]


@pytest.fixture
def records(store: ObjectStore) -> RunRecords:
    return RunRecords(store)


def begin_job(store: ObjectStore, attempt: Attempt) -> None:
    now, config = time.time(), {"training": attempt.spec.as_config()}
    job = JobRecord(uid="own", name=JOB, spec=config, create_time=now, update_time=now)
    Jobs(store, TRAIN_KIND).create(JOB, job)
    Jobs(store, TRAIN_KIND).transition(JOB, lambda one: begin_attempt(one, time.time()), attempt=1)


Takes = Callable[[], dict[str, Any]]


def test_coverage_names_its_witness_and_goes_on_over_attempts(
    store: ObjectStore, records: RunRecords, tmp_path: Path
) -> None:
    drawn = DrawnIndices()
    data = drawn.watch(loader())
    batches = iter(data)
    with Attempt(store, 1, 1, tmp_path, take_indices=drawn.take) as attempt:
        begin_job(store, attempt)
        assert records.coverage(JOB, 0, "", "").witness == NO_WITNESS
        attempt.report({"model.pt": b"0"})
        assert records.coverage(JOB, 0, "", "").witness == NO_WITNESS, "nothing was given yet"
        got = rows_of([next(batches), next(batches)])
        attempt.report({"model.pt": b"1"})
        found = records.coverage(JOB, 0, "", "")
        assert (found.witness, found.shard, found.epoch_done) == (INDICES, "loader-0", False)
        assert found.counts.missing_row_ids == sorted(set(range(ROWS)) - set(got))
        list(batches)
        attempt.report({"model.pt": b"2"})
        found = records.coverage(JOB, 0, "", "loader-0")
        assert (found.counts.seen_once, found.epoch_done) == (ROWS, True)
        next(iter(data))
        attempt.report({"model.pt": b"3"})
    with Attempt(store, 2, 1, tmp_path) as attempt:
        assert attempt.begins[0].indices == {"loader-0": {"done": 1}}
        again = DrawnIndices(attempt.begins[0].indices)
        attempt.ranks[0]._take_indices = again.take
        list(again.watch(loader()))
        attempt.report({"model.pt": b"4"})
        found = records.coverage(JOB, 1, "", "")
        assert (found.counts.missing, found.counts.repeated, found.epoch_done) == (0, 3, True)
        assert records.coverage(JOB, 0, "", "").counts.seen_once == ROWS
    assert found.witness != GIVEN


def test_a_forged_record_ends_the_run(store: ObjectStore, tmp_path: Path) -> None:
    forged = {"loader-0": {"row_count": 4, "done": 0, "passes": {"0": ["nonsense", ""]}}}
    with Attempt(store, 1, 1, tmp_path, take_indices=lambda: forged) as attempt:
        with pytest.raises(InvalidArgument, match="rank 0 reports"):
            attempt.report({"model.pt": b"0"})
        assert attempt.coordinator.cause is not None
