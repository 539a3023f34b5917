from __future__ import annotations

from dataclasses import replace

import pytest

from inference_service.domain.batch_policy import Decision, Limits, Waiting, admit, decide, pieces, starts_s
from shared.errors import DeadlineExceeded, ResourceExhausted

LIMITS = Limits(max_rows=4, max_delay_s=0.01, max_queued_rows=8, max_in_flight=2)
NEVER = float("inf")


def waiting(rows: int = 1, *, arrived_s: float = 0.0, deadline_s: float = NEVER, divisible: bool = False) -> Waiting:
    return Waiting(rows, "raw", arrived_s, deadline_s, divisible=divisible)


def now(
    *queue: Waiting,
    in_flight: int = 0,
    now_s: float = 0.0,
    batch_s: float = 0.0,
    due_s: float = 0.0,
    full_due_s: float = 0.0,
    min_rows_to_send: int = 0,
    limits: Limits = LIMITS,
) -> Decision:
    return decide(
        queue,
        in_flight=in_flight,
        now_s=now_s,
        ends_s=now_s + batch_s,
        limits=limits,
        due_s=due_s,
        full_due_s=full_due_s,
        min_rows_to_send=min_rows_to_send,
    )


def sent(decision: Decision) -> tuple[int, ...]:
    return tuple(decision.batch)


def test_nothing_waits_nothing_is_sent() -> None:
    assert now() == Decision()


def test_an_idle_model_takes_what_there_is() -> None:
    assert sent(now(waiting(), waiting())) == (0, 1)


def test_a_busy_model_gives_rows_time_to_gather() -> None:
    assert now(waiting(arrived_s=1.0), in_flight=1, now_s=1.004) == Decision(wake_s=1.01)


def test_rows_that_waited_long_enough_go() -> None:
    assert sent(now(waiting(arrived_s=1.0), waiting(arrived_s=1.009), in_flight=1, now_s=1.01)) == (0, 1)


def test_an_idle_model_waits_a_moment_for_company_that_is_expected() -> None:
    assert now(waiting(arrived_s=1.0), now_s=1.004, min_rows_to_send=2) == Decision(wake_s=1.01)
    assert sent(now(waiting(arrived_s=1.0), waiting(arrived_s=1.003), now_s=1.004, min_rows_to_send=2)) == (0, 1)
    assert sent(now(waiting(arrived_s=1.0), now_s=1.01, min_rows_to_send=2)) == (0,)


def test_rows_gather_until_the_replica_is_about_to_be_free() -> None:
    assert now(waiting(arrived_s=1.0), in_flight=1, now_s=1.02, due_s=1.05) == Decision(wake_s=1.05)
    assert sent(now(waiting(arrived_s=1.0), in_flight=1, now_s=1.05, due_s=1.05)) == (0,)


def test_a_full_batch_waits_for_the_replica_too_and_leaves_somewhat_earlier() -> None:
    full = waiting(4, arrived_s=1.0)
    assert now(full, in_flight=1, now_s=1.0, due_s=1.05, full_due_s=1.04) == Decision(wake_s=1.04)
    assert sent(now(full, in_flight=1, now_s=1.04, due_s=1.05, full_due_s=1.04)) == (0,)


def test_a_replica_that_is_idle_beside_one_at_work_takes_what_there_is() -> None:
    two = Limits(max_rows=4, max_delay_s=0.01, max_queued_rows=8, max_in_flight=4)
    assert sent(now(waiting(arrived_s=1.0), in_flight=1, now_s=1.0, limits=two)) == (0,)
    assert sent(now(waiting(arrived_s=1.0), in_flight=2, now_s=1.0, limits=two)) == ()


def test_a_full_batch_goes_at_once() -> None:
    assert sent(now(waiting(3), waiting(1), waiting(1), in_flight=1)) == (0, 1)


def test_a_batch_that_the_next_request_would_overfill_counts_as_full() -> None:
    assert sent(now(waiting(3), waiting(2), in_flight=1)) == (0,)


def test_a_request_of_several_batches_fills_them_and_another_is_not_divided() -> None:
    assert now(waiting(), waiting(9, divisible=True), waiting()).batch == {0: 1, 1: 3}
    assert now(waiting(9, divisible=True), waiting()).batch == {0: 4}
    assert now(waiting(3), waiting(2)).batch == {0: 3}
    assert now(waiting(1), waiting(2, divisible=True), waiting(1)).batch == {0: 1, 1: 2, 2: 1}


