"""Creating, reading and ending sweeps, and what their trials' own logs say of them."""

from __future__ import annotations

import math
import uuid
from dataclasses import replace
from typing import Any

import pytest

from shared.checkpoint.references import using
from shared.dataset_version.version import live_references as version_references
from shared.errors import (
    AlreadyExists,
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    MillraceError,
    NotFound,
)
from shared.jobs import Jobs, JobState
from shared.jobs.reconciler import JobKind, Reconciler
from shared.jobs.retry_limits import SWEEP_MAX_FAILURES
from shared.settings import ServiceSettings
from tests.support.versions import commit_version, striped_digits
from tests.support.waiting import wait_until
from tests.unit.train_service.conftest import VERSION
from tests.unit.train_service.sweeps.conftest import BASE, NAME, RATE, SPEC, Place, replace_by_hand
from train_service.domain import spec_rules
from train_service.domain.spec import TrainingSpec
from train_service.domain.sweep import CHOICE, GRID, INTEGERS, LOG_UNIFORM, Domain
from train_service.jobs import training_jobs
from train_service.jobs.deletion import Deletions
from train_service.jobs.training_jobs import TrainingJobs
from train_service.records.event_log import TRAIN_KIND
from train_service.servicer import sweep_to_proto
from train_service.sweeps.sweeps import MAX_CHECKED_WITH_MODEL, SWEEP_KIND, Sweeps, end_trials


def keys(place: Place) -> list[str]:
    return sorted(info.key for info in place.store.list())


def test_a_sweep_is_durable_marks_its_version_and_knows_its_trials_before_they_are_made(place: Place) -> None:
    made = place.create()

    assert (made.record.state, made.record.name) == (JobState.PENDING, NAME)
    assert made.trials is not None
    assert [(one.name, one.parameters, one.job) for one in made.trials] == [
        ("trainingJobs/s-000", {RATE: 0.1}, None),
        ("trainingJobs/s-001", {RATE: 0.2}, None),
    ]
    assert place.sweeps.get(NAME) == made
    assert [view.record.name for view in place.sweeps.page(0, "")[0]] == [NAME]
    assert version_references(place.store, VERSION, 0.0) == [NAME]
    assert len(place.jobs.live()) == 1


def test_the_same_request_gives_the_first_answer_and_another_of_the_id_is_refused(place: Place) -> None:
    request_id = str(uuid.uuid4())
    first = place.create(request_id=request_id)
    # Whatever has become of it meanwhile.
    place.trials().make(0)

    assert place.create(request_id=request_id).record == first.record
    with pytest.raises(AlreadyExists, match="sweeps/s"):
        place.create()
    with pytest.raises(AlreadyExists, match="sweeps/s"):
        place.create(validate_only=True)


