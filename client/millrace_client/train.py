"""The train service: training jobs, their events, checkpoints, metrics and logs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from millrace.train.v1 import resources_pb2, train_service_pb2_grpc
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.calls import Caller, new_request_id
from millrace_client.errors import Unavailable
from millrace_client.paging import every_page

Update = resources_pb2.TrainingJob | pb.TrainingEvent

RECONNECT_PAUSE_S = 0.5
FINAL = frozenset(
    {
        resources_pb2.TrainingJob.STATE_SUCCEEDED,
        resources_pb2.TrainingJob.STATE_FAILED,
        resources_pb2.TrainingJob.STATE_CANCELLED,
        resources_pb2.TrainingJob.STATE_SUSPENDED,
        resources_pb2.TrainingJob.STATE_DELETING,
    }
)
# The most that one answer holds.
POINTS_AT_ONCE = 10_000


class TrainClient:
    """Names: `trainingJobs/{j}` and `trainingJobs/{j}/checkpoints/{c}`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = train_service_pb2_grpc.TrainServiceStub(caller.channel)

    def create_training_job(
        self, training_job_id: str, spec: resources_pb2.TrainingSpec, *, validate_only: bool = False
    ) -> resources_pb2.TrainingJob:
        """Starts a run; see `millrace_client.specs.training_spec`. `validate_only` checks and starts nothing."""
        request = pb.CreateTrainingJobRequest(
            training_job_id=training_job_id,
            spec=spec,
            request_id=new_request_id(),
            validate_only=validate_only,
        )
        return self._caller.unary(self._stub.CreateTrainingJob, request, resources_pb2.TrainingJob)

    def get_training_job(self, name: str) -> resources_pb2.TrainingJob:
        request = pb.GetTrainingJobRequest(name=name)
        return self._caller.unary(self._stub.GetTrainingJob, request, resources_pb2.TrainingJob)

    def list_training_jobs(self) -> Iterator[resources_pb2.TrainingJob]:
        """All of them, in the order of their names."""
        request = pb.ListTrainingJobsRequest()
        return every_page(self._caller, self._stub.ListTrainingJobs, request, "training_jobs")

    def cancel_training_job(self, name: str) -> resources_pb2.TrainingJob:
        """Asks it to stop at its next step; on a job in a final state it changes nothing."""
        request = pb.CancelTrainingJobRequest(name=name)
        return self._caller.unary(self._stub.CancelTrainingJob, request, resources_pb2.TrainingJob)

    def suspend_training_job(self, name: str, *, etag: str = "") -> resources_pb2.TrainingJob:
        """Asks it to take a checkpoint and to free its workers."""
        request = pb.SuspendTrainingJobRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.SuspendTrainingJob, request, resources_pb2.TrainingJob)

    def resume_training_job(self, name: str, *, etag: str = "") -> resources_pb2.TrainingJob:
        """Goes on with a suspended, failed or cancelled one from its newest good checkpoint."""
        request = pb.ResumeTrainingJobRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.ResumeTrainingJob, request, resources_pb2.TrainingJob)

    def delete_training_job(self, name: str, *, etag: str = "") -> resources_pb2.TrainingJob:
        """Takes one that is over, or suspended, away with its checkpoints, events, metrics and logs."""
        request = pb.DeleteTrainingJobRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.DeleteTrainingJob, request, resources_pb2.TrainingJob)

    def get_coverage(self, name: str, epoch: int, *, checkpoint: str = "") -> pb.Coverage:
        """How often each row was consumed in `epoch` (from 0), up to `checkpoint` or the newest."""
        request = pb.GetCoverageRequest(name=name, epoch=epoch, checkpoint=checkpoint)
        return self._caller.unary(self._stub.GetCoverage, request, pb.Coverage)

    def list_metrics(self, name: str, *, after_step: int = 0) -> Iterator[pb.MetricPoint]:
        """The metrics of each step behind `after_step`, in their order."""
        request = pb.ListMetricsRequest(name=name, after_step=after_step, page_size=POINTS_AT_ONCE)
        return every_page(self._caller, self._stub.ListMetrics, request, "points")

    def stream_logs(
        self,
        name: str,
        *,
        attempt: int = 0,
        rank: int | None = None,
        follow: bool = False,
        reconnect_for_s: float = 120.0,
    ) -> Iterator[pb.StreamLogsResponse]:
        """What an attempt (0: the newest) logged, on all ranks or on one; -1 is the attempt's own process.

        With `follow` it goes on until the attempt is over. A broken stream is taken up where it ended; after
        `reconnect_for_s` seconds without an answer it raises `Unavailable`.
        """
        seen: dict[int, int] = {}
        last_heard = time.monotonic()
        while True:
            request = pb.StreamLogsRequest(name=name, attempt=attempt, rank=rank, follow=follow)
            skip = dict(seen)  # characters of each rank; a log only ever grows
            try:
                for response in self._caller.stream(self._stub.StreamLogs, request):
                    last_heard = time.monotonic()
                    attempt = response.attempt
                    known = min(skip.get(response.rank, 0), len(response.text))
                    skip[response.rank] = skip.get(response.rank, 0) - known
                    response.text = response.text[known:]
                    seen[response.rank] = seen.get(response.rank, 0) + len(response.text)
                    if response.text:
                        yield response
                return
            except Unavailable:
                if time.monotonic() - last_heard > reconnect_for_s:
                    raise
            time.sleep(RECONNECT_PAUSE_S)

    def list_checkpoints(self, training_job: str) -> Iterator[resources_pb2.Checkpoint]:
        """Committed ones, oldest first."""
        request = pb.ListCheckpointsRequest(parent=training_job)
        return every_page(self._caller, self._stub.ListCheckpoints, request, "checkpoints")

    def watch_training_job(
        self, name: str, *, after_sequence: int = 0, reconnect_for_s: float = 120.0
    ) -> Iterator[Update]:
        """The job as it is, then every event after `after_sequence` and the job again at each transition.

        Ends when the job is final, suspended or deleted. A broken stream is taken up again after the last event seen,
        so that none is missed and none comes twice; after `reconnect_for_s` seconds without an answer it raises
        `Unavailable`.
        """
        last_heard = time.monotonic()
        while True:
            request = pb.WatchTrainingJobRequest(name=name, after_sequence=after_sequence)
            ended = False
            try:
                for response in self._caller.stream(self._stub.WatchTrainingJob, request):
                    last_heard = time.monotonic()
                    if response.HasField("event"):
                        after_sequence = response.event.sequence
                        yield response.event
                    else:
                        ended = response.job.state in FINAL
                        yield response.job
                        if response.job.state == resources_pb2.TrainingJob.STATE_SUSPENDED:
                            return  # the server goes on watching until it is resumed
            except Unavailable:
                if time.monotonic() - last_heard > reconnect_for_s:
                    raise
            else:
                # A server that is shutting down may end the stream in good order before the job is final.
                if ended:
                    return
            time.sleep(RECONNECT_PAUSE_S)

    def list_events(self, name: str, *, idle_s: float = 1.0) -> list[pb.TrainingEvent]:
        """What has happened so far; of a job at work, until nothing new was heard for `idle_s`, or all was old news."""
        request = pb.WatchTrainingJobRequest(name=name)
        began = time.time()
        events: list[pb.TrainingEvent] = []
        with contextlib.closing(self._caller.stream(self._stub.WatchTrainingJob, request, idle_s=idle_s)) as updates:
            for update in updates:
                if update.HasField("event"):
                    events.append(update.event)
                    if update.event.time.seconds > began:
                        break
        return events

    def wait_training_job(self, name: str, *, reconnect_for_s: float = 120.0) -> resources_pb2.TrainingJob:
        """Waits until the job is final, and returns it, whichever its final state is."""
        for _ in self.watch_training_job(name, reconnect_for_s=reconnect_for_s):
            pass
        return self.get_training_job(name)
