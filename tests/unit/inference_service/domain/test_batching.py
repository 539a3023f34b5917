from __future__ import annotations

from dataclasses import replace

import pytest

from inference_service.domain.batching import Decision, Limits, Waiting, admit, decide, pieces
from shared.errors import DeadlineExceeded, ResourceExhausted

LIMITS = Limits(max_rows=4, max_delay_s=0.01, max_queued_rows=8, max_in_flight=2)
NEVER = float("inf")


def waiting(rows: int = 1, *, arrived_s: float = 0.0, deadline_s: float = NEVER, form: str = "raw") -> Waiting:
    return Waiting(rows, form, arrived_s, deadline_s)


def now(
    *queue: Waiting,
    in_flight: int = 0,
    now_s: float = 0.0,
    batch_s: float = 0.0,
    free_s: float = 0.0,
    company: int = 0,
    limits: Limits = LIMITS,
) -> Decision:
    return decide(
        queue, in_flight=in_flight, now_s=now_s, batch_s=batch_s, limits=limits, free_s=free_s, company=company
    )


def test_nothing_waits_nothing_is_sent() -> None:
    assert now() == Decision()


def test_an_idle_model_takes_what_there_is() -> None:
    assert now(waiting(), waiting()).batch == (0, 1)


def test_a_busy_model_gives_rows_time_to_gather() -> None:
    assert now(waiting(arrived_s=1.0), in_flight=1, now_s=1.004) == Decision(wake_s=1.01)


def test_rows_that_waited_long_enough_go() -> None:
    assert now(waiting(arrived_s=1.0), waiting(arrived_s=1.009), in_flight=1, now_s=1.01).batch == (0, 1)


def test_an_idle_model_waits_a_moment_for_company_that_is_expected() -> None:
    assert now(waiting(arrived_s=1.0), now_s=1.004, company=2) == Decision(wake_s=1.01)
    assert now(waiting(arrived_s=1.0), waiting(arrived_s=1.003), now_s=1.004, company=2).batch == (0, 1)
    assert now(waiting(arrived_s=1.0), now_s=1.01, company=2).batch == (0,)


def test_rows_gather_until_the_replica_is_about_to_be_free() -> None:
    assert now(waiting(arrived_s=1.0), in_flight=1, now_s=1.02, free_s=1.05) == Decision(wake_s=1.05)
    assert now(waiting(arrived_s=1.0), in_flight=1, now_s=1.05, free_s=1.05).batch == (0,)


def test_a_full_batch_waits_for_no_replica() -> None:
    assert now(waiting(4), in_flight=1, now_s=1.0, free_s=1.05).batch == (0,)


def test_a_replica_that_is_idle_beside_one_at_work_takes_what_there_is() -> None:
    two = Limits(max_rows=4, max_delay_s=0.01, max_queued_rows=8, max_in_flight=4)
    assert now(waiting(arrived_s=1.0), in_flight=1, now_s=1.0, limits=two).batch == (0,)
    assert now(waiting(arrived_s=1.0), in_flight=2, now_s=1.0, limits=two).batch == ()


def test_a_full_batch_goes_at_once() -> None:
    assert now(waiting(3), waiting(1), waiting(1), in_flight=1).batch == (0, 1)


def test_a_batch_that_the_next_request_would_overfill_counts_as_full() -> None:
    assert now(waiting(3), waiting(2), in_flight=1).batch == (0,)


def test_forms_never_share_a_batch() -> None:
    assert now(waiting(), waiting(form="prepared"), waiting()).batch == (0,)


def test_no_more_batches_than_the_model_has_room_for() -> None:
    assert now(waiting(4), in_flight=2) == Decision()


def test_what_has_expired_never_reaches_the_model() -> None:
    decision = now(waiting(deadline_s=0.9), waiting(deadline_s=5.0), now_s=1.0)
    assert (decision.late, decision.batch) == ((0,), (1,))


def test_what_a_busy_model_cannot_finish_in_time_is_late() -> None:
    assert now(waiting(deadline_s=1.4), in_flight=1, now_s=1.0, batch_s=0.5).late == (0,)