def test_a_repeated_request_is_answered_with_a_sweep_from_when_uids_were_random(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = str(uuid.uuid4())
    with monkeypatch.context() as then:
        then.setattr("train_service.sweeps.sweeps.uid_of", lambda *_: uuid.uuid4().hex)
        first = place.create(request_id=request_id)

    assert place.create(request_id=request_id) == first
    with pytest.raises(AlreadyExists, match="sweeps/s"):
        place.create(request_id=str(uuid.uuid4()))


def test_a_repeated_request_does_not_make_anew_what_was_deleted_since(place: Place) -> None:
    request_id = str(uuid.uuid4())
    place.create(request_id=request_id)
    place.put_in(JobState.CANCELLED)
    place.deletions.begin(NAME)
    place.deletions.finish(NAME)

    with pytest.raises(NotFound, match="deleted since"):
        place.create(request_id=request_id)
    assert place.jobs.find(NAME) is None


def test_a_repeated_request_gets_its_answer_when_the_version_is_gone(place: Place) -> None:
    request_id = str(uuid.uuid4())
    first = place.create(request_id=request_id)
    place.store.delete_folder(VERSION)

    assert place.create(request_id=request_id) == first
    with pytest.raises(AlreadyExists, match="another body"):
        place.sweeps.create("s", SPEC, request_id, "of another", validate_only=False)


def test_checking_only_reports_the_trials_and_leaves_nothing(place: Place) -> None:
    before = keys(place)
    view = place.create(validate_only=True)
    assert view.trials is not None
    assert [one.parameters for one in view.trials] == [{RATE: 0.1}, {RATE: 0.2}]
    assert keys(place) == before


@pytest.mark.parametrize("validate_only", [True, False])
def test_checks_of_trials_end_with_the_calls_deadline_and_leave_nothing(place: Place, validate_only: bool) -> None:
    before = keys(place)

    with pytest.raises(DeadlineExceeded, match="0 trials of the sweep were checked in time"):
        place.sweeps.create("s", SPEC, "", "digest", validate_only, timeout_s=-1.0)

    assert keys(place) == before


def test_a_trials_job_has_the_budgets_of_the_base(place: Place) -> None:
    place.create(replace(SPEC, base=replace(BASE, max_failures=5, max_preemptions=7)))

    job = place.trials().make(0)

    assert (job.max_failures, job.max_preemptions) == (5, 7)


def test_a_sweep_whose_trials_name_is_taken_is_refused_and_leaves_nothing(place: Place) -> None:
    TrainingJobs(place.store).create("s-001", BASE, "", "digest", validate_only=False)
    before = keys(place)

    with pytest.raises(AlreadyExists, match="trainingJobs/s-001 exists already; it would be a trial's"):
        place.create()
    assert keys(place) == before


@pytest.mark.parametrize(
    ("path", "domain", "field"),
    [
        (RATE, Domain(kind=GRID, values=(0.1, -1)), ""),
        (RATE, Domain(kind=LOG_UNIFORM, low=0, high=1), ".log_uniform.low"),
        ("optimizer.name", Domain(kind=GRID, values=("SGD", "Adamw")), ""),
        ("global_batch_size", Domain(kind=INTEGERS, low=20, high=41), ""),
        ("model.kwargs.widths", Domain(kind=CHOICE, values=(1, 2)), ""),
    ],
)
def test_a_value_that_no_trial_could_have_is_refused_by_its_parameter(
    place: Place, path: str, domain: Domain, field: str
) -> None:
    refuses(place, f"spec.parameters[{path}]{field}", parameters={path: domain})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"base": replace(BASE, train_split="nowhere")}, "spec.base.train_split"),
        ({"base": replace(BASE, checkpoints=replace(BASE.checkpoints, best_metric="validation_f1"))}, "spec.metric"),
        ({"num_samples": 0}, "spec.num_samples"),
    ],
)
def test_a_fault_that_all_trials_share_is_refused_by_its_field(
    place: Place, change: dict[str, Any], field: str
) -> None:
    refuses(place, field, **change)


def refuses(place: Place, field: str, **change: Any) -> None:
    before = keys(place)
    with pytest.raises(InvalidArgument) as refused:
        place.create(replace(SPEC, **change))
    assert [one for one, _ in refused.value.fields] == [field]
    assert field in refused.value.message
    assert keys(place) == before


