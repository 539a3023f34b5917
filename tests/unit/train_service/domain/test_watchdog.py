"""When a rank counts as hung, and which one is to blame."""

from __future__ import annotations

import pytest

from train_service.domain.watchdog import Phase, RankState, culprits, hung, limit_s, waits_for_others

LIMIT = 30.0

IN_BACKWARD = """Thread 0x01 (most recent call first):
  File "/x/torch/autograd/graph.py", line 869 in _engine_run_backward
  File "/x/train_service/worker/loop.py", line 160 in _step
  File "/x/train_service/worker/loop.py", line 80 in train_loop
"""
IN_A_SUM = """Thread 0x01 (most recent call first):
  File "/x/train_service/learning/ranks.py", line 54 in result
  File "/x/train_service/worker/loop.py", line 80 in train_loop
"""
ASLEEP = """Thread 0x02 (most recent call first):
  File "/x/torch/distributed/elastic.py", line 1 in watch

Thread 0x01 (most recent call first):
  File "/x/their/model.py", line 12 in forward
  File "/x/train_service/worker/loop.py", line 80 in train_loop
"""


def at(
    rank: int, step: int = 5, phase: Phase = Phase.TRAINING, still: float = 60.0, unresponsive: float = 0.5
) -> RankState:
    return RankState(rank, step, phase, still, unresponsive)


def test_the_limit_is_thirty_seconds_or_ten_median_steps() -> None:
    assert limit_s([]) == 30.0
    assert limit_s([0.1, 0.2, 50.0]) == 30.0
    assert limit_s([4.0, 5.0, 300.0]) == 50.0


def test_a_second_step_may_take_as_long_as_the_first_which_is_all_that_is_known() -> None:
    assert limit_s([], first_step_s=45.0) == 450.0
    assert limit_s([4.0], first_step_s=45.0) == 40.0


def test_ranks_that_all_stand_still_hang_at_the_lowest_step() -> None:
    assert hung([at(0), at(1), at(2)], LIMIT) == [0, 1, 2]
    assert hung([at(0, step=6), at(1, step=5), at(2, step=6)], LIMIT) == [1]


def test_a_silent_process_hangs_whatever_the_others_do() -> None:
    assert hung([at(0, still=1.0), at(1, unresponsive=31.0)], LIMIT) == [1]
    assert hung([at(0, phase=Phase.SAVING), at(1, unresponsive=31.0)], LIMIT) == [1]


def test_a_rank_that_starts_may_be_silent_for_longer() -> None:
    assert hung([at(0, phase=Phase.STARTING, unresponsive=80.0)], LIMIT) == []
    assert hung([at(0, phase=Phase.STARTING, unresponsive=91.0)], LIMIT) == [0]


@pytest.mark.parametrize(
    "other",
    [
        at(1, phase=Phase.STARTING),
        at(1, phase=Phase.SAVING, still=2.0),
        at(1, still=2.0),
        RankState(1, 5, Phase.TRAINING, 60.0, 0.5, waits_for_store=True),
    ],
    ids=["starts or compiles", "saves", "gets on, as in a validation", "waits for the store"],
)
def test_while_one_has_a_reason_the_others_only_wait_for_it(other: RankState) -> None:
    assert hung([at(0), other], LIMIT) == []


def test_a_rank_that_hangs_at_a_checkpoint_holds_the_others_up_who_wait_in_it() -> None:
    assert hung([at(0, step=19), at(1, step=20, phase=Phase.SAVING)], LIMIT) == [0]
    assert hung([at(0, step=20, phase=Phase.SAVING), at(1, step=20, phase=Phase.SAVING)], LIMIT) == [0, 1]


def test_a_checkpoint_that_waits_for_its_store_is_no_hang() -> None:
    uploading = RankState(0, 20, Phase.SAVING, 600.0, 0.5, waits_for_store=True)
    assert hung([uploading, at(1, step=20, phase=Phase.SAVING, still=600.0)], LIMIT) == []


def test_a_start_may_take_long_but_not_for_ever() -> None:
    assert hung([at(0, step=0, phase=Phase.STARTING, still=1700.0)], LIMIT) == []
    assert hung([at(0, step=0, phase=Phase.STARTING, still=1801.0)], LIMIT) == [0]
    # One that compiles for its validation, while the others wait.
    assert hung([at(0, phase=Phase.STARTING, still=1000.0), at(1, still=1000.0)], LIMIT) == []
    assert hung([at(0, phase=Phase.STARTING, still=5000.0)], 500.0) == [0]
    assert hung([at(0, phase=Phase.STARTING, still=5000.0)], 6000.0) == []


def test_the_watchdog_reports_nothing_without_ranks_and_with_ranks_that_make_progress() -> None:
    assert hung([], LIMIT) == []
    assert hung([at(0, still=1.0), at(1, still=2.0)], LIMIT) == []


def test_stacks_report_who_waits_for_others() -> None:
    assert waits_for_others(IN_BACKWARD)
    assert waits_for_others(IN_A_SUM)
    assert not waits_for_others(ASLEEP)  # another of its threads does


def test_the_watchdog_blames_a_silent_rank_before_one_that_waits_for_no_other() -> None:
    assert culprits([0, 1, 2], {0: IN_BACKWARD, 1: ASLEEP, 2: IN_A_SUM}, []) == [1]
    assert culprits([0, 1], {0: IN_BACKWARD}, [1]) == [1]
    assert culprits([0, 1], {0: IN_BACKWARD, 1: IN_BACKWARD}, []) == [0, 1]
