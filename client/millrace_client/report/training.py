"""What there is to tell of a run: read through the API, put in order for a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.json_format import MessageToDict

from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.errors import FailedPrecondition
from millrace_client.report.curves import Curve, curve
from millrace_client.report.wording import cause_text
from millrace_client.train import TrainClient

# These come first; others after them by their names.
FIRST = ("loss", "validation_loss", "accuracy", "validation_accuracy")


@dataclass(frozen=True)
class Attempt:
    """One attempt: where it began, how it ended. Times are seconds since the run was created; None: not known."""

    number: int
    begun_s: float | None
    ended_s: float | None
    workers: int
    first_step: int
    last_step: int
    checkpoint: str
    cause: str
    text: str


@dataclass(frozen=True)
class Run:
    job: resources_pb2.TrainingJob
    curves: Sequence[Curve]
    attempts: Sequence[Attempt]
    warnings: Sequence[str]
    coverage: Sequence[pb.Coverage]
    checkpoints: Sequence[resources_pb2.Checkpoint]
    spec_text: str
    points: int

    @property
    def state(self) -> str:
        name = resources_pb2.TrainingJob.State.Name(self.job.state)
        return name.removeprefix("STATE_").lower()

    @property
    def wall_s(self) -> float:
        return max([0.0, *(one.ended_s or 0.0 for one in self.attempts)])


def collect(train: TrainClient, name: str, epochs: Sequence[int]) -> Run:
    """`epochs` are those whose coverage is asked for."""
    job = train.get_training_job(name)
    events = train.list_events(name)
    points = list(train.list_metrics(name))
    return Run(
        job=job,
        curves=curves_of(points, events),
        attempts=attempts_of(job, events),
        warnings=[event.warning for event in events if event.WhichOneof("event") == "warning"],
        coverage=_coverage(train, name, epochs),
        checkpoints=list(train.list_checkpoints(name)),
        spec_text=json.dumps(MessageToDict(job.spec, preserving_proto_field_name=True), indent=2),
        points=len(points),
    )


def _coverage(train: TrainClient, name: str, epochs: Sequence[int]) -> list[pb.Coverage]:
    """None where the service does not know any more which rows there were; the rest is worth a page."""
    try:
        return [train.get_coverage(name, epoch) for epoch in epochs]
    except FailedPrecondition:
        return []


def curves_of(points: Sequence[pb.MetricPoint], events: Sequence[pb.TrainingEvent]) -> list[Curve]:
    """One for each metric of the steps; from the events where there are no points."""
    values: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for name, value in point.values.items():
            values.setdefault(name, []).append((point.step, value))
    if not points:
        for event in events:
            if event.WhichOneof("event") == "progress":
                values.setdefault("loss", []).append((event.progress.step, event.progress.loss))
            elif event.WhichOneof("event") == "validated":
                values.setdefault("validation_loss", []).append((event.validated.step, event.validated.loss))
    order = sorted(values, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    found = (curve(name, sorted(values[name])) for name in order)
    return [one for one in found if one is not None]


def attempts_of(job: resources_pb2.TrainingJob, events: Sequence[pb.TrainingEvent]) -> list[Attempt]:
    created = job.create_time.ToNanoseconds() / 1e9
    by_number: dict[int, list[pb.TrainingEvent]] = {}
    for event in events:
        by_number.setdefault(event.attempt, []).append(event)
    found = []
    for number, mine in sorted(by_number.items()):
        times = [event.time.ToNanoseconds() / 1e9 - created for event in mine]
        started = next((one for one in mine if one.HasField("attempt_started")), None)
        ended = next((one for one in mine if one.HasField("attempt_ended")), None)
        begin = started.attempt_started if started else pb.AttemptStarted()
        steps = [one.progress.step for one in mine if one.HasField("progress")]
        found.append(
            Attempt(
                number=number,
                begun_s=started.time.ToNanoseconds() / 1e9 - created if started else None,
                ended_s=times[-1],
                workers=begin.num_workers,
                first_step=begin.step,
                last_step=max([begin.step, *steps]),
                checkpoint=begin.checkpoint.rpartition("/")[2],
                cause=cause_text(ended.attempt_ended.cause) if ended else "",
                text=ended.attempt_ended.text if ended else "",
            )
        )
    return found
