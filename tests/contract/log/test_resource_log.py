"""The resource log on real stores: finding the head, retried writes, and attempts that fence one another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import Unavailable
from shared.resource_log import Record, ResourceLog, StaleAttempt
from shared.settings import StoreSettings
from shared.storage import ObjectExists, ObjectStore, open_store

PREFIX = "things/one/log"


@pytest.fixture
def store(store_settings: StoreSettings) -> ObjectStore:
    return open_store(store_settings)


class Interrupted(ObjectStore):
    """A real store; before or after the next conditional write it does what the test says, once."""

    def __init__(self, store: ObjectStore) -> None:
        self.__dict__.update(vars(store))
        self.before: Callable[[], object] | None = None
        self.after: Callable[[], object] | None = None

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        before, self.before = self.before, None
        if before:
            before()
        super().put_if_absent(key, data)
        after, self.after = self.after, None
        if after:
            after()


class Counting(ObjectStore):
    def __init__(self, store: ObjectStore) -> None:
        self.__dict__.update(vars(store))
        self.reads = 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        return super().get(key)


def fill(log: ResourceLog, length: int) -> None:
    head = log.head()
    for number in range(head.number if head else 0, length):
        head = log.append(head, {"n": number + 1})
        assert head is not None


def count(previous: Record | None) -> dict[str, Any]:
    return {"n": previous.state["n"] + 1 if previous else 1}


def test_a_log_that_never_was_has_no_head(store: ObjectStore) -> None:
    log = ResourceLog(store, PREFIX)

    assert log.head() is None
    assert log.read(1) is None


def test_the_head_is_the_newest_record_at_every_length(store: ObjectStore) -> None:
    follower, log = ResourceLog(store, PREFIX), ResourceLog(store, PREFIX)
    for length in range(71):
        fill(log, length)
        cold = ResourceLog(store, PREFIX).head()
        assert (cold.number if cold else 0) == length
        assert cold == (log.read(length) if length else None)
        if length % 7 == 0:  # one that looks only now and then, from where it was
            assert follower.head() == cold


@given(start=st.integers(0, 70), more=st.integers(0, 70))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_galloping_from_any_known_head_agrees_with_reading_every_record(
    file_store: StoreSettings, start: int, more: int
) -> None:
    store = open_store(file_store)
    store.delete_folder(PREFIX)
    writer, follower = ResourceLog(store, PREFIX), ResourceLog(store, PREFIX)
    fill(writer, start)
    follower.head()
    fill(writer, start + more)

    number = 0
    while writer.read(number + 1) is not None:
        number += 1
    found = follower.head()

    assert number == start + more
    assert (found.number if found else 0) == number


def test_finding_the_head_does_not_read_the_whole_history(store: ObjectStore) -> None:
    fill(ResourceLog(store, PREFIX), 64)
    counting = Counting(store)
    log = ResourceLog(counting, PREFIX)

    log.head()
    assert counting.reads <= 2 * 7 + 1

    counting.reads = 0
    log.head()
    assert counting.reads == 1


def test_update_decides_again_on_what_the_faster_writer_wrote(store: ObjectStore) -> None:
    interrupted = Interrupted(store)
    log = ResourceLog(interrupted, PREFIX)
    log.update(count)
    interrupted.before = lambda: fill(ResourceLog(store, PREFIX), 2)

    record = log.update(count)

    assert record is not None
    assert (record.number, record.state) == (3, {"n": 3})


def test_update_writes_nothing_where_the_decision_is_to_leave_it(store: ObjectStore) -> None:
    log = ResourceLog(store, PREFIX)
    first = log.update(count)

    assert log.update(lambda _: None) == first
    assert log.read(2) is None


def test_an_error_of_the_decision_writes_nothing(store: ObjectStore) -> None:
    log = ResourceLog(store, PREFIX)
    log.update(count)

    def refuse(_: Record | None) -> dict[str, Any]:
        raise LookupError

    with pytest.raises(LookupError):
        log.update(refuse)
    assert log.read(2) is None


def test_append_after_a_record_that_was_overtaken_writes_nothing(store: ObjectStore) -> None:
    log = ResourceLog(store, PREFIX)
    first = log.append(None, {"n": 1})
    fill(ResourceLog(store, PREFIX), 2)

    assert log.append(first, {"n": 99}) is None
    assert log.append(None, {"n": 99}) is None
    assert [json.loads(store.get(info.key))["state"]["n"] for info in sorted(store.list(PREFIX), key=str)] == [1, 2]


def test_a_retried_write_that_meets_its_own_first_one_has_won(store: ObjectStore) -> None:
    interrupted = Interrupted(store)
    log = ResourceLog(interrupted, PREFIX)
    fill(log, 1)

    def lost_answer() -> None:
        # The client retries the PUT whose answer was lost, and the store refuses it.
        raise ObjectExists

    interrupted.after = lost_answer
    record = log.update(count)

    assert record is not None
    assert (record.number, record.state) == (2, {"n": 2})
    assert log.read(3) is None


def test_an_outage_in_the_middle_loses_no_record_and_invents_none(store: ObjectStore) -> None:
    interrupted = Interrupted(store)
    log = ResourceLog(interrupted, PREFIX)
    fill(log, 1)

    def outage() -> None:
        raise Unavailable("the object store does not answer")

    interrupted.before = outage
    with pytest.raises(Unavailable):
        log.update(count)
    assert log.read(2) is None
    interrupted.after = outage  # written, but the answer never came
    with pytest.raises(Unavailable):
        log.update(count)
    head = log.head()
    assert head is not None
    assert (head.number, head.state) == (2, {"n": 2})


def test_after_a_record_of_a_later_attempt_an_earlier_one_cannot_append(store: ObjectStore) -> None:
    zombie, later = ResourceLog(store, PREFIX), ResourceLog(store, PREFIX)
    zombie.update(count, attempt=1)
    later.update(count, attempt=2)

    for _ in range(2):
        with pytest.raises(StaleAttempt):
            zombie.update(count, attempt=1)
    with pytest.raises(StaleAttempt):
        zombie.append(zombie.head(), {"n": 99}, attempt=1)
    head = later.head()
    assert head is not None
    assert (head.number, head.state) == (2, {"n": 2})


def test_an_attempt_that_is_overtaken_between_reading_and_writing_is_stale(store: ObjectStore) -> None:
    interrupted = Interrupted(store)
    zombie = ResourceLog(interrupted, PREFIX)
    zombie.update(count, attempt=1)
    interrupted.before = lambda: ResourceLog(store, PREFIX).fence(2, {})

    with pytest.raises(StaleAttempt):
        zombie.update(count, attempt=1)

    head = ResourceLog(store, PREFIX).head()
    assert head is not None
    assert (head.number, head.attempt, head.state) == (2, 2, {"n": 1})


def test_a_request_follows_any_attempt_and_fences_none(store: ObjectStore) -> None:
    log = ResourceLog(store, PREFIX)
    log.update(count, attempt=3)

    request = ResourceLog(store, PREFIX).update(count)
    at_work = log.update(count, attempt=3)

    assert request is not None
    assert at_work is not None
    assert (request.attempt, request.number) == (3, 2)
    assert (at_work.attempt, at_work.number, at_work.state) == (3, 3, {"n": 3})


def test_a_request_that_a_new_attempt_overtakes_is_still_written(store: ObjectStore) -> None:
    interrupted = Interrupted(store)
    client = ResourceLog(interrupted, PREFIX)
    client.update(count, attempt=1)
    interrupted.before = lambda: ResourceLog(store, PREFIX).fence(2, {})

    request = client.update(count)

    assert request is not None
    assert (request.number, request.attempt, request.state) == (3, 2, {"n": 2})


def test_fencing_opens_an_empty_log_with_the_initial_state(store: ObjectStore) -> None:
    opened = ResourceLog(store, PREFIX).fence(1, {"things": []})

    assert (opened.number, opened.attempt, opened.state) == (1, 1, {"things": []})


def test_fencing_keeps_the_state_and_may_be_repeated_by_its_attempt(store: ObjectStore) -> None:
    log = ResourceLog(store, PREFIX)
    log.fence(1, {"things": []})
    log.update(lambda _: {"things": ["a"]}, attempt=1)

    first = ResourceLog(store, PREFIX).fence(2, {"things": []})
    again = ResourceLog(store, PREFIX).fence(2, {"things": []})

    assert first.state == {"things": ["a"]}
    assert again == first
    with pytest.raises(StaleAttempt):
        log.update(lambda _: {"things": ["b"]}, attempt=1)
    with pytest.raises(StaleAttempt):
        log.fence(1, {"things": []})
