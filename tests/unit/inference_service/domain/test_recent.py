"""What a version's last requests were, and which limit they pass."""

from __future__ import annotations

import pytest

from inference_service.domain.rollout import RolloutLimits
from inference_service.domain.statistics import Recent, Seen, passed_limit

NONE = Seen(0, 0, 0.0)


def test_only_what_lies_in_the_window_is_seen() -> None:
    recent = Recent()
    recent.answered(10.2, 0.1)
    recent.failed(11.0, "INTERNAL", 0.1)
    recent.answered(30.0, 0.1)
    assert recent.seen(30.5, 5.0).requests == 1
    assert (recent.seen(30.5, 60.0).requests, recent.seen(30.5, 60.0).faults) == (3, 1)
    assert recent.seen(100.0, 60.0) == NONE


@pytest.mark.parametrize("status", ["CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND"])
def test_an_error_of_the_client_does_not_count(status: str) -> None:
    recent = Recent()
    recent.failed(1.0, status, 9.0)
    assert recent.seen(1.0, 60.0) == NONE


def test_one_of_100_takes_longer_than_the_p99_which_is_reported_within_5_percent() -> None:
    recent = Recent()
    for number in range(1, 101):
        recent.answered(5.0, number / 1000)
    assert 0.099 / 1.05 <= recent.seen(5.0, 60.0).p99_s < 0.099
    for _ in range(2):
        recent.answered(5.0, 7.0)
    assert 7.0 / 1.05 <= recent.seen(5.0, 60.0).p99_s < 7.0


def test_a_version_that_is_just_within_the_limit_does_not_pass_it() -> None:
    recent = Recent()
    for _ in range(50):
        recent.answered(5.0, 0.2)
    assert passed_limit(RolloutLimits(max_p99_s=0.2), recent.seen(5.0, 60.0), NONE) == ""


@pytest.mark.parametrize("requests", [100, 300, 700, 1100])
def test_of_whole_hundreds_exactly_one_in_each_may_take_longer(requests: int) -> None:
    recent = Recent()
    for number in range(requests):
        recent.answered(5.0, 7.0 if number < requests // 100 else 0.01)
    assert recent.seen(5.0, 60.0).p99_s < 0.01


def test_a_request_past_its_deadline_counts_with_at_least_that_time() -> None:
    recent = Recent()
    for _ in range(48):
        recent.answered(5.0, 0.01)
    for _ in range(2):
        recent.failed(5.0, "DEADLINE_EXCEEDED", 3.0)
        recent.failed(5.0, "INTERNAL", 9.0)  # it says nothing about how long an answer takes
    seen = recent.seen(5.0, 60.0)
    assert (seen.requests, seen.faults) == (52, 4)
    assert 3.0 / 1.05 <= seen.p99_s < 3.0


def test_samples_too_old_for_any_window_are_forgotten() -> None:
    recent = Recent()
    for second in range(5000):
        recent.answered(float(second), 0.1)
    assert len(recent._seconds) <= 602


@pytest.mark.parametrize(
    ("limits", "new", "old", "said"),
    [
        (RolloutLimits(max_error_share=0.1), Seen(49, 49, 0.1), NONE, ""),
        (RolloutLimits(max_error_share=0.1), Seen(50, 5, 0.1), NONE, ""),
        (RolloutLimits(max_error_share=0.1), Seen(50, 6, 0.1), NONE, "12.0% of its last 50 requests failed"),
        (RolloutLimits(max_error_share=0.0), Seen(50, 1, 0.1), NONE, "at most 0.0% may"),
        (RolloutLimits(max_p99_s=0.2), Seen(50, 50, 0.0), NONE, ""),
        (RolloutLimits(max_p99_s=0.2), Seen(50, 0, 0.2), NONE, ""),
        (RolloutLimits(max_p99_s=0.2), Seen(50, 0, 0.21), NONE, "took 210 ms or longer, at most 200 ms may"),
        (RolloutLimits(max_p99_ratio=2.0), Seen(50, 0, 9.0), Seen(49, 0, 0.1), ""),
        (RolloutLimits(max_p99_ratio=2.0), Seen(50, 0, 0.2), Seen(50, 0, 0.1), ""),
        (RolloutLimits(max_p99_ratio=2.0), Seen(50, 0, 0.3), Seen(50, 0, 0.1), "3 times as long as the old"),
        (RolloutLimits(max_p99_s=0.2, min_requests=10), Seen(10, 0, 0.3), NONE, "300 ms"),
        (RolloutLimits(), Seen(10**6, 10**6, 9.0), NONE, ""),
    ],
)
def test_a_limit_is_passed_above_it_and_only_after_enough_requests(
    limits: RolloutLimits, new: Seen, old: Seen, said: str
) -> None:
    passed = passed_limit(limits, new, old)
    assert said in passed
    assert bool(passed) == bool(said)