def test_no_more_batches_than_the_model_has_room_for() -> None:
    assert now(waiting(4), in_flight=2) == Decision()


def test_an_expired_request_never_reaches_the_model() -> None:
    decision = now(waiting(deadline_s=0.9), waiting(deadline_s=5.0), now_s=1.0)
    assert (decision.late, decision.batch) == ((0,), {1: 1})


def test_a_request_that_a_busy_model_cannot_finish_in_time_is_late() -> None:
    assert now(waiting(deadline_s=1.4), in_flight=1, now_s=1.0, batch_s=0.5).late == (0,)


def test_an_idle_model_tries_whatever_the_estimate_says() -> None:
    assert sent(now(waiting(deadline_s=1.4), now_s=1.0, batch_s=0.5)) == (0,)


@pytest.mark.parametrize(("rows", "expected"), [(1, [(0, 1)]), (4, [(0, 4)]), (9, [(0, 4), (4, 8), (8, 9)])])
def test_large_requests_are_cut_into_batches(rows: int, expected: list[tuple[int, int]]) -> None:
    assert pieces(rows, 4) == expected


def enter(rows: int = 1, deadline_s: float = NEVER, queued_rows: int = 0, ends_s: float = 1.5) -> None:
    admit(
        rows, deadline_s, queued_rows=queued_rows, now_s=1.0, ends_s=ends_s, drained_s=queued_rows * 0.1, limits=LIMITS
    )


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    with pytest.raises(ResourceExhausted) as refused:
        enter(rows=3, queued_rows=6)
    assert refused.value.retry_after_s == pytest.approx(0.3)


def test_a_queue_takes_rows_up_to_its_bound() -> None:
    enter(rows=2, queued_rows=6)


def test_a_request_that_would_end_after_its_deadline_is_refused_at_once() -> None:
    enter(deadline_s=1.6)
    with pytest.raises(DeadlineExceeded, match="in the 500 ms that are left"):
        enter(deadline_s=1.5)


@pytest.mark.parametrize(
    ("frees_s", "batches_ahead", "expected_s"),
    [([1.2], 0, 1.2), ([1.2], 2, 2.2), ([1.0, 1.3], 0, 1.0), ([1.0, 1.3], 1, 1.3), ([1.0, 1.3], 2, 1.5)],
)
def test_a_batch_begins_once_those_in_flight_and_those_ahead_of_it_are_done(
    frees_s: list[float], batches_ahead: int, expected_s: float
) -> None:
    assert starts_s(frees_s, batches_ahead, 0.5) == pytest.approx(expected_s)


def test_an_idle_model_does_not_wait_for_company_past_what_a_deadline_leaves() -> None:
    limits = Limits(max_rows=8, max_delay_s=0.1, max_queued_rows=100, max_in_flight=2)
    queue = [Waiting(1, "raw", 0.0, 1.0), Waiting(1, "raw", 0.0, 0.08)]
    alone = decide(queue, in_flight=0, now_s=0.0, ends_s=0.01, bound_s=0.02, limits=limits, min_rows_to_send=8)
    assert sent(alone) == ()
    assert alone.wake_s == pytest.approx(0.06)
    due = decide(queue, in_flight=0, now_s=0.06, ends_s=0.07, bound_s=0.02, limits=limits, min_rows_to_send=8)
    assert sent(due) == (0, 1)


def of_bytes(size_bytes: int, rows: int = 1, *, divisible: bool = False) -> Waiting:
    return Waiting(rows, "raw", 0.0, NEVER, size_bytes, divisible)


def test_a_batch_that_requests_share_is_bounded_in_bytes() -> None:
    limits = replace(LIMITS, max_bytes=10)
    assert sent(now(of_bytes(6), of_bytes(4), of_bytes(1), limits=limits)) == (0, 1)
    assert sent(now(of_bytes(6), of_bytes(5), in_flight=1, limits=limits)) == (0,)  # as full as it gets
    assert sent(now(of_bytes(11), of_bytes(1), limits=limits)) == (0,)
    assert now(of_bytes(4), of_bytes(36, 12, divisible=True), limits=limits).batch == {0: 1, 1: 2}
    assert now(of_bytes(36, 12, divisible=True), limits=limits).batch == {0: 4}
    assert now(of_bytes(11), of_bytes(36, 12, divisible=True), limits=limits).batch == {0: 1}  # no room at all is left
