from __future__ import annotations

import pytest

from inference_service.domain.statistics import Histogram, Statistics


def test_a_value_counts_in_the_first_bucket_whose_bound_is_not_below_it() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.count, histogram.sum) == ([2, 2, 1], 5, 14.0)


def test_time_that_is_not_computing_is_waiting() -> None:
    statistics = Statistics()
    statistics.answered(rows=3, now_s=9.0, total_s=2.0, model_s=1.0, input_s=0.25, infer_s=0.5, output_s=0.1)
    # Two pieces of one request, computed side by side.
    statistics.answered(rows=40, now_s=10.0, total_s=2.0, model_s=1.0, input_s=0.5, infer_s=1.0, output_s=0.1)
    assert statistics.queue.count == 2
    assert statistics.queue.sum == pytest.approx(0.25)
    assert (statistics.rows, statistics.last_inference_s) == (43, 10.0)


def test_a_request_that_is_not_answered_counts_as_that_alone() -> None:
    statistics = Statistics()
    statistics.failed(status="CANCELLED", now_s=9.0, total_s=0.5)
    assert {status: one.count for status, one in statistics.requests.items()} == {"CANCELLED": 1}
    assert [one.count for one in (statistics.queue, *vars(statistics.computing).values())] == [0] * 4
    assert statistics.rows == 0
