"""Events of a long run lie in segments, copies while the job lives: read by segments, and fenced as before."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest

from shared.errors import DataLoss, Unavailable
from shared.resource_log import Record, ResourceLog, StaleAttempt
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from train_service.records import event_log
from train_service.records.event_log import Event, EventKind, EventLog, GatheringLog, SegmentedLog, gather_ended

JOB = "trainingJobs/a"
EVENTS = f"{JOB}/events"
SIZE = 8


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_RECORDS", SIZE)


def run(store: ObjectStore, events: int, attempt: int = 1) -> EventLog:
    """Write so many events, as the reporter of an attempt does."""
    log = EventLog(store, JOB, gathers=True)
    begin = EventLog(store, JOB).last_sequence()
    for number in range(begin + 1, begin + events + 1):
        log.append(attempt, EventKind.WARNING, {"text": str(number)}, f"{attempt}-{number}")
        log.gather()
    return log


def end(store: ObjectStore, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Gather the events as after the end of the job. `meanwhile` is called before each deletion."""

    def remove(keys: Sequence[str]) -> bool:
        meanwhile()
        store.delete_all(keys)
        return True

    gather_ended(store, JOB, remove)


def events_of(store: ObjectStore, after: int = 0) -> list[Event]:
    return list(EventLog(store, JOB).after(after))


def texts(store: ObjectStore, after: int = 0) -> list[str]:
    return [event.payload["text"] for event in events_of(store, after)]


def written(last: int, first: int = 1) -> list[str]:
    return [str(number) for number in range(first, last + 1)]


def objects(store: ObjectStore) -> dict[str, int]:
    keys = [info.key for info in store.list(EVENTS)]
    return {folder: sum(key.startswith(f"{EVENTS}/{folder}/") for key in keys) for folder in ("log", "gathered")}


def segments(store: ObjectStore) -> list[str]:
    return sorted(info.key for info in store.list(f"{EVENTS}/gathered"))


def record_key(number: int) -> str:
    return f"{EVENTS}/log/{number:012d}.json"


def as_earlier_release(store: ObjectStore, *indices: int, keep_records: bool = False) -> None:
    """Turn segments into those of the release before: with no record, under a key that names none."""
    for index in indices:
        numbers = range(index * SIZE + 1, (index + 1) * SIZE + 1)
        states = [json.loads(store.get(record_key(number))) for number in numbers]
        store.put(f"{EVENTS}/segments/{index:09d}.json.z", zlib.compress(json.dumps(states).encode()))
        for key in segments(store):
            if key.startswith(f"{EVENTS}/gathered/{index:09d}."):
                store.delete(key)
        if not keep_records:
            store.delete_all([record_key(number) for number in numbers])


# --- A run, and its end ---


def test_a_log_reads_as_it_was_written_and_is_few_objects_after_the_end(store: ObjectStore) -> None:
    last = 10 * SIZE + 3
    run(store, last)
    assert objects(store) == {"log": last + 1, "gathered": 10}  # and the number of a recent record

    for _ in range(2):
        assert [event.sequence for event in events_of(store)] == list(range(1, last + 1))
        assert texts(store) == written(last)
        assert texts(store, 9 * SIZE + 1) == written(last, 9 * SIZE + 2)
        assert EventLog(store, JOB).last_sequence() == last
        end(store)

    assert objects(store) == {"log": 10 + 3 + 1, "gathered": 10}
    end(CountingStore(store))


def test_gathering_again_costs_one_listing(store: ObjectStore) -> None:
    run(store, 10 * SIZE + 3)
    end(store)
    counting = CountingStore(store)

    end(counting)

    assert [request.split()[0] for request in counting.requests] == ["list"]


def test_an_event_is_written_with_one_request_and_those_of_its_segment(store: ObjectStore) -> None:
    counting = CountingStore(store)
    log = run(counting, SIZE)
    counting.forget()

    for number in range(4 * SIZE):
        log.append(1, EventKind.WARNING, {"text": str(number)}, str(number))
        log.gather()

    verbs = [request.split()[0] for request in counting.requests]
    assert verbs.count("put_if_absent") == 4 * SIZE
    assert sorted(set(verbs)) == ["put", "put_if_absent"]
    assert verbs.count("put") == 4 * 2  # a hint and a segment


