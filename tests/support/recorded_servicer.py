"""A train service that answers with one finished run of two attempts; what is shown and exported of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from millrace.train.v1 import resources_pb2, train_service_pb2_grpc
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.grpc_answers import abort, status

Job = resources_pb2.TrainingJob
NAME = "trainingJobs/j"
STEPS = 30
NASTY = "<script>alert(1)</script>[bold]"
CREATED = 1_700_000_000


def at(seconds: float) -> Timestamp:
    return Timestamp(seconds=CREATED + int(seconds))


def job(state: Job.State = Job.STATE_SUCCEEDED) -> Job:
    made = Job(
        name=NAME,
        uid="0123abcd",
        state=state,
        attempt=2,
        create_time=at(0),
        update_time=at(90),
        failures=1,
        best_checkpoint=f"{NAME}/checkpoints/step-00000030",
        progress=resources_pb2.Progress(
            step=STEPS, total_steps=STEPS, epoch=2, rows_per_second=1234, data_wait_share=0.25
        ),
    )
    made.spec.dataset_version = "datasets/d/versions/v"
    made.spec.epochs = 3
    made.spec.optimizer.learning_rate = 0.002
    made.spec.model.kwargs["note"] = NASTY
    made.spec.transform.steps.add(column="image").to_float.SetInParent()
    return made


def points() -> list[pb.MetricPoint]:
    found = []
    for step in range(1, STEPS + 1):
        values = {"loss": 1 / step, "learning_rate": 0.002}
        if step % 10 == 0:
            values["validation_accuracy"] = step / 40
        attempt = 1 if step <= 10 else 2
        found.append(pb.MetricPoint(step=step, epoch=(step - 1) // 10, attempt=attempt, time=at(step), values=values))
    return found


def events() -> list[pb.TrainingEvent]:
    return [
        pb.TrainingEvent(attempt=1, time=at(1), attempt_started=pb.AttemptStarted(num_workers=3)),
        pb.TrainingEvent(attempt=1, time=at(9), progress=resources_pb2.Progress(step=14, total_steps=STEPS, loss=0.5)),
        pb.TrainingEvent(
            attempt=1,
            time=at(20),
            attempt_ended=pb.AttemptEnded(cause=pb.AttemptEnded.CAUSE_HUNG, text=f"rank 2 {NASTY}", ranks=[2]),
        ),
        pb.TrainingEvent(
            attempt=2,
            time=at(30),
            attempt_started=pb.AttemptStarted(num_workers=2, step=10, checkpoint=f"{NAME}/checkpoints/step-00000010"),
        ),
        pb.TrainingEvent(attempt=2, time=at(31), warning=f"something was mended {NASTY}"),
        pb.TrainingEvent(
            attempt=2,
            time=at(60),
            progress=resources_pb2.Progress(
                step=STEPS, total_steps=STEPS, epoch=2, loss=0.25, data_wait_share=0.25, checkpoint_stall_share=0.05
            ),
        ),
    ]


class RecordedRun(train_service_pb2_grpc.TrainServiceServicer):
    """`repeated`: rows consumed twice in epoch 1. `breaks`: the logs' stream is cut so often."""

    def __init__(self, *, state: Job.State = Job.STATE_SUCCEEDED, repeated: int = 0, breaks: int = 0) -> None:
        self._state = state
        self._repeated = repeated
        self._breaks = breaks
        self.wishes: list[Any] = []

    def GetTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Job:
        return job(self._state)

    def WatchTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield pb.WatchTrainingJobResponse(job=job(Job.STATE_RUNNING))
        for sequence, event in enumerate(events(), 1):
            event.sequence = sequence
            if sequence > request.after_sequence:
                yield pb.WatchTrainingJobResponse(event=event)
        if self._state == Job.STATE_RUNNING:
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait(60)
            return
        yield pb.WatchTrainingJobResponse(job=job(self._state))

    def ListCheckpoints(self, request: Any, context: grpc.ServicerContext) -> pb.ListCheckpointsResponse:
        found = [
            resources_pb2.Checkpoint(
                name=f"{NAME}/checkpoints/step-{step:08d}",
                step=step,
                epoch=step // 10,
                metrics={"validation_accuracy": step / 40},
                size_bytes=10**6,
            )
            for step in (10, 20, 30)
        ]
        return pb.ListCheckpointsResponse(checkpoints=found)

    def ListMetrics(self, request: Any, context: grpc.ServicerContext) -> pb.ListMetricsResponse:
        after = max(request.after_step, int(request.page_token or 0))
        found = [point for point in points() if point.step > after]
        token = str(found[11].step) if len(found) > 12 else ""
        return pb.ListMetricsResponse(points=found[:12], next_page_token=token)

    def GetCoverage(self, request: Any, context: grpc.ServicerContext) -> pb.Coverage:
        if request.epoch > 2:
            abort(context, status(grpc.StatusCode.OUT_OF_RANGE, "no such epoch"))
        repeated = self._repeated if request.epoch == 1 else 0
        return pb.Coverage(
            training_job=request.name,
            epoch=request.epoch,
            checkpoint=request.checkpoint or f"{NAME}/checkpoints/step-00000030",
            row_count=1000,
            seen_once=1000 - repeated,
            repeated=repeated,
            repeated_row_ids=range(repeated),
            epoch_done=True,
        )

    def StreamLogs(self, request: Any, context: grpc.ServicerContext) -> Iterator[pb.StreamLogsResponse]:
        lines = [(0, "one\n"), (1, f"{NASTY}\x1b[31m\n"), (0, "two\nthree\n"), (-1, "own\n")]
        for number, (rank, text) in enumerate(lines):
            if not request.HasField("rank") or request.rank == rank:
                yield pb.StreamLogsResponse(attempt=request.attempt or 2, rank=rank, text=text)
            if number == 1 and self._breaks:
                self._breaks -= 1
                abort(context, status(grpc.StatusCode.UNAVAILABLE, "going away"))

    def SuspendTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Job:
        self.wishes.append(request)
        return job(Job.STATE_SUSPENDING)

    def ResumeTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Job:
        self.wishes.append(request)
        return job(Job.STATE_RECOVERING)

    def DeleteTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Job:
        self.wishes.append(request)
        return job(Job.STATE_DELETING)
