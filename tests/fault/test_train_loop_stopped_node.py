"""A whole loop of a user's own on a node that stands still and goes on later, as one that the network cuts off."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.process_states import stop_process, thread_states
from tests.support.ray_head import RayNode, ray_head, ray_node
from tests.support.training import State, train_stack
from tests.support.waiting import wait_until
from tests.support.whole_loops import ROWS, LoopRun, commit_rows, loop_run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]

EVENT_TIMEOUT_S = 600.0
# Attempts and workers keep off the nodes of services.
OF_SERVICES = "millrace.role=service"
RAYLET = "raylet"
# The loop goes to its gate before each report.
STOPPED_AFTER, EPOCHS = 3, 2


def test_an_attempt_that_was_stopped_and_given_up_commits_nothing_when_it_goes_on(
    faults: Faults, tmp_path: Path
) -> None:
    """As a node that the network cuts off for a while: its attempt and its ranks live, and know nothing of the next."""
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    with (
        ray_head(num_cpus=1, labels=OF_SERVICES) as head,
        ExitStack() as nodes,
        train_stack(settings, head.address, tmp_path) as stack,
    ):
        commit_rows(stack)
        second = nodes.enter_context(ray_node(head, "second", num_cpus=2))
        with loop_run(stack, tmp_path / "run", epochs=EPOCHS, allowed=STOPPED_AFTER) as run:
            run.committed(STOPPED_AFTER, 1)
            wait_until(lambda: has_sent(run, STOPPED_AFTER), "each rank to wait at the gate", EVENT_TIMEOUT_S)
            ranks = {int(path.name.rpartition("-")[2]): path for path in run.folder.glob("rank-*")}
            stop_node(second)
            faults.add("SIGSTOP node, SIGCONT once its attempt is given up", "whole loop", "file")

            nodes.enter_context(ray_node(head, "third", num_cpus=2))
            later, begins_after = run.started(2)
            assert begins_after == STOPPED_AFTER
            run.allow(STOPPED_AFTER + 2)
            run.committed(STOPPED_AFTER + 2, later)
            assert all(thread_states(pid) == {"T"} for pid in ranks), "the stopped ranks were killed before their time"

            # All but its raylet, which would end them at once.
            for pid in second.processes():
                if pid not in raylets(second):
                    os.kill(pid, signal.SIGCONT)
            for path in ranks.values():
                wait_until(
                    lambda path=path: f"\ncannot send {STOPPED_AFTER + 1}\n" in path.read_text(),  # type: ignore[misc]
                    f"the report of {path.name} to be refused",
                    EVENT_TIMEOUT_S,
                )
            for pid in raylets(second):
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: not any(map(thread_states, ranks)), "the stale ranks to end", EVENT_TIMEOUT_S)
            watch = run.rest()

            assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
            assert watch.jobs[-1].attempt == later, watch.ends()
            assert not any(f"has sent {STOPPED_AFTER + 1}" in path.read_text() for path in ranks.values())
            attempts = {one.step: one.attempt for one in run.entries()}
            assert attempts == {step: 1 if step <= STOPPED_AFTER else later for step in range(1, len(attempts) + 1)}
            stale = f"report-{STOPPED_AFTER + 1:08d}-a00001-"
            left = [one.key for one in stack.store.list(f"{run.job.name}/checkpoints/data") if stale in one.key]
            assert not left, "files of a report that was refused"
            assert run.coverage() == [(ROWS - 1, 0, 1)] * EPOCHS


def has_sent(run: LoopRun, report: int) -> bool:
    """Whether that report has returned on both ranks."""
    said = [path.read_text() for path in run.folder.glob("rank-*")]
    return len(said) == 2 and all(f"has sent {report}\n" in one for one in said)


def stop_node(node: RayNode) -> None:
    """Its raylet first, which would start others for those that stand still."""
    raylet = raylets(node)
    assert raylet
    for pid in [*raylet, *(pid for pid in node.processes() if pid not in raylet)]:
        with suppress(ProcessLookupError):
            stop_process(pid)


def raylets(node: RayNode) -> list[int]:
    found = []
    for pid in node.processes():
        with suppress(OSError):  # it has ended since
            if Path(f"/proc/{pid}/comm").read_text().strip() == RAYLET:
                found.append(pid)
    return found
