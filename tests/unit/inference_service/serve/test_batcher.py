"""Which rows share a batch, and that each request gets its own back."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import replace

import numpy as np
import pytest

from inference_service.domain.batch_policy import BatchTimes
from inference_service.domain.signature import Array, Outputs, Rows
from shared.errors import DataLoss, Internal, InvalidArgument
from tests.support.garbage import uncollected
from tests.support.simulated_serving import on_a_virtual_clock
from tests.unit.inference_service.batched import (
    BAD,
    Doubler,
    PiecesInTurn,
    batcher,
    occupied,
    on_a_loop,
    rows,
    settle,
    submit,
)


async def test_each_request_gets_its_own_rows_back() -> None:
    model = Doubler()
    one, first = await occupied(model)
    others = [submit(one, rows(2, 3)), submit(one, rows(4)), submit(one, rows(5, 6))]
    await settle()
    model.may_work.set()
    answers = [[output.tolist() for output in (await task).arrays] for task in (first, *others)]
    assert answers == [[[2], [-1]], [[4, 6], [-2, -3]], [[8], [-4]], [[10, 12], [-5, -6]]]
    assert model.sizes == [1, 3, 2]


async def test_rows_gather_for_as_long_as_the_replica_is_busy_anyway() -> None:
    model = Doubler()
    one = batcher(model, BatchTimes({1: 100.0}), max_in_flight=2)
    tasks = [submit(one, rows(1))]
    await settle()
    tasks.append(submit(one, rows(2)))
    await settle()
    assert model.sizes == [1]
    tasks.append(submit(one, rows(3, 4, 5)))  # full, and no replica would take it any earlier
    tasks.append(submit(one, rows(6)))
    await settle()
    assert model.sizes == [1]
    model.may_work.set()
    await asyncio.gather(*tasks)
    assert model.sizes == [1, 4, 1]


async def test_rows_that_gather_go_when_the_replica_is_free_earlier_than_expected() -> None:
    model = Doubler()
    one = batcher(model, BatchTimes({1: 100.0}), max_in_flight=2)
    tasks = [submit(one, rows(1))]
    await settle()
    tasks.append(submit(one, rows(2)))
    await settle()
    model.may_work.set()
    await asyncio.gather(*tasks)
    assert model.sizes == [1, 1]


async def test_a_request_larger_than_a_batch_is_cut_and_put_together_again() -> None:
    model = Doubler()
    model.may_work.set()
    doubled, negated = (await batcher(model).submit(rows(*range(10)), None)).arrays
    assert doubled.tolist() == [2 * value for value in range(10)]
    assert negated.tolist() == [-value for value in range(10)]
    assert model.sizes == [4, 4, 2]


async def test_a_request_alone_reaches_the_model_without_a_copy() -> None:
    seen: list[Array] = []

    class Watcher:
        async def forward(self, given: Rows) -> Outputs:
            seen.append(given.values["x"])
            return Outputs([given.values["x"]])

    sent = rows(1, 2)
    await batcher(Watcher(), max_queued_rows=9).submit(sent, None)
    assert np.shares_memory(seen[0], sent.values["x"])


async def test_an_error_of_the_model_reaches_every_request_of_the_batch() -> None:
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


async def test_a_row_that_the_model_refuses_is_its_own_requests_fault() -> None:
    model = Doubler()
    one, first = await occupied(model)
    good, bad = submit(one, rows(2)), submit(one, rows(3, 1003, 4))
    await settle()
    model.may_work.set()
    await first
    assert (await good).arrays[0].tolist() == [4]
    with pytest.raises(InvalidArgument, match=r"^row 1: 1003 is bad$") as refused:
        await bad
    assert refused.value.fields == [("inputs", "row 1: 1003 is bad")]
    assert model.sizes == [1, 4]


async def test_a_refused_row_of_a_request_larger_than_a_batch_is_reported_by_its_place_in_the_request() -> None:
    model = Doubler()
    model.may_work.set()
    with pytest.raises(InvalidArgument, match="row 6: 1006 is bad"):
        await batcher(model).submit(rows(0, 1, 2, 3, 4, 5, 1006, 7), None)


async def test_a_batch_that_was_sent_again_does_not_show_how_long_others_take() -> None:
    class Again:
        async def forward(self, given: Rows) -> Outputs:
            await asyncio.sleep(0.02)
            return Outputs([given.values["x"]], sent_again=True)

    times = BatchTimes({1: 0.001})
    before_s = times.bound_s(1)
    await batcher(Again(), times, max_queued_rows=9).submit(rows(1), None)
    assert (times.bound_s(1), times.expected_s(1)) == (before_s, 0.001)


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

    on_a_virtual_clock(scenario)


async def test_an_error_of_ours_at_one_row_is_that_of_its_request_alone() -> None:
    class FailsAtOne:
        async def forward(self, given: Rows) -> Outputs:
            values = given.values["x"]
            return Outputs([values], failed={int(np.flatnonzero(values == BAD)[0]): Internal("internal error")})

    one = batcher(FailsAtOne(), max_rows=8, max_delay_s=0.01, max_in_flight=2)
    one._in_flight.last_rows = 8  # so that they wait for each other
    answers = await asyncio.gather(
        *(one.submit(rows(*given), None) for given in ((1, 2), (3, BAD), (4,))), return_exceptions=True
    )
    assert [isinstance(answer, Internal) for answer in answers] == [False, True, False]


async def test_rows_that_cannot_be_put_together_fail_and_the_model_goes_on() -> None:
    model = Doubler()
    one, first = await occupied(model)
    others = [submit(one, Rows("raw", {"x": np.zeros((1, width))})) for width in (2, 3)]
    await settle()
    model.may_work.set()
    outcomes = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Outputs, ValueError, ValueError]
    assert (await one.submit(rows(4), None)).arrays[0].tolist() == [8]


def test_requests_share_a_batch_up_to_its_bound_in_bytes() -> None:
    async def scenario() -> None:
        model = Doubler()
        one, first = await occupied(model, max_bytes=100)
        tasks = [submit(one, replace(rows(2), size_bytes=60)) for _ in range(3)]
        tasks.append(submit(one, rows(3, 4, 5, 6, 7)))  # of 8 bytes a row, in pieces
        await settle()
        model.may_work.set()
        await asyncio.gather(first, *tasks)
        assert model.sizes == [1, 1, 1, 4, 2]


async def test_rows_of_two_forms_that_come_in_turn_fill_a_batch_each() -> None:
    model = Doubler()
    one, first = await occupied(model)
    forms = ["raw", "prepared"] * 4
    tasks = [submit(one, rows(value, form=form)) for value, form in enumerate(forms)]
    await settle()
    model.may_work.set()
    await first
    assert [(await task).arrays[0].tolist() for task in tasks] == [[2 * value] for value in range(8)]
    assert model.sizes == [1, 4, 4]


async def test_a_large_request_fills_batches_and_lets_small_ones_that_came_later_pass() -> None:
    model = Doubler()
    one, first = await occupied(model)
    large = submit(one, rows(*range(10)))
    await settle()
    small = [submit(one, rows(value)) for value in (20, 21)]
    await settle()
    model.may_work.set()
    answered: list[asyncio.Task[Outputs]] = []
    for task in (large, *small):
        task.add_done_callback(answered.append)
    await asyncio.gather(first, large, *small)
    assert (await large).arrays[0].tolist() == [2 * value for value in range(10)]
    assert answered[-1] is large
    # A piece; the small ones, and as many of the others as go with them; the rest.
    assert model.sizes == [1, 4, 4, 4]


def test_a_large_request_that_is_cancelled_takes_all_its_rows_along() -> None:
    async def scenario() -> None:
        model = Doubler()
        one = batcher(model)
        large = submit(one, rows(*range(10)))
        await settle()
        assert one.queued_rows == 6
        large.cancel()
        await settle()
        assert (one.queued_rows, model.given_up) == (0, 1)

    on_a_loop(scenario)

    on_a_loop(scenario)


@pytest.mark.parametrize("values", [(2, 3), (2, 1003), (2, 3, 4, 5, 6, 7), (2, 3, 4, 5, 6, 1003)])
@pytest.mark.parametrize("fails", [False, True])
def test_rows_of_a_finished_request_are_freed_without_the_garbage_collector(
    values: tuple[int, ...], fails: bool
) -> None:
    class Failing:
        async def forward(self, _: Rows) -> Outputs:
            raise DataLoss("the weights are damaged")

    async def scenario() -> None:
        doubler = Doubler()
        doubler.may_work.set()
        one = batcher(Failing() if fails else doubler)
        given = rows(*values)
        array = weakref.ref(given.values["x"])
        tasks = [submit(one, given), submit(one, rows(8))]
        del given
        await asyncio.wait(tasks)
        for task in tasks:
            task.exception()
        del task, tasks
        await settle()
        assert array() is None

    with uncollected():
        on_a_loop(scenario)
