"""How a program's run ends: no stop and no failed report is forgotten, whatever the training function does with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from shared.errors import Internal, InvalidArgument
from shared.storage import ObjectStore
from tests.unit.train_service.program.test_reports import Attempt, Begun
from train_service.program.rank_reports import ASYNC, ProgramStopped
from train_service.records.reporting import CANCEL


@pytest.fixture
def attempt(store: ObjectStore, tmp_path: Path) -> Iterator[Begun]:
    with ExitStack() as stack:

        def begin(number: int = 1, world_size: int = 1, **options: Any) -> Attempt:
            return stack.enter_context(Attempt(store, number, world_size, tmp_path / "node", **options))

        yield begin


def test_a_stop_that_the_function_swallowed_is_raised_again_at_every_report_and_at_its_end(attempt: Begun) -> None:
    run = attempt()
    run.wish = CANCEL
    (rank,) = run.ranks
    for _ in range(3):
        with pytest.raises(ProgramStopped) as stopped:
            rank.report({}, None)
        assert stopped.value.reason == CANCEL
    assert rank.number == 1  # the attempt was asked once
    with pytest.raises(ProgramStopped):
        rank.finish()


def test_a_report_that_failed_ends_the_run_though_the_function_caught_its_error(attempt: Begun, tmp_path: Path) -> None:
    run = attempt()
    (rank,) = run.ranks
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="does not exist"):
            rank.report({}, tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match="does not exist"):
        rank.report({}, None)
    with pytest.raises(InvalidArgument, match="does not exist"):
        rank.finish()
    assert rank.number == 0


def test_an_asynchronous_report_that_failed_is_raised_at_the_end_again(attempt: Begun) -> None:
    run = attempt()
    (rank,) = run.ranks

    def upload() -> Path:
        raise OSError("the disk is full")

    rank.report({}, run.tmp, mode=ASYNC, upload=upload)
    with pytest.raises(OSError, match="the disk is full"):
        rank.finish()
    with pytest.raises(OSError, match="the disk is full"):
        rank.report({}, None)
    with pytest.raises(OSError, match="the disk is full"):
        rank.finish()


def test_no_rows_are_taken_for_a_report_whose_files_cannot_be_read_or_copied(attempt: Begun, tmp_path: Path) -> None:
    taken: list[int] = []

    def take_shards() -> dict[str, Any]:
        taken.append(1)
        return {}

    run = attempt(world_size=2, take_shards=take_shards)
    with pytest.raises(InvalidArgument):
        run.ranks[0].report({}, tmp_path / "nothing")
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"1")
    (run.tmp / "r1" / "waiting-00000001").write_bytes(b"in the way of the copy")
    with pytest.raises(OSError, match="waiting-00000001"):
        run.ranks[1].report({}, folder, mode=ASYNC)
    assert taken == []


def test_two_threads_of_a_rank_never_report_under_one_number(attempt: Begun) -> None:
    meeting = threading.Barrier(2)

    def take_shards() -> dict[str, Any]:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)  # until the other thread is in here, too, if it can be
        return {}

    run = attempt(take_shards=take_shards)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run.ranks[0].report, {"loss": loss}, None) for loss in (1.0, 2.0)]
        for call in calls:
            call.result(30)
    assert run.ranks[0].number == 2


def test_a_run_that_was_stopped_or_has_a_cause_is_not_done_though_all_ranks_return(attempt: Begun) -> None:
    stopped = attempt()
    stopped.wish = CANCEL
    with pytest.raises(ProgramStopped):
        stopped.ranks[0].report({}, None)
    stopped.say(0, "returned")
    assert not stopped.coordinator.all_returned

    failed = attempt(2)
    failed.pulses[0].ask({"kind": "failing", "error": Internal("it raised").as_record()}, timeout_s=30)
    failed.say(0, "returned")
    assert not failed.coordinator.all_returned


def test_a_stale_attempt_is_not_done_though_all_ranks_return(attempt: Begun) -> None:
    stale = attempt(1)
    attempt(2)
    folder = stale.tmp / "files"
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"1")
    with pytest.raises(ProgramStopped):
        stale.ranks[0].report({}, folder)
    stale.say(0, "returned")
    assert not stale.coordinator.all_returned
