"""When checkpoints are due: by steps, and by seconds that rank 0 counts and all ranks hear of at the same step."""

from __future__ import annotations

import itertools

from train_service.checkpoints.saving import CheckpointTrigger


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_so_many_steps_wherever_the_attempt_began() -> None:
    trigger = CheckpointTrigger(3, 0.0)

    assert [step for step in range(4, 13) if trigger.due(step)] == [6, 9, 12]
    assert trigger.request() == 0.0


def test_without_rules_none_is_due() -> None:
    trigger = CheckpointTrigger(0, 0.0)

    assert not any(trigger.due(step) for step in range(1, 100))


def test_the_request_is_reported_once_and_is_due_when_the_all_reduce_has_ended() -> None:
    watch = Watch()
    trigger = CheckpointTrigger(0, 10.0, watch)
    watch.now += 9.9
    assert trigger.request() == 0.0

    watch.now += 0.2
    assert trigger.request() == 1.0
    assert trigger.request() == 0.0  # the next step's sum begins before this one's is known
    assert not trigger.due(7)
    trigger.receive_sum(1.0)
    assert trigger.due(7)

    trigger.note_taken()
    trigger.receive_sum(0.0)
    assert not trigger.due(8)
    watch.now += 10.1
    assert trigger.request() == 1.0


def test_a_request_of_the_step_that_was_saved_anyway_is_fulfilled() -> None:
    watch = Watch()
    trigger = CheckpointTrigger(5, 10.0, watch)
    watch.now += 10.1

    assert (trigger.request(), trigger.due(5)) == (1.0, True)
    trigger.note_taken()
    trigger.receive_sum(1.0)  # the sum of step 5
    assert not trigger.due(6)

    watch.now += 10.1
    assert trigger.request() == 1.0
    trigger.receive_sum(1.0)
    assert trigger.due(7)


def test_a_checkpoint_for_any_reason_starts_the_seconds_anew() -> None:
    watch = Watch()
    trigger = CheckpointTrigger(5, 10.0, watch)
    watch.now += 9.0
    trigger.note_taken()
    watch.now += 9.0

    assert trigger.request() == 0.0


def test_ranks_agree_on_the_step_though_only_one_has_a_watch() -> None:
    watch = Watch()
    first, other = CheckpointTrigger(4, 10.0, watch), CheckpointTrigger(4, 10.0, lambda: 0.0)
    taken: list[list[int]] = [[], []]
    pending: float | None = None
    for step in range(1, 20):
        watch.now += 3.0
        for rank, trigger in enumerate((first, other)):
            if pending is not None:
                trigger.receive_sum(pending)
            if trigger.due(step):
                taken[rank].append(step)
        pending = first.request() + 0.0
        for rank, trigger in enumerate((first, other)):
            if taken[rank][-1:] == [step]:
                trigger.note_taken()

    assert taken[0] == taken[1]
    assert {4, 8, 12, 16} <= set(taken[0])
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(taken[0]))
