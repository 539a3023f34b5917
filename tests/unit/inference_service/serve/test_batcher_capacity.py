"""A model with more replicas or fewer, what it has to do, and its end."""

from __future__ import annotations

import asyncio

import pytest

from inference_service.domain.statistics import Statistics
from shared.errors import Unavailable
from tests.support.simulated_serving import on_a_virtual_clock
from tests.unit.inference_service.batched import Doubler, batcher, rows, sent, settle, submit


async def test_draining_answers_what_is_there_and_refuses_what_comes() -> None:
    model = Doubler()
    one = batcher(model)
    tasks = [submit(one, rows(1)), submit(one, rows(2))]
    await settle()
    draining = asyncio.create_task(one.drain(240))
    await settle()
    with pytest.raises(Unavailable):
        await one.submit(rows(3), None)
    model.may_work.set()
    await draining
    assert [(await task).arrays[0].tolist() for task in tasks] == [[2], [4]]


def test_draining_takes_as_long_as_the_queue_needs_while_answers_come() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model, max_rows=1)
        tasks = [submit(one, rows(number)) for number in range(6)]
        await settle()

        async def work_slowly() -> None:
            while True:
                await asyncio.sleep(0.1)
                model.may_work.set()
                await asyncio.sleep(0)
                model.may_work.clear()

        working = asyncio.create_task(work_slowly())
        await one.drain(0.25)
        assert [(await task).arrays[0].tolist() for task in tasks] == [[2 * number] for number in range(6)]
        working.cancel()

    on_a_virtual_clock(scenario)


async def test_rows_apart_share_no_batch_and_no_count_with_the_others_and_end_with_them() -> None:
    model, statistics = Doubler(), Statistics()
    one = batcher(model, statistics=statistics)
    at_work = [submit(one, rows(1)), submit(one.background(), rows(2))]
    await settle()
    waiting = [submit(one, rows(3)), submit(one.background(), rows(4)), submit(one, rows(5))]
    await settle()
    assert (one.queued_rows, one.background().queued_rows) == (2, 1)
    model.may_work.set()
    await asyncio.gather(*at_work, *waiting)
    assert sorted(model.sizes) == [1, 1, 1, 2]
    assert statistics.batch_rows.count == 2
    one.close("it goes")
    with pytest.raises(Unavailable, match="it goes"):
        await one.background().submit(rows(4), None)


async def test_draining_gives_up_what_takes_too_long() -> None:
    model = Doubler()
    one = batcher(model)
    tasks = [submit(one, rows(1)), submit(one, rows(2))]
    await settle()
    await one.drain(0.02)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]


async def test_a_model_with_more_replicas_gets_more_batches_at_once_and_with_fewer_waits_for_those_it_has() -> None:
    model = Doubler()
    one = batcher(model, max_rows=1, max_in_flight=2)
    background = one.background()
    tasks = [submit(one, rows(value)) for value in range(7)]
    await sent(model, 2)
    one.scale(2)
    await sent(model, 4)
    one.scale(1)
    tasks.append(submit(background, rows(9)))
    tasks.append(submit(background, rows(9)))
    await sent(model, 6)  # those for rows apart have a window of their own, as wide
    model.may_work.set()
    assert [answer.arrays[0][0] for answer in await asyncio.gather(*tasks)] == [0, 2, 4, 6, 8, 10, 12, 18, 18]


async def test_a_model_that_has_lost_its_replicas_gets_batches_one_replica_long() -> None:
    model = Doubler()
    one = batcher(model, max_rows=1, max_in_flight=4)
    one.scale(0)
    tasks = [submit(one, rows(value)) for value in range(4)]
    await sent(model, 2)
    model.may_work.set()
    await asyncio.gather(*tasks)


async def test_waiting_and_running_rows_are_load_until_answered_or_abandoned() -> None:
    model = Doubler()
    one = batcher(model, max_rows=2)
    left = submit(one, rows(1, 2))
    tasks = [submit(one, rows(3)), submit(one, rows(4, 5))]
    await settle()
    one.load()
    await asyncio.sleep(0.05)
    assert round(one.load().rows, 6) == 5.0
    left.cancel()
    await settle()
    one.load()
    await asyncio.sleep(0.05)
    assert round(one.load().rows, 6) == 3.0
    model.may_work.set()
    await asyncio.gather(*tasks)
    one.load()
    assert one.load().rows == 0.0
