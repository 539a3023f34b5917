"""Logs of ranks: shipped while they are written, within bounds, and followed until the attempt is over."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from shared.errors import InvalidArgument, NotFound
from shared.jobs import Jobs
from shared.storage import ObjectInfo, ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.flaky_store import FlakyStore
from tests.support.training_records import JOB, begin, finish, lose, make_job
from tests.support.waiting import wait_until
from train_service.jobs.run_records import RunRecords
from train_service.records import logs
from train_service.records.logs import LogReader, LogShipper


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "SHIP_EVERY_S", 0.02)


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """One job, at its first attempt."""
    jobs = make_job(store, "datasets/d/versions/v")
    begin(jobs)
    return jobs


@pytest.fixture
def records(store: ObjectStore, jobs: Jobs) -> RunRecords:
    assert jobs.find(JOB)
    return RunRecords(store)


def rest(reader: LogReader) -> str:
    """All that is there, as one text."""
    text = ""
    while found := reader.read():
        assert all(one.text.endswith("\n") for one in found)
        text += "".join(one.text for one in found)
    return text


def ship(store: ObjectStore, attempt: int, rank: int, *lines: str) -> None:
    with LogShipper(store, JOB, attempt, rank) as shipper:
        for line in lines:
            shipper.add(line)


def test_records_and_what_is_printed_are_shipped_and_still_go_where_they_went(
    store: ObjectStore, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with LogShipper(store, JOB, 1, 0):
        print("printed")
        print("half a ", end="")
        print("line\nbegun", end="")
        print("wrong", file=sys.stderr, flush=True)
        logging.getLogger("some.where").warning("told %d", 7)
        sys.stdout.writelines(["", " and ended"])
    print("afterwards")

    assert out.getvalue() == "printed\nhalf a line\nbegun and endedafterwards\n"
    assert err.getvalue() == "wrong\n"
    assert (sys.stdout, sys.stderr) == (out, err)
    lines = rest(records.logs(JOB, 0, 0, False)).splitlines()
    assert [line for line in lines if "some.where" not in line] == [
        "printed",
        "half a line",
        "wrong",
        "begun and ended",
    ]
    assert any(line.endswith("WARNING some.where: told 7") for line in lines)


def test_a_print_that_ray_train_logs_is_in_the_log_once(
    store: ObjectStore, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.train.v2._internal.logging.patch_print import redirected_print

    for name in ("stdout", "__stdout__"):
        monkeypatch.setattr(sys, name, sys.stdout)
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    with LogShipper(store, JOB, 1, 0):
        redirected_print("said once")  # type: ignore[no-untyped-call]

    assert rest(records.logs(JOB, 0, 0, False)).count("said once") == 1


def test_lines_can_be_read_while_they_are_written(store: ObjectStore, records: RunRecords) -> None:
    reader = records.logs(JOB, 0, 0, True)
    text = ""
    with LogShipper(store, JOB, 1, 0) as shipper:
        for number in range(5):
            shipper.add(f"line {number}")
            seen = text

            def arrived() -> bool:
                nonlocal text
                text += rest(reader)
                return len(text) > len(seen)  # noqa: B023

            wait_until(arrived, "the line")
    assert text.splitlines() == [f"line {number}" for number in range(5)]


def test_many_lines_come_back_whole_and_in_order(
    store: ObjectStore, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(logs, "TEXT_BYTES", 300)
    lines = [f"{number} ä🙂{'x' * (number % 90)}" for number in range(500)]
    ship(store, 1, 2, *lines)

    assert len(list(store.list(f"{JOB}/logs"))) > 10
    assert rest(records.logs(JOB, 0, 2, False)).splitlines() == lines


def test_a_chunk_that_grew_after_it_was_listed_is_read_to_its_end(store: ObjectStore, jobs: Jobs) -> None:
    folder = logs.rank_folder(JOB, 1, 0)
    store.put(f"{folder}/00000000.txt", b"one\n")
    reader = LogReader(store, jobs, JOB, 1, 0)
    listing = list(store.list(JOB + "/logs"))
    store.put(f"{folder}/00000000.txt", b"one\ntwo\n")
    store.put(f"{folder}/00000001.txt", b"three\n")
    late = next(info for info in store.list(JOB + "/logs") if info.key.endswith("1.txt"))

    class Late(ObjectStore):
        def __init__(self) -> None:
            self.__dict__.update(vars(store))

        def list(self, _prefix: str = "") -> Iterator[ObjectInfo]:
            return iter([*listing, late])

    reader._store = Late()
    assert rest(reader) == "one\ntwo\nthree\n"


def test_a_follower_gets_every_line_in_order_though_a_rank_was_asked_for_its_stacks(
    store: ObjectStore, jobs: Jobs, records: RunRecords
) -> None:
    folder = logs.rank_folder(JOB, 1, 0)
    reader = records.logs(JOB, 1, None, True)
    store.put(f"{folder}/00000000.txt", b"one\n")
    assert rest(reader) == "one\n"
    store.put(f"{folder}/{logs.STACKS_CHUNK}", b"stacks\n")
    assert rest(reader) == ""
    store.put(f"{folder}/00000000.txt", b"one\ntwo\n")
    store.put(f"{folder}/00000001.txt", b"three\n")
    assert rest(reader) == "two\nthree\n"
    store.put(f"{folder}/00000001.txt", b"three\nfour\n")
    assert rest(reader) == "four\n"
    lose(jobs)
    begin(jobs)
    assert reader.over()
    assert rest(reader) == "stacks\n"

    # Who comes later reads the same.
    assert rest(records.logs(JOB, 1, 0, False)) == "one\ntwo\nthree\nfour\nstacks\n"


def test_ranks_and_attempts_are_distinguished(store: ObjectStore, jobs: Jobs, records: RunRecords) -> None:
    ship(store, 1, -1, "own process")
    ship(store, 1, 0, "first of 0")
    ship(store, 1, 1, "first of 1")
    lose(jobs)
    begin(jobs)
    ship(store, 2, 1, "second of 1")

    assert rest(records.logs(JOB, 0, None, False)) == "second of 1\n"
    assert [(one.rank, one.text) for one in records.logs(JOB, 1, None, False).read()] == [
        (-1, "own process\n"),
        (0, "first of 0\n"),
        (1, "first of 1\n"),
    ]
    assert rest(records.logs(JOB, 1, -1, False)) == "own process\n"


def test_a_follower_learns_that_the_attempt_is_over(jobs: Jobs, records: RunRecords) -> None:
    first = records.logs(JOB, 1, None, True)
    newest = records.logs(JOB, 0, None, True)
    assert not first.over()
    lose(jobs)
    begin(jobs)
    assert first.over()
    assert newest.over()

    second = records.logs(JOB, 0, None, True)
    assert not second.over()
    finish(jobs)
    assert second.over()


def test_a_follower_makes_two_requests_where_nothing_is_new(store: ObjectStore, jobs: Jobs) -> None:
    ship(store, 1, 0, "begun")
    counted = CountingStore(store)
    reader = LogReader(counted, Jobs(counted, jobs.kind), JOB, 0, None, follow=True)
    assert not reader.over()
    assert rest(reader) == "begun\n"
    counted.forget()

    assert not reader.over()
    assert reader.read() == []
    assert len(counted.requests) == 2


def test_one_can_wait_for_the_first_attempt(store: ObjectStore) -> None:
    jobs = make_job(store, "datasets/d/versions/v")
    reader = RunRecords(store).logs(JOB, 0, None, True)
    assert not reader.over()
    assert reader.read() == []

    begin(jobs)
    ship(store, 1, 0, "begun")

    assert not reader.over()
    assert rest(reader) == "begun\n"


def test_logs_that_are_not_there_are_not_found(store: ObjectStore, jobs: Jobs, records: RunRecords) -> None:
    ship(store, 1, 0, "line")
    for attempt, rank, follow in ((0, 3, False), (2, None, False), (2, None, True)):
        with pytest.raises(NotFound, match="no logs"):
            records.logs(JOB, attempt, rank, follow)
    with pytest.raises(NotFound, match="trainingJobs/none"):
        records.logs("trainingJobs/none", 0, None, False)
    for attempt, rank, field in ((-1, None, "attempt"), (0, -2, "rank")):
        with pytest.raises(InvalidArgument, match=field):
            records.logs(JOB, attempt, rank, False)
    finish(jobs)
    with pytest.raises(NotFound, match="of rank 3"):
        records.logs(JOB, 0, 3, True)


@pytest.mark.usefixtures("jobs")
def test_an_outage_delays_lines_and_holds_nobody_up(store: ObjectStore, records: RunRecords) -> None:
    flaky = FlakyStore(store)
    flaky.go_away()
    with LogShipper(flaky, JOB, 1, 0) as shipper:
        shipper.add("one")
        wait_until(lambda: flaky.refused > 2, "the outage to be noticed")
        shipper.add("two")
        flaky.come_back()

    assert rest(records.logs(JOB, 0, 0, False)) == "one\ntwo\n"


@pytest.mark.usefixtures("jobs")
def test_waiting_lines_are_bounded_and_dropped_lines_are_reported(
    store: ObjectStore, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING_BYTES", 1000)
    flaky = FlakyStore(store)
    flaky.go_away()
    with LogShipper(flaky, JOB, 1, 0) as shipper:
        for number in range(100):
            shipper.add(f"line {number:03d} {'x' * 40}")
        assert shipper._waiting_bytes <= 1000
        flaky.come_back()

    lines = rest(records.logs(JOB, 0, 0, False)).splitlines()
    dropped = next(line for line in lines if "dropped" in line)
    kept = [line for line in lines if line != dropped]
    assert dropped == f"[{100 - len(kept)} lines were dropped here: the store did not answer]"
    assert kept[-1].startswith("line 099")


@pytest.mark.usefixtures("jobs")
def test_a_rank_that_says_too_much_is_cut_off_with_a_line_that_says_so(
    store: ObjectStore, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_STORED_BYTES", 5000)
    ship(store, 1, 0, *["x" * 99] * 200)

    lines = rest(records.logs(JOB, 0, 0, False)).splitlines()
    assert lines[:-1] == ["x" * 99] * 50
    assert "ends here" in lines[-1]


def test_the_end_of_a_process_does_not_wait_for_ever(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "END_TIMEOUT_S", 0.1)
    flaky = FlakyStore(store)
    flaky.go_away()
    ended = threading.Thread(target=ship, args=(flaky, 1, 0, "line"), daemon=True)
    ended.start()
    ended.join(240)
    assert not ended.is_alive()


def test_a_line_without_end_is_shipped_in_parts(store: ObjectStore, records: RunRecords) -> None:
    with LogShipper(store, JOB, 1, 0):
        for _ in range(40):
            sys.stdout.write("." * 1000)
        wait_until(lambda: bool(list(store.list(f"{JOB}/logs"))), "the first part")
    assert sum(map(len, rest(records.logs(JOB, 0, 0, False)).splitlines())) == 40_000
