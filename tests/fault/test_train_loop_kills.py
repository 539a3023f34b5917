"""A whole loop of a user's own under SIGKILL of all that takes part: each row once an epoch, the weights bit for bit.

Each kill falls once a number of reports is committed; a seed draws that number and the rank.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.process_states import child_running
from tests.support.ray_head import RayHead, ray_head
from tests.support.training import State, TrainStack, Watch, train_stack
from tests.support.waiting import wait_until
from tests.support.whole_loops import (
    REPORTS_PER_EPOCH,
    ROWS,
    LoopRun,
    assert_equal_states,
    commit_rows,
    loop_run,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]

WORKER, ATTEMPT = "ray::RayTrainWorker", "ray::AttemptActor.run"
SEED, KILLS, EPOCHS = 24, 10, 8


@dataclass
class Site:
    """A service on a Ray head that can be taken away and put back, on the same port."""

    stack: TrainStack
    stop: ExitStack
    head: RayHead

    def kill_service(self) -> None:
        self.stack.service.kill()
        self.stack.service.start()

    def kill_reconciler(self) -> None:
        parent = self.stack.service.pid
        killed = child_running(parent, "train_service.reconciler")
        assert killed
        os.kill(killed, signal.SIGKILL)
        wait_until(
            lambda: child_running(parent, "train_service.reconciler") not in (0, killed), "another reconciler", 300.0
        )

    def kill_attempt(self) -> None:
        for pid in self.head.processes(ATTEMPT):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_head(self) -> None:
        self.head.kill()
        port = int(self.head.address.rpartition(":")[2])
        self.head = self.stop.enter_context(ray_head(num_cpus=4, port=port))


# The strike, and how many attempts there are in the end.
STRIKES: dict[str, tuple[Callable[[Site], None], int]] = {
    "service": (Site.kill_service, 1),
    "reconciler": (Site.kill_reconciler, 1),
    "attempt": (Site.kill_attempt, 2),
    "head": (Site.kill_head, 2),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("loop-kills")
    with ExitStack() as stop:
        head = stop.enter_context(ray_head(num_cpus=4))
        settings = StoreSettings(url=(folder / "store").as_uri())
        stack = stop.enter_context(train_stack(settings, head.address, folder))
        commit_rows(stack)
        yield Site(stack, stop, head)


@pytest.fixture(scope="module")
def undisturbed(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run that was left alone ends with."""
    with loop_run(site.stack, tmp_path_factory.mktemp("undisturbed") / "run", epochs=EPOCHS, allowed=10**9) as run:
        watch = run.rest()
        assert_whole(run, watch, 1)
        return run.final_state()


def test_ten_kills_of_ranks_lose_and_repeat_no_row_and_change_no_bit(
    site: Site, undisturbed: dict[str, Any], faults: Faults, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    with loop_run(site.stack, tmp_path / "run", epochs=EPOCHS, allowed=0) as run:
        attempt = 0
        for _ in range(KILLS):
            attempt, begins_after = run.started(attempt + 1)
            struck_at = begins_after + chance.randint(1, 2)
            # One more may be under way, or stand at the gate, when the kill falls.
            run.allow(struck_at + chance.randint(0, 1))
            run.committed(struck_at, attempt)
            os.kill(chance.choice(sorted(site.head.processes(WORKER))), signal.SIGKILL)
            faults.add("SIGKILL worker", "whole loop", "file")
        watch = run.rest()

        assert_whole(run, watch, attempt + 1)
        assert watch.jobs[-1].failures >= KILLS, watch.ends()
        assert_equal_states(run.final_state(), undisturbed)


@pytest.mark.parametrize("victim", STRIKES)
def test_a_kill_of_what_a_loop_runs_on_loses_and_repeats_no_row_and_changes_no_bit(
    site: Site, undisturbed: dict[str, Any], faults: Faults, tmp_path: Path, victim: str
) -> None:
    strike, attempts = STRIKES[victim]
    with loop_run(site.stack, tmp_path / "run", epochs=EPOCHS, allowed=4) as run:
        run.committed(3, 1)
        strike(site)
        faults.add(f"SIGKILL {victim}", "whole loop", "file")
        watch = run.rest()

        assert_whole(run, watch, attempts)
        assert_equal_states(run.final_state(), undisturbed)


def assert_whole(run: LoopRun, watch: Watch, attempts: int) -> None:
    """The job succeeded, each report was committed once, and each row was seen once an epoch but for the one left."""
    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
    assert watch.jobs[-1].attempt == attempts, watch.ends()
    assert [one.step for one in run.entries()] == list(range(1, EPOCHS * REPORTS_PER_EPOCH + 1))
    assert run.coverage() == [(ROWS - 1, 0, 1)] * EPOCHS