def test_an_idle_model_tries_whatever_the_estimate_says() -> None:
    assert now(waiting(deadline_s=1.4), now_s=1.0, batch_s=0.5).batch == (0,)


@pytest.mark.parametrize(("rows", "expected"), [(1, [(0, 1)]), (4, [(0, 4)]), (9, [(0, 4), (4, 8), (8, 9)])])
def test_large_requests_are_cut_into_batches(rows: int, expected: list[tuple[int, int]]) -> None:
    assert pieces(rows, 4) == expected


def enter(
    rows: int = 1,
    deadline_s: float = NEVER,
    queued_rows: int = 0,
    in_flight: int = 1,
    rows_ahead: int | None = None,
    bound_s: float = 0.5,
) -> None:
    admit(
        rows,
        deadline_s,
        queued_rows=queued_rows,
        rows_ahead=queued_rows if rows_ahead is None else rows_ahead,
        in_flight=in_flight,
        now_s=1.0,
        batch_s=0.5,
        bound_s=bound_s,
        limits=LIMITS,
    )


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    with pytest.raises(ResourceExhausted) as refused:
        enter(rows=3, queued_rows=6)
    assert refused.value.retry_after_s == pytest.approx(0.25)


def test_a_queue_takes_rows_up_to_its_bound() -> None:
    enter(rows=2, queued_rows=6)


def test_a_deadline_that_the_queue_ahead_uses_up_is_refused_at_once() -> None:
    enter(deadline_s=1.6, queued_rows=0)
    with pytest.raises(DeadlineExceeded):
        enter(deadline_s=1.6, queued_rows=4)


def test_a_deadline_that_a_batch_might_well_miss_is_refused_at_once() -> None:
    enter(deadline_s=1.9, bound_s=0.8)
    with pytest.raises(DeadlineExceeded):
        enter(deadline_s=1.7, bound_s=0.8)


def test_a_deadline_in_the_past_is_refused_even_by_an_idle_model() -> None:
    with pytest.raises(DeadlineExceeded):
        enter(deadline_s=1.0, in_flight=0)


def test_rows_of_several_batches_are_let_in_where_the_last_of_them_is_in_time() -> None:
    enter(rows=8, deadline_s=1.8)  # one batch ahead of its last, which shares the model's time with another
    with pytest.raises(DeadlineExceeded):
        enter(rows=8, deadline_s=1.7)
    with pytest.raises(DeadlineExceeded):
        enter(rows=8, deadline_s=1.2, in_flight=0)


def test_rows_that_are_less_urgent_keep_nobody_from_a_deadline() -> None:
    enter(deadline_s=1.6, queued_rows=4, rows_ahead=0)


def test_an_idle_model_does_not_wait_for_company_past_what_a_deadline_leaves() -> None:
    limits = Limits(max_rows=8, max_delay_s=0.1, max_queued_rows=100, max_in_flight=2)
    queue = [Waiting(1, "raw", 0.0, 1.0), Waiting(1, "raw", 0.0, 0.08)]
    alone = decide(queue, in_flight=0, now_s=0.0, batch_s=0.01, bound_s=0.02, limits=limits, company=8)
    assert alone.batch == ()
    assert alone.wake_s == pytest.approx(0.06)
    due = decide(queue, in_flight=0, now_s=0.06, batch_s=0.01, bound_s=0.02, limits=limits, company=8)
    assert due.batch == (0, 1)


def of_bytes(size_bytes: int) -> Waiting:
    return Waiting(1, "raw", 0.0, NEVER, size_bytes)


def test_a_batch_that_requests_share_is_bounded_in_bytes() -> None:
    limits = replace(LIMITS, max_bytes=10)
    assert now(of_bytes(6), of_bytes(4), of_bytes(1), limits=limits).batch == (0, 1)
    assert now(of_bytes(6), of_bytes(5), in_flight=1, limits=limits).batch == (0,)  # as full as it gets
    assert now(of_bytes(11), of_bytes(1), limits=limits).batch == (0,)
