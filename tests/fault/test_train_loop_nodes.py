"""A whole loop of a user's own on a node that dies, and on one that comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from millrace.train.v1 import train_service_pb2 as pb
from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.ray_head import RayHead, ray_head, ray_node
from tests.support.training import State, TrainStack, train_stack
from tests.support.whole_loops import ROWS, commit_rows, loop_run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]

# A number at which a run is still at work when its suspension reaches it.
EPOCHS = 60


@contextmanager
def stack_on(head: RayHead, folder: Path) -> Iterator[TrainStack]:
    settings = StoreSettings(url=(folder / "store").as_uri())
    with train_stack(settings, head.address, folder) as stack:
        commit_rows(stack)
        yield stack


def test_a_loop_goes_on_with_fewer_workers_when_a_node_dies_and_with_more_once_another_came(
    faults: Faults, tmp_path: Path
) -> None:
    with ray_head(num_cpus=1) as head, ExitStack() as nodes, stack_on(head, tmp_path) as stack:
        second = nodes.enter_context(ray_node(head, "second"))
        with loop_run(stack, tmp_path / "run", epochs=EPOCHS, allowed=4, min_workers=1) as run:
            run.committed(3, 1)
            second.kill()
            faults.add("SIGKILL node", "whole loop", "file")
            alone, begins_after = run.started(2)
            run.allow(begins_after + 3)
            run.committed(begins_after + 2, alone)

            nodes.enter_context(ray_node(head, "third"))
            # How much of a program is left is unknown, so it takes more workers only with its next attempt.
            stack.client.suspend(run.job.name)
            run.allow(10**9)
            run.watch().until_state(State.STATE_SUSPENDED)
            given_back = max(one.step for one in run.entries())
            stack.client.resume(run.job.name)
            watch = run.rest()

            assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
            assert [one.num_workers for one in watch.of("attempt_started")] == [2, 1, 2], watch.ends()
            *lost, suspended = [one.cause for one in watch.of("attempt_ended")]
            assert set(lost) == {pb.AttemptEnded.CAUSE_FAILURE}, watch.ends()
            assert suspended == pb.AttemptEnded.CAUSE_SUSPENDED, watch.ends()
            assert run.started(alone + 1)[1] == given_back
            steps = [one.step for one in run.entries()]
            assert steps == list(range(1, len(steps) + 1))
            for epoch in range(EPOCHS):
                found = run.millrace.train.get_coverage(run.job.name, epoch)
                assert (found.repeated, found.epoch_done) == (0, True)
                assert found.missing <= 1  # which two workers cannot share
                assert found.seen_once + found.missing == ROWS
