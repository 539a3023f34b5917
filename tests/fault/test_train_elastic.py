"""One run on a cluster whose nodes come, die and are taken away: it starts on what there is and makes the best of it.

The head has one CPU, the next node one, and that after it two; the run wants three workers and goes on with one. Its
rows have their ids in the pixels, which a training step of an installed package writes down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.numbered_rows import ROWS, STEPS_PER_EPOCH, numbered_digits
from tests.support.ray_head import ray_head, ray_node
from tests.support.training import VALIDATION_ROWS, State, Watch, train_stack
from tests.support.versions import commit_version, striped_digits
from tests.support.witnessed import (
    VERSION,
    Account,
    WitnessedStack,
    account_of,
    witness_environment,
    witnessed_spec,
)

EPOCHS = 140

pytestmark = [pytest.mark.timeout(1800), pytest.mark.chaos]


@dataclass
class Run:
    job: res.TrainingJob
    watch: Watch
    # By epoch.
    coverage: list[pb.Coverage]
    # By the pixels.
    account: Account

    def of(self, kind: str, attempt: int) -> list[pb.TrainingEvent]:
        return [one for one in self.watch.events if one.attempt == attempt and one.WhichOneof("event") == kind]

    def ended(self, attempt: int) -> pb.AttemptEnded:
        (event,) = self.of("attempt_ended", attempt)
        return event.attempt_ended

    def started(self, attempt: int) -> pb.AttemptStarted:
        (event,) = self.of("attempt_started", attempt)
        return event.attempt_started


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder: Path = tmp_path_factory.mktemp("train-elastic")
    settings = StoreSettings(url=(folder / "store").as_uri())
    with (
        witness_environment(folder) as witness,
        ray_head(num_cpus=1) as head,
        ExitStack() as nodes,
        train_stack(settings, head.address, folder) as stack,
    ):
        splits = {"train": numbered_digits(), "validation": striped_digits(VALIDATION_ROWS, 1)}
        commit_version(stack.store, VERSION, splits)
        spec = witnessed_spec(epochs=EPOCHS, workers=3, checkpoint_every_steps=10)
        spec.min_workers = 1
        job = stack.client.create(spec)
        watch = stack.client.watch(job.name, timeout_s=1700)
        watch.until("progress")

        second = nodes.enter_context(ray_node(head, "second"))
        watch.until("attempt_started", lambda event: event.attempt == 2)
        watch.until("checkpoint_committed", lambda event: event.attempt == 2)
        second.kill()
        watch.until("attempt_started", lambda event: event.attempt == 3)
        watch.until("progress")

        nodes.enter_context(ray_node(head, "third", num_cpus=2))
        watch.until("attempt_started", lambda event: event.attempt == 4)
        watch.until("progress")
        head.drain("third")
        watch.rest()
        asked = (pb.GetCoverageRequest(name=job.name, epoch=epoch) for epoch in range(EPOCHS))
        coverage = [stack.client.rpc.GetCoverage(request, timeout=60) for request in asked]
        account = account_of(WitnessedStack(stack, head, witness), job.name)
        yield Run(stack.client.get(job.name), watch, coverage, account)


def test_an_elastic_run_starts_on_the_present_nodes_and_succeeds(run: Run) -> None:
    assert run.job.state == State.STATE_SUCCEEDED, run.job
    assert run.started(1).num_workers == 1


def test_an_elastic_run_grows_when_a_node_joins_without_a_lost_step_or_failure(run: Run) -> None:
    assert run.ended(1).cause == pb.AttemptEnded.CAUSE_RESIZED
    assert run.started(2).num_workers == 2
    last = run.of("checkpoint_committed", 1)[-1].checkpoint_committed
    assert (run.started(2).step, run.started(2).checkpoint) == (last.step, last.name)
    assert max(one.progress.step for one in run.of("progress", 1)) <= last.step


def test_an_elastic_run_shrinks_when_a_node_dies_and_counts_a_failure(run: Run, faults: Faults) -> None:
    faults.add("SIGKILL node", "training", "file")
    assert run.ended(2).cause == pb.AttemptEnded.CAUSE_FAILURE
    assert run.started(3).num_workers == 1
    assert run.job.failures == 1


def test_a_node_that_is_taken_away_costs_no_step_and_counts_against_a_budget_of_its_own(
    run: Run, faults: Faults
) -> None:
    faults.add("node drained", "training", "file")
    assert run.started(4).num_workers == 3
    assert run.ended(4).cause == pb.AttemptEnded.CAUSE_PREEMPTED
    # Two of the three were on that node.
    assert len(run.ended(4).ranks) <= 2
    last = run.of("checkpoint_committed", 4)[-1].checkpoint_committed
    assert (run.started(5).num_workers, run.started(5).step) == (1, last.step)
    assert (run.job.attempt, run.job.preemptions) == (5, 1)


def test_every_epoch_is_measured_once_and_the_order_of_steps_has_no_gap(run: Run) -> None:
    begins = [run.started(attempt).step for attempt in range(1, 6)]
    # What an attempt measured behind the checkpoint from which the next goes on is measured again.
    validated = [
        one.validated.step
        for attempt, end in enumerate([*begins[1:], EPOCHS * STEPS_PER_EPOCH], start=1)
        for one in run.of("validated", attempt)
        if one.validated.step <= end
    ]
    assert validated == [STEPS_PER_EPOCH * (epoch + 1) for epoch in range(EPOCHS)]
    for attempt in (1, 2, 3, 4):
        begin = run.started(attempt + 1).step
        assert begin in {0, *(one.checkpoint_committed.step for one in run.of("checkpoint_committed", attempt))}


def test_every_row_of_every_epoch_was_seen_once_by_one_two_or_three_workers(run: Run) -> None:
    assert [run.started(attempt).num_workers for attempt in range(1, 6)] == [1, 2, 1, 3, 1]
    assert {(one.seen_once, one.missing, one.repeated) for one in run.coverage} == {(ROWS, 0, 0)}
    assert (run.account.missing_rows, run.account.repeated_rows) == (0, 0)
    assert run.account.reported == (ROWS * EPOCHS, 0, 0)
