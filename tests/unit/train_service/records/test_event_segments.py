"""Events of a long run lie in segments: few objects, read and followed by what is new, and fenced as before."""

from __future__ import annotations

import gc
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import asdict

import pytest

from shared.errors import DataLoss, Unavailable
from shared.log import Record, ResourceLog, StaleAttempt
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from train_service.records import event_log, event_segments
from train_service.records.event_log import Event, EventKind, EventLog
from train_service.records.event_segments import ABSENT_S, KEPT_S, TRUSTED_S, GatheringLog, SegmentedLog

JOB = "trainingJobs/a"
EVENTS = f"{JOB}/events"
SIZE = 8


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_segments, "SEGMENT_RECORDS", SIZE)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(store: ObjectStore, clock: Clock, events: int, attempt: int = 1, interval_s: float = KEPT_S) -> EventLog:
    """Write so many events, as the reporter of an attempt does."""
    log = EventLog(store, JOB, gathers=True, clock=clock)
    begin = EventLog(store, JOB).last_sequence()
    for number in range(begin + 1, begin + events + 1):
        log.append(attempt, EventKind.WARNING, {"text": str(number)}, f"{attempt}-{number}")
        log.gather()
        clock.now += interval_s
    return log


def events_of(store: ObjectStore, after: int = 0) -> list[Event]:
    return list(EventLog(store, JOB).after(after))


def objects(store: ObjectStore) -> dict[str, int]:
    keys = [info.key for info in store.list(EVENTS)]
    return {folder: sum(key.startswith(f"{EVENTS}/{folder}/") for key in keys) for folder in ("log", "segments")}


def test_a_long_log_is_few_objects_and_reads_as_it_was_written(store: ObjectStore, clock: Clock) -> None:
    run(store, clock, 10 * SIZE + 3)

    assert objects(store) == {"log": 3 + 1, "segments": 10}  # and the number of a recent record
    events = events_of(store)
    assert [event.sequence for event in events] == list(range(1, 10 * SIZE + 4))
    assert [event.payload["text"] for event in events] == [str(event.sequence) for event in events]
    assert [event.sequence for event in events_of(store, 9 * SIZE + 1)] == list(range(9 * SIZE + 2, 10 * SIZE + 4))
    assert EventLog(store, JOB).last_sequence() == 10 * SIZE + 3


def test_an_event_is_written_with_one_request_and_those_of_its_segment(store: ObjectStore, clock: Clock) -> None:
    counting = CountingStore(store)
    log = run(counting, clock, SIZE, interval_s=1.0)
    counting.forget()

    for number in range(4 * SIZE):
        log.append(1, EventKind.WARNING, {"text": str(number)}, str(number))
        log.gather()
        clock.now += 1.0

    verbs = [request.split()[0] for request in counting.requests]
    assert verbs.count("put_if_absent") == 4 * SIZE + 4  # records and segments
    # For each segment: the hint, whether it is there, and whether its last record is, before it is written and after.
    assert len(verbs) - verbs.count("put_if_absent") <= 4 * 4


def test_reading_costs_by_segments_and_following_by_what_is_new(store: ObjectStore, clock: Clock) -> None:
    run(store, clock, 25 * SIZE)
    counting = CountingStore(store)
    reader = EventLog(counting, JOB, clock=clock)

    assert len(list(reader.after(0))) == 25 * SIZE
    assert len(counting.requests) <= 25 + 2

    counting.forget()
    assert not list(reader.after(25 * SIZE))
    assert len(counting.requests) == 1
    EventLog(store, JOB).append(1, EventKind.WARNING, {"text": "new"}, "new")
    counting.forget()
    assert [event.payload["text"] for event in reader.after(25 * SIZE)] == ["new"]
    assert len(counting.requests) == 2


def test_a_page_has_the_rest_of_its_segment_and_few_events_behind_the_segments(
    store: ObjectStore, clock: Clock
) -> None:
    run(store, clock, 2 * SIZE + 5)
    log = EventLog(store, JOB, clock=clock)

    assert [event.sequence for event in log.page(2, 3)] == list(range(3, SIZE + 1))
    assert [event.sequence for event in log.page(SIZE - 1, 3)] == list(range(SIZE, 2 * SIZE + 1))
    assert [event.sequence for event in log.page(2 * SIZE, 3)] == list(range(2 * SIZE + 1, 2 * SIZE + 4))
    assert log.page(2 * SIZE + 5, 3) == []