@pytest.mark.parametrize("sweep_id", ["", "S", "a" * 60, "a/b"])
def test_an_id_that_leaves_no_room_for_the_trials_numbers_is_refused(place: Place, sweep_id: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        place.create(sweep_id=sweep_id)
    assert [one for one, _ in refused.value.fields] == ["sweep_id"]
    assert place.create(sweep_id="a" * 59).trials


def test_a_version_without_a_validation_split_has_nothing_to_compare_trials_by(place: Place) -> None:
    commit_version(place.store, "datasets/digits/versions/v2", {"train": striped_digits(40)})
    with pytest.raises(InvalidArgument) as refused:
        place.create(replace(SPEC, base=replace(BASE, dataset_version="datasets/digits/versions/v2")))
    assert [one for one, _ in refused.value.fields] == ["spec.base.validation_split"]


def test_a_trial_is_made_once_however_often_it_is_asked_for(place: Place) -> None:
    place.create()
    first = place.trials().make(1)
    again = place.trials().make(1)

    assert again == first
    assert first.spec["training"]["optimizer"]["learning_rate"] == 0.2
    assert first.spec["trial"] == {"sweep": NAME, "number": 1, "parameters": {RATE: 0.2}}
    assert len(list(place.store.list("trainingJobs/s-001/log"))) == 1


def test_a_trial_that_was_deleted_is_not_made_again(place: Place) -> None:
    place.create()
    place.trials().make(0)
    place.put_in(JobState.FAILED, "trainingJobs/s-000")
    training = TrainingJobs(place.store)
    training.delete("trainingJobs/s-000", "")
    wait_until(lambda: not training.exists("trainingJobs/s-000"), "the end of the trial")

    assert place.trials().make(0).state is JobState.DELETED
    assert not training.exists("trainingJobs/s-000")
    assert place.trials().is_over(0)


def test_a_trial_that_was_deleted_is_reported_and_nothing_is_waited_for(place: Place) -> None:
    place.create()
    delete_by_hand(place, "s-000")

    reported = sweep_to_proto(place.sweeps.get(NAME))

    assert [one.deleted for one in reported.trials] == [True, False]
    assert (reported.counts.total, reported.counts.pending) == (2, 1)
    place.put_in(JobState.CANCELLED)
    assert sweep_to_proto(place.sweeps.get(NAME)).counts.cancelled == 1


def delete_by_hand(place: Place, job_id: str) -> None:
    place.trials().make(int(job_id.rpartition("-")[2]))
    place.put_in(JobState.FAILED, f"trainingJobs/{job_id}")
    deletions = Deletions(place.store)
    deletions.begin(f"trainingJobs/{job_id}")
    deletions.finish(f"trainingJobs/{job_id}")


def test_the_best_trial_is_reported_by_what_its_checkpoints_measured(place: Place) -> None:
    place.create()
    place.measure(0, 0.5, 0.9, 0.7)
    place.measure(1, 0.8, math.nan)

    view = place.sweeps.get(NAME)

    assert (view.best_training_job, view.best_checkpoint) == (
        "trainingJobs/s-000",
        "trainingJobs/s-000/checkpoints/step-00000002",
    )
    reported = sweep_to_proto(view)
    assert [(one.last_value, one.best_value, one.epochs_done, one.epochs) for one in reported.trials] == [
        (0.7, 0.9, 3, 3),
        (0.8, 0.8, 2, 3),
    ]
    assert TrainingJobs(place.store).get("trainingJobs/s-000").record.spec["trial"]["parameters"] == {RATE: 0.1}


def test_a_trial_counts_epochs_of_an_own_model_and_reports_of_a_program(place: Place) -> None:
    place.create()
    place.measure(0, 0.5, 0.9, steps_of_epoch=50, code_bundle="codeBundles/a", model_entry="net:Net")
    place.measure(1, 0.5, 0.9, steps_of_epoch=50, code_bundle="codeBundles/a")
    assert [one.epochs_done for one in sweep_to_proto(place.sweeps.get(NAME)).trials] == [2, 100]


def test_the_best_by_a_loss_is_the_lowest(place: Place) -> None:
    policy = replace(BASE.checkpoints, best_metric="validation_accuracy", maximize=False)
    place.create(replace(SPEC, base=replace(BASE, checkpoints=policy)))
    place.measure(0, 0.5, 0.9)
    place.measure(1, 0.8)
    assert place.sweeps.get(NAME).best_checkpoint == "trainingJobs/s-000/checkpoints/step-00000001"


def test_a_trial_that_the_scheduler_stopped_is_distinguished_from_one_that_a_client_cancelled(place: Place) -> None:
    place.create(replace(SPEC, parameters={RATE: Domain(kind=GRID, values=(0.1, 0.2, 0.3, 0.4))}))
    trials = place.trials()
    for number in range(3):
        trials.make(number)
    place.put_in(JobState.SUCCEEDED, trials.name(2))

    trials.stop_early(0)
    trials.stop_early(2)  # it was faster
    Jobs(place.store, TRAIN_KIND).cancel(trials.name(1), trials.name(1))

    reported = sweep_to_proto(place.sweeps.get(NAME))
    assert [one.stopped_early for one in reported.trials] == [True, False, False, False]
    assert (
        reported.counts.stopped_early,
        reported.counts.running,
        reported.counts.succeeded,
        reported.counts.pending,
    ) == (1, 1, 1, 1)
    assert trials.stopped() == {0}


def test_a_trial_that_was_stopped_before_it_had_a_checkpoint_did_not_end_well(place: Place) -> None:
    place.create(replace(SPEC, parameters={RATE: Domain(kind=GRID, values=(0.1, 0.2, 0.3))}))
    trials = place.trials()
    trials.make(0)
    place.measure(1, 0.5)
    place.measure(2, 0.7)
    for number in (0, 1):
        trials.stop_early(number)
        place.put_in(JobState.CANCELLED, trials.name(number))
    place.put_in(JobState.FAILED, trials.name(2))

    read = trials.read()

    assert [one.stopped_early for one in read] == [True, True, False]
    assert [one.ended_well for one in read] == [False, True, False]


def test_a_stop_whose_request_was_lost_is_made_good_by_the_next_attempt(place: Place) -> None:
    place.create()
    trials = place.trials()
    trials.make(0)
    place.store.put(f"{NAME}/stopped/000", b"{}")  # and then it died

    trials.stop_marked()
    assert place.trials().job(0).state is JobState.CANCELLING  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("state", "ended"), [(JobState.CANCELLED, True), (JobState.FAILED, True), (JobState.SUCCEEDED, False)]
)
def test_a_sweep_that_is_over_leaves_no_trial_at_work_unless_it_succeeded(
    place: Place, state: JobState, ended: bool
) -> None:
    place.create()
    place.trials().make(0)
    place.trials().make(1)
    place.put_in(JobState.SUSPENDED, "trainingJobs/s-001")
    place.put_in(state)
    kind = JobKind(name=SWEEP_KIND, entry="no.such:entry", ended=end_trials)

    Reconciler(ServiceSettings(listen="", store=place.store.settings), kind).reconcile()

    states = [place.trials().job(number).state for number in (0, 1)]  # type: ignore[union-attr]
    expected = (JobState.CANCELLING, JobState.CANCELLED) if ended else (JobState.PENDING, JobState.SUSPENDED)
    assert states == list(expected)
    assert place.jobs.live() == []


