"""When checkpoints are due: by steps, and by seconds that rank 0 counts and all ranks hear of at the same step."""

from __future__ import annotations

import itertools

from train_service.checkpoints.saving import CheckpointClock


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_so_many_steps_wherever_the_attempt_began() -> None:
    clock = CheckpointClock(3, 0.0)

    assert [step for step in range(4, 13) if clock.due(step)] == [6, 9, 12]
    assert clock.ask() == 0.0


def test_without_rules_none_is_due() -> None:
    clock = CheckpointClock(0, 0.0)

    assert not any(clock.due(step) for step in range(1, 100))


def test_the_request_is_reported_once_and_is_due_when_the_all_reduce_has_ended() -> None:
    watch = Watch()
    clock = CheckpointClock(0, 10.0, watch)
    watch.now += 9.9
    assert clock.ask() == 0.0

    watch.now += 0.2
    assert clock.ask() == 1.0
    assert clock.ask() == 0.0  # the next step's sum begins before this one's is known
    assert not clock.due(7)
    clock.heard(1.0)
    assert clock.due(7)

    clock.taken()
    clock.heard(0.0)
    assert not clock.due(8)
    watch.now += 10.1
    assert clock.ask() == 1.0


def test_a_request_of_the_step_that_was_saved_anyway_is_fulfilled() -> None:
    watch = Watch()
    clock = CheckpointClock(5, 10.0, watch)
    watch.now += 10.1

    assert (clock.ask(), clock.due(5)) == (1.0, True)
    clock.taken()
    clock.heard(1.0)  # the sum of step 5
    assert not clock.due(6)

    watch.now += 10.1
    assert clock.ask() == 1.0
    clock.heard(1.0)
    assert clock.due(7)


def test_a_checkpoint_for_any_reason_starts_the_seconds_anew() -> None:
    watch = Watch()
    clock = CheckpointClock(5, 10.0, watch)
    watch.now += 9.0
    clock.taken()
    watch.now += 9.0

    assert clock.ask() == 0.0


def test_ranks_agree_on_the_step_though_only_one_has_a_watch() -> None:
    watch = Watch()
    first, other = CheckpointClock(4, 10.0, watch), CheckpointClock(4, 10.0, lambda: 0.0)
    taken: list[list[int]] = [[], []]
    pending: float | None = None
    for step in range(1, 20):
        watch.now += 3.0
        for rank, clock in enumerate((first, other)):
            if pending is not None:
                clock.heard(pending)
            if clock.due(step):
                taken[rank].append(step)
        pending = first.ask() + 0.0
        for rank, clock in enumerate((first, other)):
            if taken[rank][-1:] == [step]:
                clock.taken()

    assert taken[0] == taken[1]
    assert {4, 8, 12, 16} <= set(taken[0])
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(taken[0]))