def test_a_page_ends_by_its_memory_and_has_at_least_an_event(
    store: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(store, JOB, gathers=True, clock=clock)
    for number in range(1, 2 * SIZE + 1):
        text = "x" * (20_000 if number == 3 else 1_000)
        log.append(1, EventKind.WARNING, {"text": text}, str(number))
        log.gather()
    monkeypatch.setattr(event_log, "PAGE_BYTES", 4 * event_log.MEMORY_PER_BYTE * 1_100)
    pages: list[list[int]] = []
    while page := EventLog(store, JOB, clock=clock).page(pages[-1][-1] if pages else 0, 3):
        pages.append([event.sequence for event in page])

    assert pages == [[1, 2], [3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16]]


def test_a_segment_of_large_events_is_read_eight_times_at_most(
    clock: Clock, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_segments, "SEGMENT_RECORDS", 64)
    log = EventLog(store, JOB, gathers=True, clock=clock)
    for number in range(1, 66):
        log.append(1, EventKind.WARNING, {"text": "x" * 20_000}, str(number))
        log.gather()
    pages: list[int] = []
    while sum(pages) < 64:
        pages.append(len(EventLog(store, JOB, clock=clock).page(sum(pages), 8)))
    assert sum(pages) == 64
    assert len(pages) <= event_log.PAGES_A_SEGMENT + 1


def test_a_log_that_is_kept_holds_no_segment(store: ObjectStore, clock: Clock) -> None:
    run(store, clock, 3 * SIZE + 2)
    log = SegmentedLog(store, EVENTS, clock)
    events = EventLog(store, JOB, clock=clock)
    events._log = log

    events.last_sequence()
    assert log._segment == (-1, [])
    assert [event.sequence for event in events.after(SIZE)] == list(range(SIZE + 1, 3 * SIZE + 3))
    assert log._segment == (-1, [])
    assert next(events.after(SIZE)).sequence == SIZE + 1
    gc.collect()
    assert log._segment == (-1, [])


def test_an_attempt_that_slept_and_wrote_at_a_free_place_costs_no_event(store: ObjectStore, clock: Clock) -> None:
    run(store, clock, 2 * SIZE + 3)
    left = Record(SIZE + 1, "late", 2, 0.0, {"time": 0.0, "kind": EventKind.WARNING, "payload": {"text": "late"}})
    store.put_if_absent(f"{EVENTS}/log/{SIZE + 1:012d}.json", json.dumps(asdict(left)).encode())

    run(store, clock, SIZE, attempt=3)
    assert [event.payload["text"] for event in events_of(store)] == [str(number) for number in range(1, 3 * SIZE + 4)]


@pytest.mark.parametrize("segments", [4, 40])
def test_the_newest_event_is_found_with_as_many_requests_in_a_long_log(
    store: ObjectStore, clock: Clock, segments: int
) -> None:
    run(store, clock, segments * SIZE + 3)
    counting = CountingStore(store)

    assert EventLog(counting, JOB).last_sequence() == segments * SIZE + 3
    assert len(counting.requests) <= 12


def test_records_stay_until_no_reader_can_take_them_for_missing(store: ObjectStore, clock: Clock) -> None:
    reader = EventLog(store, JOB, clock=clock)
    assert not list(reader.after(0))  # it now takes for granted that there is no segment
    log = run(store, clock, SIZE, interval_s=0.0)
    assert objects(store)["segments"] == 1

    clock.now += ABSENT_S - 1.0
    log.gather()
    assert [event.sequence for event in reader.after(0)] == list(range(1, SIZE + 1))

    clock.now += KEPT_S
    log.gather()
    assert objects(store)["log"] == 1
    assert [event.sequence for event in reader.after(0)] == list(range(1, SIZE + 1))


def test_a_reader_that_slept_between_two_requests_looks_again(store: ObjectStore, clock: Clock) -> None:
    class Sleepy(CountingStore):
        def get(self, key: str) -> bytes:
            if key.endswith("/000000000001.json") and not self.slept:
                # After the look for a segment all of it is written, gathered and deleted.
                self.slept = True
                run(store, clock, SIZE + 1)
            return super().get(key)

        slept = False

    assert [event.sequence for event in EventLog(Sleepy(store), JOB, clock=clock).after(0)] == list(range(1, SIZE + 2))


def test_a_writer_that_slept_is_fenced_though_its_place_is_free(store: ObjectStore, clock: Clock) -> None:
    stale = EventLog(store, JOB, clock=clock)
    stale.append(1, EventKind.WARNING, {"text": "1"}, "first")
    run(store, clock, 3 * SIZE, attempt=2)
    before = events_of(store)

    with pytest.raises(StaleAttempt):
        stale.append(1, EventKind.WARNING, {"text": "late"}, "late")

    assert events_of(store) == before
    assert objects(store)["log"] == 2


def test_a_writer_of_the_same_attempt_that_slept_writes_behind_the_others(store: ObjectStore, clock: Clock) -> None:
    sleeping = EventLog(store, JOB, clock=clock)
    sleeping.append(1, EventKind.WARNING, {"text": "1"}, "first")
    run(store, clock, 3 * SIZE)

    sleeping.append(1, EventKind.WARNING, {"text": "late"}, "late")

    assert [event.payload["text"] for event in events_of(store)][-2:] == [str(3 * SIZE + 1), "late"]


def test_an_unanswered_append_is_written_once_though_its_segment_was_gathered(store: ObjectStore, clock: Clock) -> None:
    log = SegmentedLog(store, EVENTS, clock)
    log.add({"time": 0.0, "kind": "warning", "payload": {"text": "1"}}, 1, "a")
    log._unanswered = 2  # the answer to the next write did not come, but the record is there
    ResourceLog(store, f"{EVENTS}/log").update(
        lambda _: {"time": 0.0, "kind": "warning", "payload": {"text": "2"}}, 1, "b"
    )
    run(store, clock, 3 * SIZE)

    log.add({"time": 0.0, "kind": "warning", "payload": {"text": "2"}}, 1, "b")

    assert [event.payload["text"] for event in events_of(store)].count("2") == 1


class Unsteady(CountingStore):
    """A store that fails so many reads of segments."""

    failures = 0

    def get(self, key: str) -> bytes:
        if self.failures and "/segments/" in key:
            self.failures -= 1
            raise Unavailable("the object store does not answer; try again")
        return super().get(key)


def test_an_event_is_written_once_though_the_look_for_its_segment_fails(store: ObjectStore, clock: Clock) -> None:
    unsteady = Unsteady(store)
    log = run(unsteady, clock, SIZE, interval_s=0.0)
    unsteady.failures = 1

    with pytest.raises(Unavailable):
        log.append(1, EventKind.WARNING, {"text": "next"}, "next")
    log.append(1, EventKind.WARNING, {"text": "next"}, "next")
    log.append(1, EventKind.WARNING, {"text": "last"}, "last")

    assert [event.payload["text"] for event in events_of(store, SIZE)] == ["next", "last"]


@pytest.mark.parametrize("after_s", [0.0, KEPT_S], ids=["before the segment's records go", "after"])
def test_the_next_attempt_gathers_what_a_lost_one_left(store: ObjectStore, clock: Clock, after_s: float) -> None:
    run(store, clock, 2 * SIZE - 1, interval_s=0.0)  # a segment, with its records, and most of another
    clock.now += after_s

    run(store, clock, 3 * SIZE, attempt=2)

    assert objects(store) == {"log": SIZE - 1 + 1, "segments": 4}
    assert [event.sequence for event in events_of(store)] == list(range(1, 5 * SIZE))


def test_a_log_of_an_earlier_release_is_read_and_gathered(store: ObjectStore, clock: Clock) -> None:
    plain = ResourceLog(store, f"{EVENTS}/log")
    for number in range(1, 3 * SIZE + 1):
        plain.update(lambda _, n=number: {"time": 0.0, "kind": "warning", "payload": {"text": str(n)}}, 1)  # type: ignore[misc]

    assert len(events_of(store)) == 3 * SIZE
    assert EventLog(store, JOB).last_sequence() == 3 * SIZE
    run(store, clock, SIZE, attempt=2)
    assert [event.payload["text"] for event in events_of(store)] == [str(number) for number in range(1, 4 * SIZE + 1)]
    assert objects(store)["segments"] == 4


def test_two_attempts_that_gather_at_once_write_the_same(store: ObjectStore, clock: Clock) -> None:
    first, second = GatheringLog(store, EVENTS, clock), GatheringLog(store, EVENTS, clock)
    for number in range(SIZE):
        first.add({"time": 0.0, "kind": "warning", "payload": {"text": str(number)}}, 1, str(number))
    second.head()
    for _ in range(2):
        for log in (first, second):
            log.gather()
        clock.now += KEPT_S

    assert len(events_of(store)) == SIZE
    assert objects(store) == {"log": 1, "segments": 1}


def test_events_of_a_job_that_took_the_name_are_not_replaced(store: ObjectStore, clock: Clock) -> None:
    stale = EventLog(store, JOB, gathers=True, clock=clock)
    for number in range(SIZE):
        stale.append(1, EventKind.WARNING, {"text": f"old {number}"}, str(number))
    store.delete_folder(JOB)
    new = EventLog(store, JOB)
    for number in range(1, SIZE + 2):
        new.append(2, EventKind.WARNING, {"text": str(number)}, f"new {number}")

    stale.gather()
    clock.now += KEPT_S
    stale.gather()

    assert [event.payload["text"] for event in events_of(store)] == [str(number) for number in range(1, SIZE + 2)]


@pytest.mark.parametrize("data", [b"", b"not compressed", b"x\x9c\x03\x00\x00\x00\x00\x01", zlib.compress(b"[1]")])
def test_a_damaged_segment_is_data_loss_that_names_it(store: ObjectStore, clock: Clock, data: bytes) -> None:
    run(store, clock, SIZE + 1)
    key = f"{EVENTS}/segments/000000000.json.z"
    store.put(key, data)

    with pytest.raises(DataLoss, match=key):
        events_of(store)


class Paused(CountingStore):
    """A store in which something happens just before a segment is written."""

    before: Callable[[], object] | None = None

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        if self.before is not None and "/segments/" in key:
            happens, self.before = self.before, None
            happens()
        super().put_if_absent(key, data)


def gathering(store: ObjectStore, clock: Clock) -> EventLog:
    """Return the log of a run whose first segment is due."""
    log = EventLog(store, JOB, gathers=True, clock=clock)
    for number in range(1, SIZE + 1):
        log.append(1, EventKind.WARNING, {"text": f"old {number}"}, f"old {number}")
    return log


def write_new(log: EventLog, *numbers: int) -> None:
    for number in numbers:
        log.append(2, EventKind.WARNING, {"text": f"new {number}"}, f"new {number}")


def test_a_job_that_takes_the_name_while_a_segment_is_written_keeps_its_events(
    store: ObjectStore, clock: Clock
) -> None:
    paused = Paused(store)
    stale, new = gathering(paused, clock), EventLog(store, JOB, gathers=True, clock=clock)

    def take_name() -> None:
        store.delete_folder(JOB)
        write_new(new, 1, 2, 3)

    paused.before = take_name
    stale.gather()
    for number in range(4, SIZE):
        clock.now += TRUSTED_S
        write_new(new, number)
        new.gather()

    assert objects(store)["segments"] == 0
    assert [event.payload["text"] for event in events_of(store)] == [f"new {number}" for number in range(1, SIZE)]


def test_a_segment_of_a_job_that_is_deleted_meanwhile_does_not_stay(store: ObjectStore, clock: Clock) -> None:
    paused = Paused(store)
    stale = gathering(paused, clock)
    paused.before = lambda: store.delete_folder(JOB)

    stale.gather()

    assert objects(store) == {"log": 0, "segments": 0}


def test_a_segment_that_a_deleted_job_left_hides_no_event_and_deletes_none(store: ObjectStore, clock: Clock) -> None:
    gathering(store, clock).gather()
    segment = store.get(f"{EVENTS}/segments/000000000.json.z")
    store.delete_folder(JOB)
    new = EventLog(store, JOB, gathers=True, clock=clock)
    write_new(new, 1, 2, 3)
    store.put(f"{EVENTS}/segments/000000000.json.z", segment)  # its writer died right after
    clock.now += TRUSTED_S

    write_new(new, 4, 5)

    assert objects(store)["segments"] == 0
    assert [event.payload["text"] for event in events_of(store)] == [f"new {number}" for number in range(1, 6)]


def test_records_that_are_not_those_of_the_segment_stay(store: ObjectStore, clock: Clock) -> None:
    log = gathering(store, clock)
    log.gather()
    segment = store.get(f"{EVENTS}/segments/000000000.json.z")
    store.delete_folder(JOB)
    write_new(EventLog(store, JOB), 1, 2, 3)
    store.put(f"{EVENTS}/segments/000000000.json.z", segment)
    clock.now += KEPT_S

    log.gather()

    assert objects(store)["segments"] == 0
    assert [event.payload["text"] for event in events_of(store)] == ["new 1", "new 2", "new 3"]


def test_a_segment_stays_whose_records_another_attempt_deletes_meanwhile(store: ObjectStore, clock: Clock) -> None:
    paused = Paused(store)
    slow = gathering(paused, clock)
    paused.before = lambda: run(store, clock, 3, attempt=2)

    slow.gather()

    assert objects(store)["segments"] == 1
    assert [event.sequence for event in events_of(store)] == list(range(1, SIZE + 4))


def test_a_record_that_a_late_writer_left_does_not_cost_a_segment(store: ObjectStore, clock: Clock) -> None:
    run(store, clock, 2 * SIZE)
    before = events_of(store)
    # Its writer died before it saw that the place is in a segment.
    ResourceLog(store, f"{EVENTS}/log").append(None, {"time": 0.0, "kind": "warning", "payload": {"text": "late"}}, 1)

    run(store, clock, 2, attempt=2)

    assert events_of(store)[: 2 * SIZE] == before
    assert not store.exists(f"{EVENTS}/log/000000000001.json")


def test_events_with_a_value_that_equals_nothing_are_gathered(store: ObjectStore, clock: Clock) -> None:
    log = EventLog(store, JOB, gathers=True, clock=clock)
    for number in range(SIZE):
        log.append(1, EventKind.PROGRESS, {"loss": math.nan}, str(number))
    log.gather()

    assert objects(store)["segments"] == 1
    assert all(math.isnan(event.payload["loss"]) for event in events_of(store))


DAMAGED = [b"", b"\xff", b"[]", b'{"number": 1', b'{"number": 1}']


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_event_is_data_loss_that_names_it(store: ObjectStore, data: bytes) -> None:
    log = EventLog(store, JOB)
    for number in range(3):
        log.append(1, EventKind.WARNING, {"text": str(number)}, str(number))
    key = f"{EVENTS}/log/000000000002.json"
    store.put(key, data)

    with pytest.raises(DataLoss, match=key):
        events_of(store)


@pytest.mark.parametrize("data", DAMAGED)
def test_events_that_cannot_be_gathered_stay_as_they_are_and_the_later_ones_are_gathered(
    store: ObjectStore, clock: Clock, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(store, JOB)
    for number in range(SIZE):
        log.append(1, EventKind.WARNING, {"text": str(number)}, str(number))
    store.put(f"{EVENTS}/log/000000000004.json", data)

    run(store, clock, 2 * SIZE, attempt=2)

    assert "000000000004.json" in caplog.text
    assert [event.sequence for event in events_of(store, 4)] == list(range(5, 3 * SIZE + 1))
    segments = sorted(info.key for info in store.list(f"{EVENTS}/segments"))
    assert segments == [f"{EVENTS}/segments/{index:09d}.json.z" for index in (1, 2)]
    assert store.exists(f"{EVENTS}/log/000000000001.json")
    assert not store.exists(f"{EVENTS}/log/{SIZE + 1:012d}.json")


def test_records_of_a_damaged_segment_stay(store: ObjectStore, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run(store, clock, SIZE + 1, interval_s=0.0)
    store.put(f"{EVENTS}/segments/000000000.json.z", b"damaged")
    clock.now += KEPT_S

    run(store, clock, 3 * SIZE, attempt=2)

    assert "000000000.json.z" in caplog.text
    assert store.exists(f"{EVENTS}/log/000000000001.json")
    assert objects(store)["segments"] == 4


@pytest.mark.parametrize("events", [3 * SIZE, 3 * SIZE + 3])
def test_a_damaged_segment_costs_its_own_events_only(store: ObjectStore, clock: Clock, events: int) -> None:
    run(store, clock, events)
    store.put(f"{EVENTS}/segments/000000000.json.z", b"damaged")

    assert EventLog(store, JOB).last_sequence() == events
    EventLog(store, JOB).append(2, EventKind.WARNING, {"text": "next"}, "next")

    assert [event.sequence for event in events_of(store, SIZE)] == list(range(SIZE + 1, events + 2))
    with pytest.raises(DataLoss):
        events_of(store)


def test_events_of_a_damaged_segment_are_read_while_their_records_are_there(store: ObjectStore, clock: Clock) -> None:
    run(store, clock, 2 * SIZE, interval_s=0.0)
    store.put(f"{EVENTS}/segments/000000000.json.z", b"damaged")

    assert [event.sequence for event in events_of(store)] == list(range(1, 2 * SIZE + 1))


def test_the_times_leave_room() -> None:
    assert ABSENT_S < TRUSTED_S < KEPT_S