@pytest.mark.parametrize("is_over", [False, True])
def test_reading_costs_two_requests_a_segment_and_following_one(store: ObjectStore, is_over: bool) -> None:
    run(store, 25 * SIZE)
    if is_over:
        end(store)
    counting = CountingStore(store)
    reader = EventLog(counting, JOB)

    assert len(list(reader.after(0))) == 25 * SIZE
    assert len(counting.requests) <= 2 * 25 + 4

    counting.forget()
    assert not list(reader.after(25 * SIZE, also_gathered=False))
    assert len(counting.requests) == 1
    EventLog(store, JOB).append(1, EventKind.WARNING, {"text": "new"}, "new")
    counting.forget()
    assert [event.payload["text"] for event in reader.after(25 * SIZE, also_gathered=False)] == ["new"]
    assert len(counting.requests) == 2


@pytest.mark.parametrize("length", [3, 30])
def test_a_page_costs_the_same_in_a_long_log(store: ObjectStore, length: int) -> None:
    run(store, length * SIZE)
    counting = CountingStore(store)

    assert EventLog(counting, JOB).page(SIZE, 3)

    assert len(counting.requests) == 2


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("length", [4, 20])
def test_the_newest_event_is_found_with_as_many_requests_in_a_long_log(
    store: ObjectStore, length: int, is_over: bool
) -> None:
    run(store, length * SIZE + 3)
    if is_over:
        end(store)
    counting = CountingStore(store)

    assert EventLog(counting, JOB).last_sequence() == length * SIZE + 3
    assert len(counting.requests) <= 12


@pytest.mark.parametrize("events", [0, 1, SIZE, SIZE + 1, 3 * SIZE + 7])
@pytest.mark.parametrize("hint", [None, "4", "8", "16", "999999", "no number"])
def test_the_newest_event_is_found_whatever_the_hint_says(store: ObjectStore, events: int, hint: str | None) -> None:
    run(store, events)
    store.delete(f"{EVENTS}/log/newest")
    if hint is not None:
        store.put(f"{EVENTS}/log/newest", hint.encode())

    for _ in range(2):
        assert EventLog(store, JOB).last_sequence() == events
        end(store)


def test_a_kept_log_finds_the_newest_event_though_it_read_before_the_end(store: ObjectStore) -> None:
    run(store, SIZE + 2)
    log = EventLog(store, JOB)
    assert log.last_sequence() == SIZE + 2

    run(store, 5 * SIZE)
    end(store)

    assert log.last_sequence() == 6 * SIZE + 2


def test_a_page_has_the_rest_of_its_segment_and_few_events_behind_the_segments(store: ObjectStore) -> None:
    run(store, 2 * SIZE + 5)
    log = EventLog(store, JOB)

    assert [event.sequence for event in log.page(2, 3)] == list(range(3, SIZE + 1))
    assert [event.sequence for event in log.page(SIZE - 1, 3)] == list(range(SIZE, 2 * SIZE + 1))
    assert [event.sequence for event in log.page(2 * SIZE, 3)] == list(range(2 * SIZE + 1, 2 * SIZE + 4))
    assert log.page(2 * SIZE + 5, 3) == []


