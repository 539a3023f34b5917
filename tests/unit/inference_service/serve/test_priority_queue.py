"""Which rows go into the next batch, and how many batches go before others."""

from __future__ import annotations

import math

import pytest

from inference_service.domain.batch_policy import Limits, decide
from inference_service.serve.batcher import PriorityQueue
from tests.unit.inference_service.batched import rows

LIMITS = Limits(max_rows=4, max_delay_s=0.0, max_queued_rows=100, max_in_flight=1)


@pytest.mark.parametrize(("small_rows", "form"), [(1, "raw"), (4, "raw"), (1, "prepared"), (4, "prepared")])
async def test_a_large_request_gets_an_eighth_also_where_others_would_fill_every_batch(
    small_rows: int, form: str
) -> None:
    queue = PriorityQueue(4)
    large = queue.put(rows(*range(100)), 5, 0.0, math.inf)
    batches: list[list[int]] = []
    for _ in range(36):
        while sum(entry.waiting.rows for entry in queue if entry is not large) < 8:
            queue.put(rows(*[0] * small_rows, form=form), 5, 0.0, math.inf)
        decision = decide(
            (entry.waiting for entry in queue.of_next_form()), in_flight=0, now_s=0.0, ends_s=0.0, limits=LIMITS
        )
        positions = list(queue.of_next_form())
        batch = queue.take([(positions[at], count) for at, count in decision.batch.items()])
        batches.append([entry.waiting.rows for entry in batch if entry in large.pieces])
    with_large = [batch for batch in batches if batch]
    assert with_large == [[4]] * (36 // 9), batches


async def test_a_large_request_fills_what_others_leave_and_goes_first_only_among_those_as_urgent() -> None:
    queue = PriorityQueue(4)
    large = queue.put(rows(*range(100)), 5, 0.0, math.inf)
    small = queue.put(rows(1), 5, 0.0, math.inf)
    urgent = queue.put(rows(1), 1, 0.0, math.inf)
    late = queue.put(rows(1), 9, 0.0, math.inf)
    assert list(queue.of_next_form()) == [urgent, small, large, late]
    assert queue.batches_ahead(1, "raw", 5) == 0
    assert queue.batches_ahead(1, "raw", 9) == 25
    batch = queue.take([(urgent, 1), (small, 1), (large, 2)])
    assert [len(entry.rows) for entry in batch] == [1, 1, 2]
    assert list(queue.of_next_form()) == [large, late]
