from __future__ import annotations

import math
import random

import pytest

from inference_service.domain.batch_policy import BatchTimes, bucket, buckets


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (2, 2), (3, 4), (32, 32), (33, 64)])
def test_buckets_are_powers_of_two(rows: int, expected: int) -> None:
    assert bucket(rows) == expected


@pytest.mark.parametrize(
    ("max_rows", "expected"), [(1, [1]), (2, [1, 2]), (32, [1, 2, 4, 8, 16, 32]), (24, [1, 2, 4, 8, 16, 24])]
)
def test_warm_sizes_end_with_the_largest_batch(max_rows: int, expected: list[int]) -> None:
    assert buckets(max_rows) == expected


def test_nothing_known_expects_nothing() -> None:
    assert BatchTimes().expected_s(8) == 0.0


def test_an_unseen_size_is_estimated_from_the_next_smaller() -> None:
    times = BatchTimes({1: 0.005, 8: 0.010})
    assert times.expected_s(4) == 0.005
    assert times.expected_s(32) == 0.010


def test_estimates_follow_what_is_measured() -> None:
    times = BatchTimes({8: 0.010})
    for _ in range(50):
        times.observe(7, 0.020)
    assert times.expected_s(8) == pytest.approx(0.020, rel=0.01)


def test_the_bound_comes_down_to_the_estimate_while_batches_take_the_same_and_grows_with_what_they_differ_by() -> None:
    times = BatchTimes({8: 0.010})
    assert times.bound_s(8) == pytest.approx(0.0175), "nobody knows yet how much they differ"
    for _ in range(150):
        times.observe(8, 0.010)
    assert times.bound_s(8) == pytest.approx(0.010, rel=0.01)
    for _ in range(50):
        times.observe(8, 0.008)
        times.observe(8, 0.012)
    assert times.bound_s(8) == pytest.approx(0.016, abs=0.002)
    assert times.expected_s(8) == pytest.approx(0.010, abs=0.001)


def test_a_spell_in_which_batches_take_the_same_is_not_soon_trusted() -> None:
    times = BatchTimes({8: 0.010})
    for _ in range(50):
        times.observe(8, 0.008)
        times.observe(8, 0.012)
    for _ in range(5):
        times.observe(8, 0.010)
    assert times.bound_s(8) > 0.014


def test_an_estimate_that_keeps_its_size_from_running_is_put_right_by_the_others() -> None:
    times = BatchTimes({1: 0.005, 2: 0.006, 4: 0.007})
    times.observe(2, 2.0)  # a hiccup
    assert times.bound_s(2) > 0.010
    for _ in range(150):
        times.observe(1, 0.005)
    assert times.bound_s(2) == pytest.approx(0.006, rel=0.1)


def test_a_slowness_of_all_sizes_is_unlearned_by_the_sizes_that_run() -> None:
    times = BatchTimes({8: 0.010, 32: 0.020})
    for _ in range(30):
        times.observe(32, 0.080, 0.060)  # a busy machine, on which 32 rows are soon refused
    assert times.expected_s(32) == pytest.approx(0.080, rel=0.05)
    for _ in range(40):
        times.observe(8, 0.011, 0.010)
    assert times.expected_s(32) < 0.035


def test_noise_does_not_make_estimates_drift_however_long_it_lasts() -> None:
    times = BatchTimes({1: 0.005, 8: 0.010, 32: 0.020})
    noise = random.Random(1)
    for _ in range(50_000):
        times.observe(8, 0.010 * math.exp(noise.gauss(0.0, 0.3)))
    for rows, took_s in ((1, 0.005), (8, 0.010), (32, 0.020)):
        assert took_s * 0.5 < times.expected_s(rows) < took_s * 2


def test_the_way_is_the_same_for_all_sizes() -> None:
    times = BatchTimes({1: 0.005, 8: 0.010})
    for _ in range(30):
        times.observe(1, 0.009, 0.005)
    assert times.computing_s(8) == pytest.approx(0.010)
    assert times.expected_s(8) == pytest.approx(0.014)


def test_one_hiccup_of_the_largest_size_does_not_make_it_look_too_slow_to_be_tried() -> None:
    times = BatchTimes({1: 0.005, 32: 0.020})
    times.observe(32, 5.0)
    assert times.expected_s(32) == pytest.approx(0.024, rel=0.02)
    for _ in range(20):
        times.observe(32, 0.2)  # and what lasts is believed
    assert times.expected_s(32) > 0.15
