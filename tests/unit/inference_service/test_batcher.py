from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from inference_service.batcher import Batcher, Model
from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import Limits
from inference_service.domain.rows import Outputs, Rows
from inference_service.domain.statistics import Statistics
from inference_service.domain.tensors import Array
from shared.errors import (
    DataLoss,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    MillraceError,
    ResourceExhausted,
    Unavailable,
)

# Rows that the model refuses begin here.
BAD = 1000


class Doubler:
    """A model of one number a row that works when it is told to; remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.given_up = 0
        self.may_work = asyncio.Event()
        self.error: MillraceError | None = None

    async def forward(self, rows: Rows) -> Outputs:
        self.sizes.append(len(rows))
        try:
            await self.may_work.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.error is not None:
            raise self.error
        values = rows.values["x"]
        refused = {int(place): f"{values[place]} is bad" for place in np.flatnonzero(values >= BAD)}
        return Outputs([values * 2, -values], refused)


class PiecesInTurn:
    """Each batch comes back when it is told to."""

    def __init__(self) -> None:
        self.done: list[asyncio.Event] = []

    async def forward(self, given: Rows) -> Outputs:
        self.done.append(asyncio.Event())
        await self.done[-1].wait()
        return Outputs([given.values["x"]])


def rows(*values: int, form: str = "raw") -> Rows:
    return Rows(form, {"x": np.array(values)})


def batcher(model: Model, **limits: Any) -> Batcher:
    defaults: dict[str, Any] = {"max_rows": 4, "max_delay_s": 0.0, "max_queued_rows": 100, "max_in_flight": 1}
    return Batcher(model, Limits(**{**defaults, **limits}), BatchTimes(), Statistics())


def on_a_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(bounded())


async def settle() -> None:
    """Lets everything run that can run without the model."""
    for _ in range(10):
        await asyncio.sleep(0)


def submit(one: Batcher, what: Rows, remaining_s: float | None = None) -> asyncio.Task[Any]:
    return asyncio.create_task(one.submit(what, remaining_s))


def test_each_request_gets_its_own_rows_back() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model)
        first = submit(one, rows(1))
        await settle()  # it occupies the model; the others gather behind it
        others = [submit(one, rows(2, 3)), submit(one, rows(4)), submit(one, rows(5, 6))]
        await settle()
        model.may_work.set()
        answers = [[output.tolist() for output in (await task).arrays] for task in (first, *others)]
        assert answers == [[[2], [-1]], [[4, 6], [-2, -3]], [[8], [-4]], [[10, 12], [-5, -6]]]
        assert model.sizes == [1, 3, 2]

    on_a_loop(scenario)


def test_rows_gather_for_as_long_as_the_replica_is_busy_anyway() -> None:
    async def scenario() -> None:
        model = Doubler()
        limits = Limits(max_rows=4, max_delay_s=0.0, max_queued_rows=100, max_in_flight=2)
        one = Batcher(model, limits, BatchTimes({1: 100.0}), Statistics())
        tasks = [submit(one, rows(1))]
        await settle()
        tasks.append(submit(one, rows(2)))
        await settle()
        assert model.sizes == [1]
        tasks.append(submit(one, rows(3, 4, 5)))  # a full batch gains nothing by waiting
        await settle()
        assert model.sizes == [1, 4]
        model.may_work.set()
        await asyncio.gather(*tasks)

    on_a_loop(scenario)


def test_rows_that_gather_go_when_the_replica_is_free_earlier_than_expected() -> None:
    async def scenario() -> None:
        model = Doubler()
        limits = Limits(max_rows=4, max_delay_s=0.0, max_queued_rows=100, max_in_flight=2)
        one = Batcher(model, limits, BatchTimes({1: 100.0}), Statistics())
        tasks = [submit(one, rows(1))]
        await settle()
        tasks.append(submit(one, rows(2)))
        await settle()
        model.may_work.set()
        await asyncio.gather(*tasks)
        assert model.sizes == [1, 1]

    on_a_loop(scenario)


def test_a_request_larger_than_a_batch_is_cut_and_put_together_again() -> None:
    async def scenario() -> None:
        model = Doubler()
        model.may_work.set()
        doubled, negated = (await batcher(model).submit(rows(*range(10)), None)).arrays
        assert doubled.tolist() == [2 * value for value in range(10)]
        assert negated.tolist() == [-value for value in range(10)]
        assert model.sizes == [4, 4, 2]

    on_a_loop(scenario)


def test_a_request_alone_reaches_the_model_without_a_copy() -> None:
    async def scenario() -> None:
        seen: list[Array] = []

        class Watcher:
            async def forward(self, given: Rows) -> Outputs:
                seen.append(given.values["x"])
                return Outputs([given.values["x"]])

        sent = rows(1, 2)
        limits = Limits(max_rows=4, max_delay_s=0, max_queued_rows=9, max_in_flight=1)
        await Batcher(Watcher(), limits, BatchTimes(), Statistics()).submit(sent, None)
        assert np.shares_memory(seen[0], sent.values["x"])

    on_a_loop(scenario)


def test_a_cancelled_request_never_reaches_the_model() -> None:
    async def scenario() -> None:
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

    on_a_loop(scenario)


def test_a_batch_that_nobody_waits_for_is_given_up() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model)
        task = submit(one, rows(1))
        await settle()
        task.cancel()
        await settle()
        assert model.given_up == 1
        model.may_work.set()
        assert (await one.submit(rows(7), None)).arrays[0].tolist() == [14]  # its place is free again

    on_a_loop(scenario)


def test_a_batch_that_somebody_still_waits_for_goes_on() -> None:
    async def scenario() -> None:
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

    on_a_loop(scenario)


def test_a_full_queue_refuses_and_empties_when_its_callers_leave() -> None:
    async def scenario() -> None:
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

    on_a_loop(scenario)


def test_a_deadline_that_has_passed_is_refused_before_the_model() -> None:
    async def scenario() -> None:
        model = Doubler()
        with pytest.raises(DeadlineExceeded):
            await batcher(model).submit(rows(1), 0.0)
        assert model.sizes == []

    on_a_loop(scenario)


def test_rows_that_expire_in_the_queue_are_refused_when_their_turn_comes() -> None:
    async def scenario() -> None:
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

    on_a_loop(scenario)


def test_an_error_of_the_model_reaches_every_request_of_the_batch() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model)
        tasks = [submit(one, rows(1))]
        await settle()
        tasks += [submit(one, rows(2)), submit(one, rows(3))]
        await settle()
        model.error = DataLoss("the weights are damaged")
        model.may_work.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [DataLoss] * 3

    on_a_loop(scenario)


def test_a_row_that_the_model_refuses_is_its_own_requests_fault() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model)
        first = submit(one, rows(1))
        await settle()  # it occupies the model; the others gather behind it
        good, bad = submit(one, rows(2)), submit(one, rows(3, 1003, 4))
        await settle()
        model.may_work.set()
        await first
        assert (await good).arrays[0].tolist() == [4]
        with pytest.raises(InvalidArgument, match=r"^row 1: 1003 is bad$") as refused:
            await bad
        assert refused.value.fields == [("inputs", "row 1: 1003 is bad")]
        assert model.sizes == [1, 4]

    on_a_loop(scenario)


def test_a_refused_row_of_a_request_larger_than_a_batch_is_told_by_its_place_in_the_request() -> None:
    async def scenario() -> None:
        model = Doubler()
        model.may_work.set()
        with pytest.raises(InvalidArgument, match="row 6: 1006 is bad"):
            await batcher(model).submit(rows(0, 1, 2, 3, 4, 5, 1006, 7), None)

    on_a_loop(scenario)


def test_draining_answers_what_is_there_and_refuses_what_comes() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model)
        tasks = [submit(one, rows(1)), submit(one, rows(2))]
        await settle()
        draining = asyncio.create_task(one.drain(5))
        await settle()
        with pytest.raises(Unavailable):
            await one.submit(rows(3), None)
        model.may_work.set()
        await draining
        assert [(await task).arrays[0].tolist() for task in tasks] == [[2], [4]]

    on_a_loop(scenario)


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

    on_a_loop(scenario)


def test_rows_apart_share_no_batch_and_no_count_with_the_others_and_end_with_them() -> None:
    async def scenario() -> None:
        model, statistics = Doubler(), Statistics()
        limits = Limits(max_rows=4, max_delay_s=0.0, max_queued_rows=100, max_in_flight=1)
        one = Batcher(model, limits, BatchTimes(), statistics)
        at_work = [submit(one, rows(1)), submit(one.apart(), rows(2))]
        await settle()
        waiting = [submit(one, rows(3)), submit(one.apart(), rows(4)), submit(one, rows(5))]
        await settle()
        assert (one.queued_rows, one.apart().queued_rows) == (2, 1)
        model.may_work.set()
        await asyncio.gather(*at_work, *waiting)
        assert sorted(model.sizes) == [1, 1, 1, 2]
        assert statistics.batch_rows.count == 2
        one.close("it goes")
        with pytest.raises(Unavailable, match="it goes"):
            await one.apart().submit(rows(4), None)

    on_a_loop(scenario)


def test_draining_gives_up_what_takes_too_long() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model)
        tasks = [submit(one, rows(1)), submit(one, rows(2))]
        await settle()
        await one.drain(0.02)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]

    on_a_loop(scenario)


def test_a_batch_that_was_sent_again_tells_nothing_of_how_long_others_take() -> None:
    async def scenario() -> None:
        class Again:
            async def forward(self, given: Rows) -> Outputs:
                await asyncio.sleep(0.02)
                return Outputs([given.values["x"]], sent_again=True)

        times = BatchTimes({1: 0.001})
        limits = Limits(max_rows=4, max_delay_s=0, max_queued_rows=9, max_in_flight=1)
        await Batcher(Again(), limits, times, Statistics()).submit(rows(1), None)
        assert times.bound_s(1) == 0.001

    on_a_loop(scenario)


def test_the_way_back_of_a_request_in_pieces_counts_from_the_last_of_them_to_come() -> None:
    async def scenario() -> None:
        model = PiecesInTurn()
        one = batcher(model, max_rows=1, max_in_flight=2)
        task = submit(one, rows(1, 2))
        await settle()
        model.done[1].set()
        await asyncio.sleep(0.1)
        model.done[0].set()
        await task
        assert one._answer_s() < 0.1

    on_a_loop(scenario)


def test_a_model_with_more_replicas_gets_more_batches_at_once_and_with_fewer_waits_for_those_it_has() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model, max_rows=1, max_in_flight=2)
        apart = one.apart()
        tasks = [submit(one, rows(value)) for value in range(7)]
        await settle()
        assert len(model.sizes) == 2
        one.scale(2)
        await settle()
        assert len(model.sizes) == 4
        one.scale(1)
        tasks.append(submit(apart, rows(9)))
        tasks.append(submit(apart, rows(9)))
        await settle()
        assert len(model.sizes) == 6  # those for rows apart have a window of their own, as wide
        model.may_work.set()
        assert [answer.arrays[0][0] for answer in await asyncio.gather(*tasks)] == [0, 2, 4, 6, 8, 10, 12, 18, 18]

    on_a_loop(scenario)


def test_a_model_that_has_lost_its_replicas_gets_batches_one_replica_long() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model, max_rows=1, max_in_flight=4)
        one.scale(0)
        tasks = [submit(one, rows(value)) for value in range(4)]
        await settle()
        assert len(model.sizes) == 2
        model.may_work.set()
        await asyncio.gather(*tasks)

    on_a_loop(scenario)


def test_what_waits_and_what_is_at_work_is_load_until_it_is_answered_or_left() -> None:
    async def scenario() -> None:
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

    on_a_loop(scenario)


def test_rows_refused_for_want_of_replicas_are_told_and_those_that_none_could_answer_are_not() -> None:
    async def scenario() -> None:
        model = Doubler()
        times = BatchTimes({1: 0.5, 2: 0.5, 4: 0.5})
        one = Batcher(
            model, Limits(max_rows=4, max_delay_s=0.0, max_queued_rows=4, max_in_flight=1), times, Statistics()
        )
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

    on_a_loop(scenario)


def test_a_late_request_is_told_truly_whether_the_model_saw_some_of_it() -> None:
    async def scenario() -> None:
        model = PiecesInTurn()
        limits = Limits(max_rows=2, max_delay_s=0.0, max_queued_rows=100, max_in_flight=1)
        batcher = Batcher(model, limits, BatchTimes({2: 0.1}), Statistics())
        large = asyncio.create_task(batcher.submit(rows(1, 2, 3, 4), 0.25))
        await asyncio.sleep(0.3)  # three times what was expected
        model.done[0].set()
        with pytest.raises(DeadlineExceeded, match="it saw a part of the request's rows"):
            async with asyncio.timeout(5):
                await large
        assert len(model.done) == 1

    asyncio.run(scenario())


def test_a_request_whose_batches_take_longer_than_it_has_is_refused_before_the_model_sees_any() -> None:
    async def scenario() -> None:
        model = PiecesInTurn()
        limits = Limits(max_rows=32, max_delay_s=0.0, max_queued_rows=4096, max_in_flight=2)
        batcher = Batcher(model, limits, BatchTimes({32: 0.017}), Statistics())
        for _ in range(2):  # idle, and busy
            seen = len(model.done)
            with pytest.raises(DeadlineExceeded, match="it never saw the request"):
                await batcher.submit(rows(*range(4000)), 0.2)
            assert len(model.done) == seen
            small = asyncio.create_task(batcher.submit(rows(1), None))
            await asyncio.sleep(0)
        model.done[0].set()
        await asyncio.sleep(0.01)
        for event in model.done:
            event.set()
        small.cancel()

    asyncio.run(scenario())


def test_an_error_of_ours_at_one_row_is_that_of_its_request_alone() -> None:
    class FailsAtOne:
        async def forward(self, given: Rows) -> Outputs:
            values = given.values["x"]
            return Outputs([values], failed={int(np.flatnonzero(values == BAD)[0]): Internal("internal error")})

    async def scenario() -> None:
        limits = Limits(max_rows=8, max_delay_s=0.01, max_queued_rows=100, max_in_flight=2)
        batcher = Batcher(FailsAtOne(), limits, BatchTimes(), Statistics())
        batcher._last_rows = 8  # so that they wait for each other
        answers = await asyncio.gather(
            *(batcher.submit(rows(*given), None) for given in ((1, 2), (3, BAD), (4,))), return_exceptions=True
        )
        assert [isinstance(one, Internal) for one in answers] == [False, True, False]

    asyncio.run(scenario())
