"""Between the contract and the service's own values: nothing is lost on the way, and defaults are filled in."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from millrace.common.v1 import transform_pb2
from millrace.train.v1 import code_bundle_pb2
from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from shared.checkpoint import CheckpointEntry
from shared.errors import InvalidArgument, Unavailable
from shared.jobs import JobRecord, JobState
from shared.storage import ObjectStore
from train_service.convert import (
    checkpoint_to_proto,
    event_to_proto,
    job_to_proto,
)
from train_service.convert_specs import spec_from_proto, spec_to_proto
from train_service.domain.spec import TrainingSpec
from train_service.domain.spec_rules import check
from train_service.jobs.training_jobs import JobView
from train_service.records.event_log import Event, EventKind, EventLog


def whole_spec() -> res.TrainingSpec:
    """Every field set, none to its default."""
    spec = res.TrainingSpec(
        dataset_version="datasets/d/versions/v",
        train_split="a",
        validation_split="b",
        input_column="pixels",
        label_column="class",
        model=res.Model(builder="torchvision.resnet18", in_channels=3, num_classes=7),
        optimizer=res.Optimizer(
            name="SGD", learning_rate=0.1, schedule=res.Optimizer.Schedule.SCHEDULE_COSINE_WITH_WARMUP
        ),
        epochs=3,
        global_batch_size=96,
        seed=2**64 - 1,
        num_workers=3,
        threads_per_worker=2,
        checkpoint_every_steps=11,
        max_failures=0,
        lanes=48,
        task=res.TrainingSpec.TASK_REGRESSION,
        min_workers=2,
        checkpoints=res.CheckpointPolicy(
            every=Duration(seconds=90, nanos=500_000_000),
            keep_newest=4,
            keep_best=2,
            best_metric="validation_r2",
            order=res.CheckpointPolicy.ORDER_MAXIMIZE,
        ),
        max_preemptions=0,
        priority=-7,
        initial_checkpoint="trainingJobs/j/checkpoints/step-00000001",
        loss=res.Loss(name="huber"),
        precision=res.TrainingSpec.PRECISION_BFLOAT16,
        target_scaling=res.TrainingSpec.TARGET_SCALING_STANDARD,
        accumulation_steps=2,
        max_gradient_norm=1.5,
        compile=True,
        acceleration=res.Acceleration(
            channels_last=True,
            prefetch_batches=0,
            algorithms=res.Acceleration.ALGORITHMS_FASTEST,
            transform_device=res.Acceleration.TRANSFORM_DEVICE_WORKER,
        ),
        early_stopping=res.EarlyStopping(metric="validation_loss", patience=3, min_delta=0.01),
        metrics=["mae", "r2"],
        placement=res.Placement(
            cpus_per_worker=2,
            gpus_per_worker=0,
            resources_per_worker={"disk": 1},
            accelerator_type="A100",
            strategy="SPREAD",
            parallel="FSDP",
            backend="gloo",
            timeout=Duration(seconds=60),
        ),
        ingest=res.TrainingSpec.INGEST_RAY_DATA,
        training_step="mixup",
        allow_non_finite=True,
    )
    spec.transform.steps.add(column="pixels").to_float.SetInParent()
    spec.transform.steps.add(column="pixels").normalize.MergeFrom(
        transform_pb2.Normalize(mean=[0.1307, 1e-7], std=[0.3081, 3.0])
    )
    spec.model.kwargs.update({"zero_init_residual": True, "width_per_group": 64})
    spec.loss.kwargs.update({"delta": 0.5})
    spec.optimizer.kwargs.update({"momentum": 0.9, "nesterov": True})
    return spec


def record(**changes: object) -> JobRecord:
    spec = {"training": spec_from_proto(whole_spec(), ()).as_config()}
    fields = {"uid": "u", "name": "trainingJobs/a", "spec": spec, "create_time": 1.5, "update_time": 2.25}
    return JobRecord(**{**fields, **changes})  # type: ignore[arg-type]


def entry(step: int, **metrics: float) -> CheckpointEntry:
    return CheckpointEntry(
        name=f"trainingJobs/a/checkpoints/step-{step:08d}",
        folder="f",
        manifest_sha256="00ff",
        step=step,
        epoch=1,
        attempt=2,
        size_bytes=2**40,
        create_time=3.5,
        metrics=metrics,
    )


def test_a_specification_comes_back_as_it_went() -> None:
    spec = whole_spec()

    assert spec_to_proto(spec_from_proto(spec, ())) == spec
    logged = TrainingSpec.from_config(spec_from_proto(spec, ()).as_config())
    assert spec_to_proto(logged) == spec


def test_defaults_are_those_that_the_contract_names() -> None:
    spec = spec_from_proto(res.TrainingSpec(model=res.Model(builder="b")), ())

    assert (spec.train_split, spec.validation_split, spec.input_column, spec.label_column) == (
        "train",
        "",
        "image",
        "label",
    )
    assert (spec.num_workers, spec.threads_per_worker, spec.max_failures, spec.lanes) == (1, 1, 3, 24)
    assert (spec.optimizer.name, spec.optimizer.learning_rate, spec.optimizer.schedule) == ("AdamW", 0.001, "CONSTANT")


@pytest.mark.parametrize(
    ("workers", "lanes"), [(0, 24), (4, 24), (5, 25), (12, 24), (16, 32), (24, 48), (25, 50), (64, 128)]
)
def test_lanes_that_are_not_given_are_even_among_the_most_workers(workers: int, lanes: int) -> None:
    model = res.Model(builder="b", in_channels=1, num_classes=2)
    asked = res.TrainingSpec(model=model, num_workers=workers, epochs=1, global_batch_size=640)

    spec = spec_from_proto(asked, ())

    assert spec.lanes == lanes
    check(spec)


def test_too_many_workers_are_refused_by_their_field_alone() -> None:
    model = res.Model(builder="b", in_channels=1, num_classes=2)
    asked = res.TrainingSpec(model=model, num_workers=5_000, epochs=1, global_batch_size=64)

    with pytest.raises(InvalidArgument) as refused:
        check(spec_from_proto(asked, ()))

    assert [path for path, _ in refused.value.fields] == ["spec.num_workers"]


def test_no_workers_are_local_mode_and_not_the_default() -> None:
    spec = spec_from_proto(res.TrainingSpec(model=res.Model(builder="b"), num_workers=0), ())

    assert spec.local
    reported = spec_to_proto(spec)
    assert reported.HasField("num_workers")
    assert reported.num_workers == 0


@pytest.mark.parametrize(("path", "field"), [("checkpoints", "every"), ("placement", "timeout")])
def test_a_duration_that_no_calendar_holds_is_refused_by_its_field(path: str, field: str) -> None:
    proto = whole_spec()
    getattr(getattr(proto, path), field).seconds = 315_576_000_000

    with pytest.raises(InvalidArgument) as refused:
        check(spec_from_proto(proto, ()))

    assert f"spec.{path}.{field}" in [name for name, _ in refused.value.fields]


def test_no_failures_allowed_is_not_the_default() -> None:
    assert spec_from_proto(res.TrainingSpec(model=res.Model(), max_failures=0), ()).max_failures == 0


def test_whole_numbers_in_a_struct_become_ints_and_fractions_stay() -> None:
    kwargs = Struct()
    kwargs.update({"a": 2, "b": 0.5, "c": [1, 2.5, "3", None, True], "d": {"e": -4.0}})

    plain = spec_from_proto(res.TrainingSpec(model=res.Model(kwargs=kwargs)), ()).model.kwargs

    assert plain == {"a": 2, "b": 0.5, "c": [1, 2.5, "3", None, True], "d": {"e": -4}}
    assert (type(plain["a"]), type(plain["b"]), type(plain["d"]["e"]), plain["c"][4]) == (int, float, int, True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", ["model", "optimizer"])
def test_a_number_that_json_does_not_know_is_refused_by_its_field(path: str, value: float) -> None:
    spec = whole_spec()
    getattr(spec, path).kwargs.update({"x": [value]})

    with pytest.raises(InvalidArgument) as refused:
        spec_from_proto(spec, ())

    assert [field for field, _ in refused.value.fields] == [f"spec.{path}.kwargs"]


def test_a_specification_without_a_model_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        spec_from_proto(res.TrainingSpec(), ())

    assert [field for field, _ in refused.value.fields] == ["spec.model"]


# A training job cannot be deleted yet.
REACHED = [state for state in JobState if state not in (JobState.DELETING, JobState.DELETED)]


@pytest.mark.parametrize("state", REACHED)
def test_every_state_has_a_name_in_the_contract(state: JobState) -> None:
    job = job_to_proto(JobView(record(state=state, attempt=2, generation=5), {}))

    assert res.TrainingJob.State.Name(job.state) == f"STATE_{state}"
    assert (job.name, job.uid, job.attempt, job.etag) == ("trainingJobs/a", "u", 2, "5")
    assert (job.create_time.ToNanoseconds(), job.update_time.ToNanoseconds()) == (1_500_000_000, 2_250_000_000)
    assert not job.HasField("progress")
    assert not job.HasField("error")


def test_a_job_reports_its_newest_and_its_best_checkpoint() -> None:
    entries = [entry(10, validation_r2=0.9), entry(20, validation_r2=0.7, validation_accuracy=1.0), entry(25)]

    job = job_to_proto(JobView(record(), {"step": 25, "loss": 0.5}, newest=entries[2], best=entries[0]))

    assert job.latest_checkpoint == entries[2].name
    assert job.best_checkpoint == entries[0].name
    assert (job.progress.step, job.progress.loss) == (25, 0.5)


def test_a_job_reports_what_it_lost_and_what_it_waits_for() -> None:
    job = job_to_proto(JobView(record(failures=2, preemptions=3), {}, waiting_for="2 workers of 1 CPU"))

    assert (job.failures, job.preemptions, job.waiting_for) == (2, 3, "2 workers of 1 CPU")


def test_why_a_job_failed_is_reported_only_once_it_has() -> None:
    error = Unavailable("gone", reason="WORKERS_LOST", metadata={"ranks": "1"}).as_record()

    assert not job_to_proto(JobView(record(state=JobState.RECOVERING, error=error), {})).HasField("error")
    failed = job_to_proto(JobView(record(state=JobState.FAILED, error=error), {})).error
    assert failed.message == "gone"
    assert failed.details


def test_a_checkpoint_is_reported_whole() -> None:
    reported = checkpoint_to_proto(entry(10, validation_loss=0.25))

    assert (reported.step, reported.epoch, reported.attempt, reported.size_bytes) == (10, 1, 2, 2**40)
    assert (reported.manifest_sha256, dict(reported.metrics)) == ("00ff", {"validation_loss": 0.25})
    assert reported.create_time.ToNanoseconds() == 3_500_000_000


PAYLOADS: dict[EventKind, dict[str, Any]] = {
    EventKind.ATTEMPT_STARTED: {"num_workers": 2, "step": 5, "checkpoint": "c"},
    EventKind.PROGRESS: {
        "step": 1,
        "total_steps": 2,
        "epoch": 0,
        "loss": 0.5,
        "accuracy": 1.0,
        "rows_per_second": 9.0,
        "seconds_left": 3.0,
    },
    EventKind.VALIDATED: {"step": 1, "epoch": 0, "loss": 0.5, "accuracy": 0.25, "row_count": 8},
    EventKind.ATTEMPT_ENDED: {"cause": "CAUSE_HUNG", "text": "rank 1 stood still", "ranks": [1]},
    EventKind.CHECKPOINT_COMMITTED: entry(3).__dict__,
    EventKind.WARNING: {"text": "mended"},
    EventKind.DEVICE_CHANGED: {"before": "DEVICE_GPU", "device": "DEVICE_CPU", "text": "no GPUs"},
}


@pytest.mark.parametrize("kind", list(EventKind))
def test_every_kind_of_event_has_its_field_in_the_contract(kind: EventKind) -> None:
    reported = event_to_proto(Event(sequence=4, time=1.0, attempt=2, kind=kind, payload=PAYLOADS[kind]))

    assert reported.WhichOneof("event") == kind
    assert (reported.sequence, reported.attempt, reported.time.seconds) == (4, 2, 1)
    assert {field.name for field in pb.TrainingEvent.DESCRIPTOR.oneofs_by_name["event"].fields} == set(EventKind)


@pytest.mark.parametrize("kind", list(EventKind))
def test_unknown_fields_of_an_event_of_a_later_release_are_ignored(kind: EventKind) -> None:
    event = Event(sequence=4, time=1.0, attempt=2, kind=kind, payload=PAYLOADS[kind])

    later = replace(event, payload={**PAYLOADS[kind], "colour": "red"})

    assert event_to_proto(later) == event_to_proto(event)


def test_an_event_of_a_kind_that_only_a_later_release_knows_keeps_its_place(store: ObjectStore) -> None:
    log = EventLog(store, "trainingJobs/a")
    for text in ("one", "two", "three"):
        log.append(1, EventKind.WARNING, {"text": text})
    key = sorted(info.key for info in store.list("trainingJobs/a/events/log"))[1]
    record = json.loads(store.get(key))
    record["state"]["kind"] = "colour_changed"
    store.put(key, json.dumps(record).encode())

    reported = [event_to_proto(event) for event in EventLog(store, "trainingJobs/a").after(0)]

    assert [one.sequence for one in reported] == [1, 2, 3]
    assert "only a later release knows: colour_changed" in reported[1].warning


def test_a_custom_step_is_refused_unless_the_operator_allows_its_function() -> None:
    spec = res.TrainingSpec(model=res.Model(builder="b"))
    spec.transform.steps.add().custom.MergeFrom(transform_pb2.Custom(function="os:system", columns=["image"]))

    with pytest.raises(InvalidArgument, match=r"^spec.transform.steps\[0\].custom.function: 'os:system'"):
        spec_from_proto(spec, {"a.b:f"})

    assert spec_from_proto(spec, {"os:system"}).transform["steps"][0]["custom"]["function"] == "os:system"


@pytest.mark.parametrize(
    ("given", "entry"),
    [
        ("train.py:loop", "train:loop"),
        ("jobs/train.py:loop", "jobs.train:loop"),
        ("train:loop", "train:loop"),
        ("jobs/cells.py", "jobs/cells.py"),
    ],
)
def test_a_function_may_be_named_by_its_file(given: str, entry: str) -> None:
    program = code_bundle_pb2.Program(code_bundle="codeBundles/x", entry=given)
    spec = spec_from_proto(res.TrainingSpec(program=program), ())
    assert spec.program is not None
    assert spec.program.entry == entry
    model = res.Model(code_bundle="codeBundles/x", entry=given)
    assert spec_from_proto(res.TrainingSpec(model=model), ()).model.entry == entry
