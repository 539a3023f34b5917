"""What a script asks for is kept with its job, for the attempt at work and for those after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.errors import InvalidArgument
from shared.jobs import AttemptContext, Jobs
from shared.model_spec import ModelSpec
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore
from tests.unit.train_service.worker.test_loop import lose_and_begin, new_job
from train_service.attempt import script_run
from train_service.attempt.script_run import ScriptRun
from train_service.attempt.trainer import began_before
from train_service.convert_specs import FIELDS_OF_SCRIPTS
from train_service.domain.spec import ATTEMPT_DEVICE, CPU, GPU, RUN_DEVICE, Program, TrainingSpec, spec_of_job
from train_service.placement import Node
from train_service.program.fit_calls import Fit, FitCall, TrainerSettings
from train_service.records.event_log import TRAIN_KIND

JOB = "trainingJobs/a"
PROGRAM = Program(code_bundle=f"codeBundles/{'a' * 64}", entry="cells.py")
OPEN = TrainingSpec(
    dataset_version="",
    model=ModelSpec(builder="", in_channels=0, num_classes=0),
    epochs=0,
    global_batch_size=0,
    program=PROGRAM,
    left_open=tuple(FIELDS_OF_SCRIPTS),
)
FIT = Fit(number=1, call=FitCall(name="own", storage_path="", line="cells.py:3", function="loop", config_sha256=""))


def settle(store: ObjectStore, asked: TrainerSettings, fit: Fit = FIT) -> tuple[Fit, TrainingSpec]:
    """As the attempt at work does it when the script calls `fit()`."""
    jobs = Jobs(store, TRAIN_KIND)
    context = AttemptContext(store, jobs, JOB, jobs.get(JOB, JOB))
    return ScriptRun(context, OPEN, PROGRAM, lambda _: None)._settle(fit, asked, "cells.py:3")


def kept(store: ObjectStore) -> TrainingSpec:
    """What the reconciler looks for room for."""
    job = Jobs(store, TRAIN_KIND).get(JOB, JOB)
    return spec_of_job(job.spec["training"], job.choices)


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    there = [Node("n", {}, {"CPU": 8.0, "GPU": 2.0})]
    monkeypatch.setattr(script_run, "usable_nodes", lambda: there)
    return there


def test_the_next_attempt_looks_for_what_the_script_asked_for(store: ObjectStore) -> None:
    new_job(store, JOB, OPEN)
    asked = TrainerSettings(num_workers=3, resources_per_worker={"CPU": 0.5}, max_failures=7, max_preemption_failures=2)
    fit, spec = settle(store, asked)

    job = Jobs(store, TRAIN_KIND).get(JOB, JOB)
    assert (spec.num_workers, spec.placement.cpus_per_worker, fit.device) == (3, 0.5, CPU)
    assert kept(store) == spec
    assert (job.max_failures, job.max_preemptions) == (7, 2)
    assert (job.choices[RUN_DEVICE], job.choices[ATTEMPT_DEVICE]) == (CPU, CPU)
    # Asked for again by the next attempt, nothing changes.
    lose_and_begin(store, JOB)
    assert settle(store, asked, fit) == (fit, spec)


def test_the_order_of_rows_and_the_device_stay_when_a_later_attempt_asks_for_others(
    store: ObjectStore, nodes: list[Node]
) -> None:
    new_job(store, JOB, OPEN)
    fit, first = settle(store, TrainerSettings(num_workers=2, use_gpu=True))
    assert (fit.device, first.lanes) == (GPU, 24)
    nodes.clear()  # the GPUs are gone

    lose_and_begin(store, JOB)
    fit, second = settle(store, TrainerSettings(num_workers=20, use_gpu=True), fit)
    assert (fit.device, second.lanes, second.num_workers) == (GPU, 24, 20)
    with pytest.raises(script_run._Refused) as refused:
        settle(store, TrainerSettings(num_workers=30, use_gpu=True), fit)
    assert isinstance(refused.value.error, InvalidArgument)
    assert refused.value.error.specific_reason == "MORE_WORKERS_THAN_LANES"
    assert kept(store).num_workers == 20


def test_failures_that_a_run_allows_are_not_those_of_the_next(store: ObjectStore) -> None:
    new_job(store, JOB, OPEN)
    settle(store, TrainerSettings(num_workers=2, max_failures=1, max_preemption_failures=0))
    settle(store, TrainerSettings(num_workers=2))

    job = Jobs(store, TRAIN_KIND).get(JOB, JOB)
    assert (job.max_failures, job.max_preemptions) == (OPEN.max_failures, OPEN.max_preemptions)


def test_the_result_of_an_attempt_without_a_run_is_by_what_the_last_run_asked_for(store: ObjectStore) -> None:
    new_job(store, JOB, OPEN)
    settle(store, TrainerSettings(num_workers=2, score_attribute="accuracy"))
    lose_and_begin(store, JOB)

    jobs = Jobs(store, TRAIN_KIND)
    context = AttemptContext(store, jobs, JOB, jobs.get(JOB, JOB))
    again = ScriptRun(context, OPEN, PROGRAM, lambda _: None)
    assert again._fit_spec.checkpoints.best_metric == "accuracy"


def test_an_attempt_that_was_overtaken_keeps_nothing(store: ObjectStore) -> None:
    new_job(store, JOB, OPEN)
    jobs = Jobs(store, TRAIN_KIND)
    stale = AttemptContext(store, jobs, JOB, jobs.get(JOB, JOB))
    lose_and_begin(store, JOB)
    with pytest.raises(StaleAttempt):
        stale.choose({"script": {"num_workers": 9}})
    assert kept(store).num_workers == OPEN.num_workers


def test_attempts_that_found_no_room_did_not_begin(store: ObjectStore) -> None:
    new_job(store, JOB, OPEN)
    job = Jobs(store, TRAIN_KIND).get(JOB, JOB)
    assert not began_before(job)
    assert not began_before(replace(job, attempt=3, waits=2))
    assert began_before(replace(job, attempt=3, waits=1))
