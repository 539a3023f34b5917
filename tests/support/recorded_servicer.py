"""A train service that answers with one finished run of two attempts; what is shown and exported of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from millrace.train.v1 import resources_pb2, train_service_pb2_grpc
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.grpc_answers import abort, error_info, status

Job = resources_pb2.TrainingJob
Spec = resources_pb2.TrainingSpec
NAME = "trainingJobs/j"
STEPS = 30
NASTY = "<script>alert(1)</script>[bold]"
CREATED = 1_700_000_000
REGRESSION = Spec.TASK_REGRESSION
# What a run of `REGRESSION` measures besides its loss.
MEASURED = {"mae": 1.25, "r2": -0.5}


def at(seconds: float) -> Timestamp:
    return Timestamp(seconds=CREATED + int(seconds))


def job(state: Job.State = Job.STATE_SUCCEEDED, task: Spec.Task = Spec.TASK_UNSPECIFIED) -> Job:
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
    made.spec.task = task
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


def events(task: Spec.Task = Spec.TASK_UNSPECIFIED) -> list[pb.TrainingEvent]:
    reported = [
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
    if task == REGRESSION:
        reported[-1].progress.metrics.update(MEASURED)
        validated = pb.Validated(step=STEPS, epoch=2, loss=0.75, row_count=100, metrics=MEASURED)
        reported.append(pb.TrainingEvent(attempt=2, time=at(61), validated=validated))
    return reported


class RecordedRun(train_service_pb2_grpc.TrainServiceServicer):
    """`repeated`: rows consumed twice in epoch 1; None: which rows there were is not known. `breaks`: the logs' stream
    is cut so often. `pause_s`: before the events, as on a slow store."""

    def __init__(
        self,
        *,
        state: Job.State = Job.STATE_SUCCEEDED,
        task: Spec.Task = Spec.TASK_UNSPECIFIED,
        repeated: int | None = 0,
        breaks: int = 0,
        pause_s: float = 0.0,
    ) -> None:
        self._state = state
        self._task = task
        self._repeated = repeated
        self._breaks = breaks
        self._pause_s = pause_s
        self.requests: list[Any] = []

    def GetTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Job:
        return job(self._state, self._task)

    def ListTrainingJobs(self, request: Any, context: grpc.ServicerContext) -> pb.ListTrainingJobsResponse:
        return pb.ListTrainingJobsResponse(training_jobs=[job(self._state, self._task)])

    def WatchTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        now, reported = pb.WatchTrainingJobResponse(job=job(self._state, self._task)), events(self._task)
        if request.after_sequence > len(reported):
            beyond = error_info("SEQUENCE_OUT_OF_RANGE", last_sequence=str(len(reported)))
            abort(context, status(grpc.StatusCode.OUT_OF_RANGE, "beyond the last event", beyond))
        ended = threading.Event()
        context.add_callback(ended.set)
        yield now
        ended.wait(self._pause_s)
        for sequence, event in enumerate(reported, 1):
            event.sequence = sequence
            if sequence > request.after_sequence:
                yield pb.WatchTrainingJobResponse(event=event)
        if self._state == Job.STATE_SUSPENDED:
            yield now
        if self._state in (Job.STATE_RUNNING, Job.STATE_SUSPENDED):
            ended.wait(60)  # more may come

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
        if self._repeated is None:
            abort(context, status(grpc.StatusCode.FAILED_PRECONDITION, "the version is gone"))
        repeated = (self._repeated or 0) if request.epoch == 1 else 0
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
        self.requests.append(request)
        return job(Job.STATE_SUSPENDING)

    def ResumeTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Job:
        self.requests.append(request)
        return job(Job.STATE_RECOVERING)

    def DeleteTrainingJob(self, request: Any, context: grpc.ServicerContext) -> Job:
        self.requests.append(request)
        return job(Job.STATE_DELETING)


class ProgramRun(RecordedRun):
    """A program that stopped early: it left epoch 1, and began no other; its reports name no epoch."""

    def GetCoverage(self, request: Any, context: grpc.ServicerContext) -> pb.Coverage:
        found = super().GetCoverage(request, context)
        found.epoch_done = request.epoch == 0
        found.seen_once = (1000, 300, 0)[request.epoch]
        found.missing = 1000 - found.seen_once
        return found

    def ListMetrics(self, request: Any, context: grpc.ServicerContext) -> pb.ListMetricsResponse:
        return pb.ListMetricsResponse(points=[pb.MetricPoint(step=5, epoch=-1, attempt=1, values={"loss": 0.5})])

    def ListTrainingJobs(self, request: Any, context: grpc.ServicerContext) -> pb.ListTrainingJobsResponse:
        answer = super().ListTrainingJobs(request, context)
        for job in answer.training_jobs:
            job.progress.step, job.progress.total_steps = 17, 0
        return answer
