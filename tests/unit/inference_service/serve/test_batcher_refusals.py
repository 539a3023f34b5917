"""Rows that never reach the model, or that nobody waits for any more."""

from __future__ import annotations

import asyncio

import pytest

from inference_service.domain.batch_policy import BatchTimes
from shared.errors import DeadlineExceeded, ResourceExhausted
from tests.support.simulated_serving import on_a_virtual_clock
from tests.unit.inference_service.batched import Doubler, PiecesInTurn, batcher, rows, settle, submit


async def test_a_cancelled_request_never_reaches_the_model() -> None:
    model = Doubler()
    one = batcher(model)
    first = submit(one, rows(1))
    await settle()
    second = submit(one, rows(2, 3, 4))
    third = submit(one, rows(5))
    await settle()
    second.cancel()
    await settle()
    model.may_work.set()
    await asyncio.gather(first, third)
    assert model.sizes == [1, 1]


async def test_a_batch_that_nobody_waits_for_is_given_up() -> None:
    model = Doubler()
    one = batcher(model)
    task = submit(one, rows(1))
    await settle()
    task.cancel()
    await settle()
    assert model.given_up == 1
    model.may_work.set()
    assert (await one.submit(rows(7), None)).arrays[0].tolist() == [14]  # its place is free again


async def test_a_batch_that_somebody_still_waits_for_goes_on() -> None:
    model = Doubler()
    one = batcher(model)
    blocker = submit(one, rows(0))
    await settle()
    gone, staying = submit(one, rows(1)), submit(one, rows(2))
    await settle()
    model.may_work.set()
    await blocker
    model.may_work.clear()
    await settle()
    gone.cancel()
    await settle()
    model.may_work.set()
    assert (await staying).arrays[0].tolist() == [4]
    assert (model.sizes, model.given_up) == ([1, 2], 0)


async def test_a_full_queue_refuses_and_empties_when_its_callers_leave() -> None:
    model = Doubler()
    one = batcher(model, max_queued_rows=4)
    tasks = [submit(one, rows(0))]
    await settle()
    tasks += [submit(one, rows(1, 2, 3, 4))]
    await settle()
    with pytest.raises(ResourceExhausted) as refused:
        await one.submit(rows(5), None)
    assert refused.value.retry_after_s is not None
    for task in tasks:
        task.cancel()
    await settle()
    model.may_work.set()
    assert (await one.submit(rows(6, 7, 8, 9), None)).arrays[0].tolist() == [12, 14, 16, 18]


async def test_a_deadline_that_has_passed_is_refused_before_the_model() -> None:
    model = Doubler()
    with pytest.raises(DeadlineExceeded):
        await batcher(model).submit(rows(1), 0.0)
    assert model.sizes == []


async def test_rows_that_expire_in_the_queue_are_refused_when_their_turn_comes() -> None:
    model = Doubler()
    one = batcher(model)
    first = submit(one, rows(1))
    await settle()
    second = submit(one, rows(2), 0.02)
    await asyncio.sleep(0.05)
    model.may_work.set()
    await first
    with pytest.raises(DeadlineExceeded):
        await second
    assert model.sizes == [1]


def test_rows_refused_for_want_of_replicas_are_reported_and_those_that_none_could_answer_are_not() -> None:
    async def scenario() -> None:
        model = Doubler()
        times = BatchTimes({1: 0.5, 2: 0.5, 4: 0.5})
        one = batcher(model, times, max_queued_rows=4)
        tasks = [submit(one, rows(1)), submit(one, rows(1, 2, 3))]
        await settle()
        with pytest.raises(ResourceExhausted):
            await one.submit(rows(1, 2), None)
        assert one.load().refused == 2
        with pytest.raises(DeadlineExceeded):
            await one.submit(rows(4), 0.7)
        assert one.load().refused == 1
        with pytest.raises(DeadlineExceeded):
            await one.submit(rows(4), 0.1)
        assert one.load().refused == 0
        model.may_work.set()
        await asyncio.gather(*tasks)

    on_a_virtual_clock(scenario)


def test_a_late_request_learns_whether_the_model_saw_some_of_it() -> None:
    async def scenario() -> None:
        model = PiecesInTurn()
        one = batcher(model, BatchTimes({2: 0.1}), max_rows=2)
        large = submit(one, rows(1, 2, 3, 4), 0.25)
        await asyncio.sleep(0.3)  # three times what was expected
        model.done[0].set()
        with pytest.raises(DeadlineExceeded, match="it saw a part of the request's rows"):
            await large
        assert len(model.done) == 1

    on_a_virtual_clock(scenario)


async def test_a_request_whose_batches_take_longer_than_it_has_is_refused_before_the_model_sees_any() -> None:
    model = PiecesInTurn()
    one = batcher(model, BatchTimes({32: 0.017}), max_rows=32, max_queued_rows=4096, max_in_flight=2)
    for _ in range(2):  # idle, and busy
        seen = len(model.done)
        with pytest.raises(DeadlineExceeded, match="it never saw the request"):
            await one.submit(rows(*range(4000)), 0.2)
        assert len(model.done) == seen
        small = submit(one, rows(1))
        await asyncio.sleep(0)
    model.done[0].set()
    await asyncio.sleep(0.01)
    for event in model.done:
        event.set()
    small.cancel()


async def test_a_request_that_was_cancelled_just_now_enters_no_batch() -> None:
    model = Doubler()
    one = batcher(model, BatchTimes({1: 100.0}), max_in_flight=2)
    first = submit(one, rows(1))
    await settle()
    # They gather until the replica is free.
    staying, going = submit(one, rows(2)), submit(one, rows(3))
    await settle()
    assert model.sizes == [1]
    going.cancel()
    one.scale(2)  # a second replica is there before its task has run again
    await settle()
    assert model.sizes == [1, 1]
    model.may_work.set()
    await asyncio.gather(first, staying)
    assert (model.sizes, one.queued_rows) == ([1, 1], 0)