def test_a_trial_that_is_suspended_can_be_stopped_early(place: Place) -> None:
    place.create()
    trials = place.trials()
    trials.make(0)
    place.put_in(JobState.SUSPENDED, trials.name(0))

    trials.stop_early(0)

    assert [one.stopped_early for one in trials.read()] == [True, False]
    assert trials.is_over(0)


def test_a_trial_whose_name_another_job_has_now_is_over_and_the_other_is_let_be(place: Place) -> None:
    place.create()
    place.trials().make(0)
    replace_by_hand(place, "s-000")
    trials = place.trials()

    assert trials.is_over(0)
    assert trials.make(0).state is JobState.DELETED
    trials.cancel()
    trials.stop_early(0)
    assert trials.read()[0].job is None
    assert Jobs(place.store, TRAIN_KIND).get("trainingJobs/s-000", "").state is JobState.PENDING


@pytest.mark.parametrize(("state", "cancelled"), [(JobState.FAILED, 0), (JobState.CANCELLED, 2)])
def test_trials_that_were_never_made_are_cancelled_only_where_the_sweep_was(
    place: Place, state: JobState, cancelled: int
) -> None:
    place.create()
    place.put_in(state)
    counts = sweep_to_proto(place.sweeps.get(NAME)).counts
    assert (counts.total, counts.cancelled, counts.pending) == (2, cancelled, 0)


def test_lost_attempts_of_a_sweep_are_not_counted_by_the_bound_of_its_trials(place: Place) -> None:
    place.create(replace(SPEC, base=replace(BASE, max_failures=0)))
    assert place.jobs.get(NAME, NAME).max_failures == SWEEP_MAX_FAILURES
    assert place.trials().make(0).max_failures == 0


