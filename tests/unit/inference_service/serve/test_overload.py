"""What becomes of more requests than a model can answer: the real batcher on a virtual clock, over ten seeds.

`make test` has three of the seeds at each load and spread, `make long` all ten.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from inference_service.domain.signature import Rows
from shared.errors import MillraceError
from tests.support.simulated_serving import (
    CAPACITY,
    DEADLINE_S,
    MAX_ROWS,
    Outcome,
    Replica,
    batcher_before,
    on_a_virtual_clock,
    serve,
)

# docs/decisions/0016-serving-speed.md says on which seeds the policy was chosen, and what it does on others.
SEEDS, FEW_SEEDS, SECONDS = range(101, 111), range(103, 106), 4.0
# What the batcher of commit 4b391d3 answered in time, of the same requests before the same replica: this module's
# `serve` with that commit's packages on the path. By load and spread, on `FEW_SEEDS` and on all.
ANSWERED_BEFORE = {
    (0.85, 0.1): (9495, 31743),
    (1.2, 0.1): (10737, 36319),
    (2.0, 0.1): (10434, 35184),
    (3.0, 0.1): (10389, 34711),
    (0.85, 0.25): (9337, 31104),
    (1.2, 0.25): (10896, 37777),
    (2.0, 0.25): (10308, 35852),
    (3.0, 0.25): (10264, 35438),
    (0.85, 0.5): (8876, 29818),
    (1.2, 0.5): (11064, 37943),
    (2.0, 0.5): (11456, 41461),
    (3.0, 0.5): (10862, 40635),
}


def shown(outcome: Outcome) -> str:
    return f"{dict(outcome.counts)}, 99 of 100 refusals within {outcome.refusal_p99_s * 1000:.1f} ms"


def check_answers(load: float, spread: float, seeds: range, before: int) -> None:
    outcome = serve(load, spread, seeds=seeds, seconds=SECONDS)
    assert outcome.answered >= 0.99 * before, shown(outcome)
    if load >= 2 and spread <= 0.25:
        assert outcome.late_share <= 0.001, shown(outcome)
        assert outcome.refusal_p99_s <= 0.025, shown(outcome)


@pytest.mark.parametrize(("load", "spread"), ANSWERED_BEFORE)
def test_as_many_are_answered_at_every_load_and_hardly_any_is_late_or_refused_late_where_many_come(
    load: float, spread: float
) -> None:
    check_answers(load, spread, FEW_SEEDS, ANSWERED_BEFORE[load, spread][0])


# 80 s of CPU time; in `make test`: the test above, on three of these seeds.
@pytest.mark.long
@pytest.mark.parametrize(("load", "spread"), ANSWERED_BEFORE)
def test_on_all_ten_seeds_as_many_are_answered_as_on_three(load: float, spread: float) -> None:
    check_answers(load, spread, SEEDS, ANSWERED_BEFORE[load, spread][1])


# Seeds on which nothing was chosen, and what commit 4b391d3 answered of them.
@pytest.mark.parametrize(
    ("seeds", "before"),
    [
        (range(301, 304), 14163),
        # In `make test`: three of them.
        pytest.param(range(301, 311), 45592, marks=pytest.mark.long),
    ],
    ids=["three seeds", "ten seeds"],
)
def test_batches_of_very_uneven_times_leave_full_however_many_requests_are_refused(seeds: range, before: int) -> None:
    outcome = serve(2.0, 0.5, seeds=seeds, seconds=SECONDS)
    assert outcome.answered >= 0.99 * before, shown(outcome)


@pytest.mark.parametrize("large_rows", [512, 4000])
def test_a_client_of_large_requests_leaves_others_their_time_and_gets_what_they_leave(large_rows: int) -> None:
    small, large = Outcome(), Outcome()
    seconds = 30.0

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        batcher = batcher_before(Replica())
        row, many = np.zeros((1, 1), np.uint8), np.zeros((large_rows, 1), np.uint8)

        async def ask(outcome: Outcome, values: np.ndarray, remaining_s: float, pause_s: float) -> None:
            while loop.time() < seconds:
                began_s = loop.time()
                try:
                    await batcher.submit(Rows("raw", {"x": values}), remaining_s)
                    outcome.counts["answered" if loop.time() - began_s <= remaining_s else "late"] += 1
                except MillraceError:
                    outcome.counts["refused"] += 1
                await asyncio.sleep(pause_s)

        async with asyncio.TaskGroup() as asking:
            asking.create_task(ask(large, many, 60.0, 0.0))
            for _ in range(10):
                asking.create_task(ask(small, row, DEADLINE_S, 0.05))

    on_a_virtual_clock(scenario)
    assert small.answered >= 0.95 * small.counts.total(), small.counts
    assert large.answered == large.counts.total(), large.counts
    left = CAPACITY - small.answered / seconds
    assert large.answered * large_rows >= 0.9 * left * seconds, (large.counts, small.counts)


def test_rows_of_two_forms_that_come_in_turn_take_as_many_batches_as_those_of_one() -> None:
    async def scenario() -> None:
        replica = Replica()
        batcher = batcher_before(replica)
        row = np.zeros((1, 1), np.uint8)
        forms = ["raw", "prepared"] * 128
        await asyncio.gather(*(batcher.submit(Rows(form, {"x": row}), None) for form in forms))
        assert len(replica.batches) <= 2 + 256 // MAX_ROWS, replica.batches

    on_a_virtual_clock(scenario)