def test_a_page_ends_by_its_memory_and_has_at_least_an_event(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(store, JOB, gathers=True)
    for number in range(1, 2 * SIZE + 1):
        text = "x" * (20_000 if number == 3 else 1_000)
        log.append(1, EventKind.WARNING, {"text": text}, str(number))
        log.gather()
    monkeypatch.setattr(event_log, "PAGE_BYTES", 4 * event_log.MEMORY_PER_BYTE * 1_100)
    pages: list[list[int]] = []
    while page := EventLog(store, JOB).page(pages[-1][-1] if pages else 0, 3):
        pages.append([event.sequence for event in page])

    assert pages == [[1, 2], [3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16]]


def test_a_segment_of_large_events_is_read_eight_times_at_most(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_RECORDS", 64)
    log = EventLog(store, JOB, gathers=True)
    for number in range(1, 66):
        log.append(1, EventKind.WARNING, {"text": "x" * 20_000}, str(number))
        log.gather()
    pages: list[int] = []
    while sum(pages) < 64:
        pages.append(len(EventLog(store, JOB).page(sum(pages), 8)))
    assert sum(pages) == 64
    assert len(pages) <= event_log.PAGES_A_SEGMENT + 1


def test_a_log_that_is_kept_holds_no_segment(store: ObjectStore) -> None:
    run(store, 3 * SIZE + 2)
    log = SegmentedLog(store, EVENTS)
    events = EventLog(store, JOB)
    events._log = log

    events.last_sequence()
    assert log._segment == (-1, [])
    assert [event.sequence for event in events.after(SIZE)] == list(range(SIZE + 1, 3 * SIZE + 3))
    assert log._segment == (-1, [])
    assert next(events.after(SIZE)).sequence == SIZE + 1
    gc.collect()
    assert log._segment == (-1, [])


def test_events_with_a_value_that_equals_nothing_are_gathered(store: ObjectStore) -> None:
    log = EventLog(store, JOB, gathers=True)
    for number in range(SIZE):
        log.append(1, EventKind.PROGRESS, {"loss": math.nan}, str(number))
    log.gather()
    end(store)

    assert objects(store) == {"log": 1 + 1, "gathered": 1}
    assert all(math.isnan(event.payload["loss"]) for event in events_of(store))


# --- Several attempts, and processes that slept ---


class Interrupted(CountingStore):
    """A store in which something happens once, just before a request whose verb and key contain `before`."""

    def __init__(self, store: ObjectStore, before: str, happens: Callable[[], object]) -> None:
        super().__init__(store)
        self.before: str | None = before
        self.happens = happens

    def get(self, key: str) -> bytes:
        self._interrupt(f"get {key}")
        return super().get(key)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self._interrupt(f"put {key}")
        super().put(key, data)

    def _interrupt(self, request: str) -> None:
        if self.before is not None and self.before in request:
            self.before = None
            self.happens()


def test_a_reader_that_slept_between_two_requests_finds_what_was_gathered(store: ObjectStore) -> None:
    def write_and_end() -> None:
        run(store, SIZE + 1)
        end(store)

    # After the look for a segment all of it is written and gathered, and its records are deleted.
    sleepy = Interrupted(store, "get " + record_key(1), write_and_end)

    assert texts(sleepy) == written(SIZE + 1)


def test_a_reader_in_the_middle_of_a_segment_finds_the_rest_when_its_records_are_deleted(store: ObjectStore) -> None:
    run(store, SIZE - 3)

    def write_and_end() -> None:
        run(store, 5)
        end(store)

    sleepy = Interrupted(store, "get " + record_key(SIZE - 2), write_and_end)

    assert texts(sleepy) == written(SIZE + 2)


def test_a_writer_that_slept_is_fenced_while_the_job_lives(store: ObjectStore) -> None:
    stale = EventLog(store, JOB)
    stale.append(1, EventKind.WARNING, {"text": "1"}, "first")
    run(store, 3 * SIZE, attempt=2)
    before = events_of(store)

    with pytest.raises(StaleAttempt):
        stale.append(1, EventKind.WARNING, {"text": "late"}, "late")

    assert events_of(store) == before
    assert objects(store)["log"] == 3 * SIZE + 1 + 1


def test_a_writer_of_the_same_attempt_that_slept_writes_behind_the_others(store: ObjectStore) -> None:
    sleeping = EventLog(store, JOB)
    sleeping.append(1, EventKind.WARNING, {"text": "1"}, "first")
    run(store, 3 * SIZE)

    sleeping.append(1, EventKind.WARNING, {"text": "late"}, "late")

    assert texts(store)[-2:] == [str(3 * SIZE + 1), "late"]


def test_a_writer_that_slept_over_the_end_changes_nothing_that_is_read_and_is_fenced_at_last(
    store: ObjectStore,
) -> None:
    run(store, SIZE + 1)
    stale = EventLog(store, JOB)
    stale.append(1, EventKind.WARNING, {"text": str(SIZE + 2)}, "stale")
    run(store, 3 * SIZE, attempt=2)
    end(store)

    for number in range(SIZE + 3, 2 * SIZE):
        stale.append(1, EventKind.WARNING, {"text": "late"}, f"late {number}")
    with pytest.raises(StaleAttempt):
        stale.append(1, EventKind.WARNING, {"text": "late"}, "late")
    assert store.exists(record_key(SIZE + 3))

    last = 4 * SIZE + 2
    assert texts(store) == written(last)
    assert texts(store, SIZE + 3) == written(last, SIZE + 4)
    assert EventLog(store, JOB).last_sequence() == last
    run(store, SIZE, attempt=3)
    end(store)
    assert texts(store) == written(last + SIZE)
    assert not store.exists(record_key(SIZE + 3))


def test_an_unanswered_append_is_written_once_though_its_segment_was_gathered(store: ObjectStore) -> None:
    log = SegmentedLog(store, EVENTS)
    log.add({"time": 0.0, "kind": "warning", "payload": {"text": "1"}}, 1, "a")
    log._unanswered = 2  # the answer to the next write did not come, but the record is there
    ResourceLog(store, f"{EVENTS}/log").update(
        lambda _: {"time": 0.0, "kind": "warning", "payload": {"text": "2"}}, 1, "b"
    )
    run(store, 3 * SIZE)
    end(store)

    log.add({"time": 0.0, "kind": "warning", "payload": {"text": "2"}}, 1, "b")

    assert texts(store).count("2") == 1


def test_the_next_attempt_gathers_what_a_lost_one_left(store: ObjectStore) -> None:
    plain = EventLog(store, JOB)
    for number in range(1, 2 * SIZE):
        plain.append(1, EventKind.WARNING, {"text": str(number)}, str(number))

    run(store, 3 * SIZE, attempt=2)

    assert objects(store)["gathered"] == 4
    assert texts(store) == written(5 * SIZE - 1)


def test_segments_that_no_attempt_wrote_are_written_at_the_end(store: ObjectStore) -> None:
    plain = EventLog(store, JOB)
    for number in range(1, 4 * SIZE):
        plain.append(1, EventKind.WARNING, {"text": str(number)}, str(number))

    end(store)

    assert objects(store) == {"log": 3 + SIZE - 1 + 1, "gathered": 3}
    assert texts(store) == written(4 * SIZE - 1)


def test_two_attempts_that_gather_at_once_write_the_same(store: ObjectStore) -> None:
    first, second = GatheringLog(store, EVENTS), GatheringLog(store, EVENTS)
    for number in range(SIZE):
        first.add({"time": 0.0, "kind": "warning", "payload": {"text": str(number)}}, 1, str(number))
    second.head()
    first.gather()
    content = [store.get(key) for key in segments(store)]
    second._there = frozenset()
    second.gather()
    second._write_segment(0)

    assert [store.get(key) for key in segments(store)] == content
    assert len(events_of(store)) == SIZE


def test_whatever_request_a_gathering_stops_at_nothing_is_lost_and_the_next_one_goes_on(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "READ_AT_ONCE", 1)  # the same requests in the same order each time
    monkeypatch.setattr(event_log, "SEGMENTS_AT_ONCE", 1)
    last = 2 * SIZE + 1
    plain = EventLog(store, JOB)
    for number in range(1, last + 1):
        plain.append(1, EventKind.WARNING, {"text": str(number)}, str(number))
    kept = {info.key: store.get(info.key) for info in store.list(EVENTS)}
    for is_done in (False, True):
        number, is_reached = 0, True
        while is_reached:
            number += 1
            store.delete_folder(EVENTS)
            for key, data in kept.items():
                store.put(key, data)
            counting = CountingStore(store)
            counting.fails_at, counting.is_done = number, is_done
            with contextlib.suppress(Unavailable):
                end(counting)
            is_reached = len(counting.requests) >= number
            assert texts(store) == written(last)
            end(store)
            assert objects(store) == {"log": 2 + 1 + 1, "gathered": 2}
            assert texts(store) == written(last)
        assert number > 2 * SIZE


def test_a_deletion_that_stops_halfway_is_finished_by_the_next_gathering(store: ObjectStore) -> None:
    run(store, 2 * SIZE)

    def remove_some(keys: Sequence[str]) -> bool:
        store.delete_all(list(keys)[::2])
        return False

    gather_ended(store, JOB, remove_some)
    assert texts(store) == written(2 * SIZE)
    end(store)

    assert objects(store) == {"log": 2 + 1, "gathered": 2}
    assert texts(store) == written(2 * SIZE)


def test_an_attempt_that_begins_while_the_events_are_gathered_goes_on_behind_them(store: ObjectStore) -> None:
    run(store, 3 * SIZE)

    end(store, meanwhile=lambda: run(store, SIZE + 2, attempt=2))

    assert texts(store) == written(4 * SIZE + 2)
    # Only what was listed before is deleted.
    assert all(store.exists(record_key(number)) for number in range(3 * SIZE, 4 * SIZE + 3))


# --- Jobs that have the name of a deleted one ---


def write_new(log: EventLog, *numbers: int) -> None:
    for number in numbers:
        log.append(2, EventKind.WARNING, {"text": f"new {number}"}, f"new {number}")


def gathering(store: ObjectStore) -> EventLog:
    """Return the log of a run whose first segment is due."""
    log = EventLog(store, JOB, gathers=True)
    for number in range(1, SIZE + 1):
        log.append(1, EventKind.WARNING, {"text": f"old {number}"}, f"old {number}")
    return log


@pytest.mark.parametrize("events", [3, SIZE, 2 * SIZE])
def test_a_job_that_takes_the_name_while_a_segment_is_written_never_reads_that_segment(
    store: ObjectStore, events: int
) -> None:
    new = EventLog(store, JOB, gathers=True)

    def take_name() -> None:
        store.delete_folder(JOB)
        for number in range(1, events + 1):
            write_new(new, number)
            new.gather()

    gathering(Interrupted(store, "put " + f"{EVENTS}/gathered", take_name)).gather()

    for _ in range(2):
        assert texts(store) == [f"new {number}" for number in range(1, events + 1)]
        assert EventLog(store, JOB).last_sequence() == events
        end(store)


def test_a_late_gatherer_of_a_deleted_job_mixes_no_events_of_two_jobs(store: ObjectStore) -> None:
    stale = EventLog(store, JOB, gathers=True)
    for number in range(1, SIZE):
        stale.append(1, EventKind.WARNING, {"text": f"old {number}"}, f"old {number}")
    EventLog(store, JOB).append(1, EventKind.WARNING, {"text": "of another process"}, "other")
    stale.append(1, EventKind.WARNING, {"text": "next"}, "next")
    store.delete_folder(JOB)
    write_new(EventLog(store, JOB), *range(1, SIZE + 2))

    stale.gather()

    assert objects(store)["gathered"] == 1  # of the new job, as its log says
    assert texts(store) == [f"new {number}" for number in range(1, SIZE + 2)]


def test_a_segment_that_a_deleted_job_left_hides_no_event_and_deletes_none(store: ObjectStore) -> None:
    gathering(store).gather()
    [key] = segments(store)
    segment = store.get(key)
    store.delete_folder(JOB)
    new = EventLog(store, JOB, gathers=True)
    write_new(new, *range(1, SIZE + 3))
    store.put(key, segment)  # its writer was late, and died right after

    new.gather()
    for _ in range(2):
        assert texts(store) == [f"new {number}" for number in range(1, SIZE + 3)]
        end(store)


# --- Damage ---

DAMAGED_SEGMENTS = [
    b"",
    b"not compressed",
    b"x\x9c\x03\x00\x00\x00\x00\x01",
    zlib.compress(b"[1]"),
    zlib.compress(b"{}"),
]


@pytest.mark.parametrize("data", DAMAGED_SEGMENTS)
def test_a_damaged_segment_is_ignored_and_written_again_before_its_records_go(store: ObjectStore, data: bytes) -> None:
    run(store, 2 * SIZE + 1)
    store.put(segments(store)[0], data)
    assert texts(store) == written(2 * SIZE + 1)

    end(store)

    assert objects(store) == {"log": 2 + 1 + 1, "gathered": 2}
    assert texts(store) == written(2 * SIZE + 1)


@pytest.mark.parametrize("data", DAMAGED_SEGMENTS)
def test_a_segment_that_is_damaged_after_its_records_went_costs_its_own_events_only(
    store: ObjectStore, data: bytes
) -> None:
    run(store, 3 * SIZE)
    end(store)
    store.put(segments(store)[0], data)

    with pytest.raises(DataLoss, match=record_key(1)[:-20]):
        events_of(store)
    assert EventLog(store, JOB).last_sequence() == 3 * SIZE
    run(store, 1, attempt=2)
    assert texts(store, SIZE) == written(3 * SIZE + 1, SIZE + 1)


@pytest.mark.parametrize("hint", [3, SIZE])
def test_a_damaged_segment_that_the_hint_points_into_stops_no_attempt(store: ObjectStore, hint: int) -> None:
    run(store, SIZE)
    end(store)
    store.put(segments(store)[0], b"damaged")
    store.put(f"{EVENTS}/log/newest", str(hint).encode())

    log = EventLog(store, JOB)
    assert log.last_sequence() == SIZE
    log.append_first(2, EventKind.ATTEMPT_ENDED, {"text": "ended"})
    log.append_first(2, EventKind.ATTEMPT_ENDED, {"text": "ended"})

    assert texts(store, SIZE) == ["ended"]


def test_a_writer_that_looks_back_into_a_damaged_segment_goes_on(store: ObjectStore) -> None:
    run(store, SIZE + 2)
    end(store)
    store.put(segments(store)[0], b"damaged")

    EventLog(store, JOB).append_first(1, EventKind.ATTEMPT_ENDED, {"text": "ended"})

    assert texts(store, SIZE) == [str(SIZE + 1), str(SIZE + 2), "ended"]


DAMAGED = [b"", b"\xff", b"[]", b'{"number": 1', b'{"number": 1}']


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_event_is_data_loss_that_names_it(store: ObjectStore, data: bytes) -> None:
    log = EventLog(store, JOB)
    for number in range(3):
        log.append(1, EventKind.WARNING, {"text": str(number)}, str(number))
    store.put(record_key(2), data)

    with pytest.raises(DataLoss, match=record_key(2)):
        events_of(store)


@pytest.mark.parametrize("number", [SIZE - 1, SIZE, SIZE + 2])
def test_attempts_go_on_behind_a_damaged_newest_event(store: ObjectStore, number: int) -> None:
    log = EventLog(store, JOB)
    for each in range(1, number + 1):
        log.append(1, EventKind.WARNING, {"text": str(each)}, str(each))
    store.put(record_key(number), b"damaged")

    EventLog(store, JOB).append_first(2, EventKind.ATTEMPT_ENDED, {"text": "next"})

    assert texts(store, number) == ["next"]


@pytest.mark.parametrize("data", DAMAGED)
@pytest.mark.parametrize("number", [4, SIZE])
def test_events_that_cannot_be_gathered_stay_as_they_are_and_the_later_ones_are_gathered(
    store: ObjectStore, data: bytes, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(store, JOB)
    for each in range(SIZE):
        log.append(1, EventKind.WARNING, {"text": str(each)}, str(each))
    store.put(record_key(number), data)

    run(store, 2 * SIZE, attempt=2)
    end(store)

    assert record_key(number) in caplog.text
    assert [event.sequence for event in events_of(store, number)] == list(range(number + 1, 3 * SIZE + 1))
    assert [key[len(EVENTS) :].split(".")[0] for key in segments(store)] == [
        "/gathered/000000001",
        "/gathered/000000002",
    ]
    assert all(store.exists(record_key(each)) for each in range(1, SIZE + 1))
    assert not store.exists(record_key(SIZE + 1))


@pytest.mark.parametrize("data", [b"damaged", None])
def test_a_sweep_reads_no_further_than_the_first_event_that_cannot_be_gathered(
    store: ObjectStore, data: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "READ_AT_ONCE", 2)
    log = EventLog(store, JOB)
    for each in range(SIZE):
        log.append(1, EventKind.WARNING, {"text": str(each)}, str(each))
    if data is None:
        store.delete(record_key(3))
    else:
        store.put(record_key(3), data)
    counting = CountingStore(store)

    end(counting)

    read = {request.split()[-1] for request in counting.requests if "/log/" in request and "list" not in request}
    # The last one says whether the segment is there. The fourth may be read together with the third.
    assert read - {record_key(4)} == {record_key(number) for number in (1, 2, 3, SIZE)}


# --- Logs of earlier releases ---


def test_a_log_without_segments_is_read_and_gathered(store: ObjectStore) -> None:
    plain = ResourceLog(store, f"{EVENTS}/log")
    for number in range(1, 3 * SIZE + 1):
        plain.update(lambda _, n=number: {"time": 0.0, "kind": "warning", "payload": {"text": str(n)}}, 1)  # type: ignore[misc]

    assert len(events_of(store)) == 3 * SIZE
    assert EventLog(store, JOB).last_sequence() == 3 * SIZE
    run(store, SIZE, attempt=2)
    assert texts(store) == written(4 * SIZE)
    assert objects(store)["gathered"] == 4


@pytest.mark.parametrize("behind", [0, 1, SIZE + 3])
@pytest.mark.parametrize("keep_records", [False, True])
def test_segments_whose_records_an_earlier_release_deleted_are_read_and_followed(
    store: ObjectStore, behind: int, keep_records: bool
) -> None:
    run(store, 3 * SIZE + behind)
    as_earlier_release(store, 0, 1)
    as_earlier_release(store, 2, keep_records=keep_records)
    last = 3 * SIZE + behind

    assert texts(store) == written(last)
    assert texts(store, SIZE + 2) == written(last, SIZE + 3)
    assert EventLog(store, JOB).last_sequence() == last
    run(store, SIZE, attempt=2)
    end(store)
    assert texts(store) == written(last + SIZE)
    newest = EventLog(store, JOB).find(2, EventKind.WARNING)
    assert newest is not None
    assert newest.payload["text"] == str(last + SIZE)
    with pytest.raises(StaleAttempt):
        EventLog(store, JOB).append(1, EventKind.WARNING, {"text": "late"}, "late")


def test_the_last_segment_of_an_earlier_release_fences_as_its_records_did(store: ObjectStore) -> None:
    run(store, 2 * SIZE, attempt=2)
    as_earlier_release(store, 0, 1)

    with pytest.raises(StaleAttempt):
        EventLog(store, JOB).append(1, EventKind.WARNING, {"text": "late"}, "late")


def test_a_record_that_a_late_writer_of_an_earlier_release_left_costs_no_event(store: ObjectStore) -> None:
    run(store, 2 * SIZE + 3)
    as_earlier_release(store, 0, 1)
    left = Record(SIZE + 1, "late", 2, 0.0, {"time": 0.0, "kind": EventKind.WARNING, "payload": {"text": "late"}})
    store.put_if_absent(record_key(SIZE + 1), json.dumps(asdict(left)).encode())

    run(store, SIZE, attempt=3)

    assert texts(store) == written(3 * SIZE + 3)


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize("hint", [3, SIZE, 2 * SIZE])
def test_a_damaged_segment_of_an_earlier_release_stops_no_attempt(store: ObjectStore, behind: int, hint: int) -> None:
    run(store, 2 * SIZE + behind)
    as_earlier_release(store, 0, 1)
    for index in (0, 1):
        store.put(f"{EVENTS}/segments/{index:09d}.json.z", b"damaged")
    store.put(f"{EVENTS}/log/newest", str(hint).encode())

    assert EventLog(store, JOB).last_sequence() == 2 * SIZE + behind
    EventLog(store, JOB).append_first(2, EventKind.ATTEMPT_ENDED, {"text": "next"})

    assert texts(store, 2 * SIZE) == [*written(2 * SIZE + behind, 2 * SIZE + 1), "next"]
    with pytest.raises(DataLoss):
        events_of(store)