def test_so_many_values_are_tried_with_a_model_and_all_of_them_by_the_rules(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[TrainingSpec] = []
    check = TrainingJobs.checked

    def counting(self: TrainingJobs, spec: TrainingSpec) -> TrainingSpec:
        tried.append(spec)
        return spec if len(tried) > 1 else check(self, spec)

    monkeypatch.setattr(TrainingJobs, "checked", counting)
    names = Domain(kind=CHOICE, values=tuple(f"n{number}" for number in range(1000)))
    space = {"model.kwargs.a": names, "model.kwargs.b": names, "optimizer.name": names}
    ruled: list[TrainingSpec] = []
    monkeypatch.setattr(spec_rules, "check", ruled.append)
    # The first is checked as a whole; a model that takes such arguments is no matter here.
    monkeypatch.setattr(training_jobs, "check_model", lambda *_: None)

    place.create(replace(SPEC, parameters=space))

    assert len(tried) == MAX_CHECKED_WITH_MODEL
    for name in ("a", "b"):
        assert len({spec.model.kwargs[name] for spec in tried}) >= MAX_CHECKED_WITH_MODEL // 3
    # The rules look at plain fields, and never into what is passed on.
    assert {spec.optimizer.name for spec in ruled} == set(names.values)
    assert len(ruled) <= len(names.values) + 2


def test_more_workers_than_ever_fit_and_a_checkpoint_that_is_not_there_are_refused_by_the_bases_field(
    place: Place,
) -> None:
    training = TrainingJobs(place.store, cluster_max={"CPU": 1})
    small = Sweeps(place.store, training, place.deletions)
    cases: list[tuple[Sweeps, TrainingSpec, type[MillraceError], str]] = [
        (small, replace(BASE, num_workers=2), FailedPrecondition, "spec.base.num_workers"),
        (
            place.sweeps,
            replace(BASE, initial_checkpoint="trainingJobs/x/checkpoints/step-00000001"),
            NotFound,
            "spec.base.initial_checkpoint",
        ),
    ]
    for sweeps, base, kind, field in cases:
        with pytest.raises(kind) as refused:
            sweeps.create("s", replace(SPEC, base=base), "", "digest", validate_only=False)
        assert field in [one for one, _ in refused.value.fields]
        assert "spec.num_workers" not in refused.value.message
        assert place.jobs.find(NAME) is None


def over(place: Place) -> None:
    """The sweep SUCCEEDED, with a trial that did so and one that was stopped."""
    place.create()
    place.measure(0, 0.5)
    place.measure(1, 0.4)
    place.trials().stop_early(1)
    place.put_in(JobState.SUCCEEDED, "trainingJobs/s-000")
    place.put_in(JobState.CANCELLED, "trainingJobs/s-001")
    place.put_in(JobState.SUCCEEDED)


def test_a_deleted_sweep_is_gone_with_its_trials_and_all_that_they_made(place: Place) -> None:
    over(place)

    assert place.sweeps.delete(NAME, "").record.state is JobState.DELETING
    wait_until(lambda: place.jobs.find(NAME) is None, "the end of the sweep")

    left = [key for key in keys(place) if key.startswith(("sweeps/", "trainingJobs/")) and "/log/" not in key]
    assert left == []
    assert version_references(place.store, VERSION, 0.0) == []
    with pytest.raises(NotFound):
        place.sweeps.get(NAME)
    with pytest.raises(NotFound):
        place.sweeps.delete(NAME, "")
    again = place.create()
    assert again.trials is not None
    assert [one.job for one in again.trials] == [None, None]
    assert place.trials().make(0).state is JobState.PENDING


def test_a_sweep_of_whose_trials_a_checkpoint_is_used_stays_as_it_was(place: Place) -> None:
    over(place)
    checkpoint = "trainingJobs/s-000/checkpoints/step-00000001"
    with using(place.store, "checkpoint", checkpoint, "deployment", "u1", "deployments/m", ends_in="GONE"):
        pass

    with pytest.raises(FailedPrecondition, match="deployments/m") as refused:
        place.sweeps.delete(NAME, "")

    assert refused.value.specific_reason == "JOB_IN_USE"
    view = place.sweeps.get(NAME)
    assert view.record.state is JobState.SUCCEEDED
    assert view.trials is not None
    assert [one.job.state for one in view.trials if one.job] == [JobState.SUCCEEDED, JobState.CANCELLED]


@pytest.mark.parametrize("name", [NAME, "trainingJobs/s-001"])
def test_a_sweep_that_is_at_work_or_has_a_trial_that_is_stays_as_it_was(place: Place, name: str) -> None:
    over(place)
    place.put_in(JobState.RUNNING, name)
    with pytest.raises(FailedPrecondition, match=name) as refused:
        place.sweeps.delete(NAME, "")
    assert refused.value.specific_reason == "JOB_AT_WORK"
    assert place.sweeps.get(NAME).record.deleted_from is None


def test_a_deletion_that_was_left_half_way_is_finished(place: Place) -> None:
    over(place)
    place.deletions.begin(NAME)

    place.deletions.finish_all()

    assert place.jobs.find(NAME) is None
    assert place.sweeps.page(0, "") == ([], "")


def test_one_sweep_that_cannot_be_taken_away_leaves_the_others_be(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    over(place)
    place.deletions.begin(NAME)
    place.store.put("sweeps/a/log/000000000001.json", b"no json")

    place.deletions.finish_all()

    assert place.jobs.find(NAME) is None
    assert "sweeps/a cannot be taken away" in caplog.text


def test_requests_keep_to_the_etag(place: Place) -> None:
    over(place)
    for request in (place.sweeps.delete, place.sweeps.cancel):
        with pytest.raises(Conflict):
            request(NAME, "9")
    assert place.sweeps.cancel(NAME, "").record.state is JobState.SUCCEEDED
