"""The train service: training jobs, their events, checkpoints, metrics and logs; sweeps; suggested specifications;
code.

A specification comes from nothing but a version: asked for, prepared where steps must learn first, and asked for again.
`push` sends a bundle of code, which the service checks and stores.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from millrace.data.v1 import resources_pb2 as data_pb2
from millrace.train.v1 import (
    checkpoint_import_pb2,
    code_bundle_pb2,
    resources_pb2,
    suggestion_pb2,
    sweep_pb2,
    train_service_pb2_grpc,
)
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.calls import Caller, Operation, every_page, new_request_id
from millrace_client.errors import NotFound, OutOfRange, Unavailable
from millrace_client.specs import ratio_split
from shared.code_packing import NotABundle, pack

if TYPE_CHECKING:
    from millrace_client.data import DataClient

__all__ = ["NotABundle", "bundle_name", "push"]


# --- TrainClient ---

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
SWEEP_OVER = frozenset(
    {
        sweep_pb2.Sweep.STATE_SUCCEEDED,
        sweep_pb2.Sweep.STATE_FAILED,
        sweep_pb2.Sweep.STATE_CANCELLED,
        sweep_pb2.Sweep.STATE_DELETING,
    }
)
SWEEP_POLL_INTERVAL_S = 2.0
# Each listed value and each end of a range is checked with a model. One of the caller's own code is imported for that.
CHECKED_TIMEOUT_S = 360.0
# The module of a program or of an own model is imported once before its job is created. The service waits 60 s for its
# turn, and 230 s for a busy machine, before it answers that the check did not end.
IMPORTED_TIMEOUT_S = 360.0
# The most points in one answer.
POINTS_AT_ONCE = 10_000
BEYOND_ANY_EVENT = 2**63 - 1


class TrainClient:
    """The client of the train service.

    Names are `trainingJobs/{j}`, `trainingJobs/{j}/checkpoints/{c}`, `sweeps/{s}` and `codeBundles/{sha256}`.
    """

    def __init__(self, caller: Caller, data: DataClient | None = None) -> None:
        """`data` makes the prepared versions that suggestions need."""
        self._caller = caller
        self._data = data
        self._stub: Any = train_service_pb2_grpc.TrainServiceStub(caller.channel)

    def create_training_job(
        self, training_job_id: str, spec: resources_pb2.TrainingSpec | Suggestion, *, validate_only: bool = False
    ) -> resources_pb2.TrainingJob:
        """Start a run; see `millrace_client.specs.training_spec`. `validate_only` checks and starts nothing.

        Of a suggestion its `spec` is taken. Raises `ValueError` for one that still needs a prepared version.
        """
        if isinstance(spec, Suggestion):
            spec = spec.complete_spec()
        request = pb.CreateTrainingJobRequest(
            training_job_id=training_job_id,
            spec=spec,
            request_id=new_request_id(),
            validate_only=validate_only,
        )
        timeout_s = IMPORTED_TIMEOUT_S if spec.HasField("program") or spec.model.entry else None
        return self._caller.unary(self._stub.CreateTrainingJob, request, resources_pb2.TrainingJob, timeout_s=timeout_s)

    def suggest_training_spec(
        self,
        version: str,
        *,
        prepare: bool = False,
        spec: resources_pb2.TrainingSpec | None = None,
        **overrides: Any,
    ) -> Suggestion:
        """Suggest a specification for training on `datasets/{d}/versions/{v}`, with reasons for all choices.

        Fields of `spec`, and named fields, e.g. `label_column="fare"`, always win. If steps must learn, or a validation
        split is missing, the answer has a `preparation` and its `spec` is incomplete. With `prepare` the data service
        makes the prepared version first, once for the same preparation, and the answer is for that version. Raises
        `InvalidArgument` if the version is ambiguous; the error names the alternatives.
        """
        first = suggestion_of(self.ask_for_suggestion(version, given_spec(spec, overrides)))
        if not prepare:
            return first
        if self._data is None:
            raise ValueError("this client has no data service to prepare a version with; use millrace_client.connect()")
        return prepared_suggestion(self.ask_for_suggestion, self._data, first)

    def ask_for_suggestion(
        self, version: str, spec: resources_pb2.TrainingSpec | None = None
    ) -> suggestion_pb2.SuggestTrainingSpecResponse:
        """Return the service's own answer; see `suggest_training_spec`."""
        request = suggestion_pb2.SuggestTrainingSpecRequest(dataset_version=version, spec=spec)
        answer_type = suggestion_pb2.SuggestTrainingSpecResponse
        return self._caller.unary(self._stub.SuggestTrainingSpec, request, answer_type)

    def get_training_job(self, name: str) -> resources_pb2.TrainingJob:
        request = pb.GetTrainingJobRequest(name=name)
        return self._caller.unary(self._stub.GetTrainingJob, request, resources_pb2.TrainingJob)

    def list_training_jobs(self) -> Iterator[resources_pb2.TrainingJob]:
        """Yield all jobs in the order of their names."""
        request = pb.ListTrainingJobsRequest()
        return every_page(self._caller, self._stub.ListTrainingJobs, request, "training_jobs")

    def cancel_training_job(self, name: str) -> resources_pb2.TrainingJob:
        """Ask a job to stop at its next step. A job in a final state stays unchanged."""
        request = pb.CancelTrainingJobRequest(name=name)
        return self._caller.unary(self._stub.CancelTrainingJob, request, resources_pb2.TrainingJob)

    def suspend_training_job(self, name: str, *, etag: str = "") -> resources_pb2.TrainingJob:
        """Ask a job to take a checkpoint and to free its workers."""
        request = pb.SuspendTrainingJobRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.SuspendTrainingJob, request, resources_pb2.TrainingJob)

    def resume_training_job(self, name: str, *, etag: str = "") -> resources_pb2.TrainingJob:
        """Continue a suspended, failed or cancelled job from its newest good checkpoint."""
        request = pb.ResumeTrainingJobRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.ResumeTrainingJob, request, resources_pb2.TrainingJob)

    def delete_training_job(self, name: str, *, etag: str = "") -> resources_pb2.TrainingJob:
        """Delete a job that has ended or is suspended, with its checkpoints, events, metrics and logs."""
        request = pb.DeleteTrainingJobRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.DeleteTrainingJob, request, resources_pb2.TrainingJob)

    def get_cluster_use(self) -> pb.ClusterUse:
        """Return the holders of the Ray cluster's CPUs and GPUs, over all services."""
        return self._caller.unary(self._stub.GetClusterUse, pb.GetClusterUseRequest(), pb.ClusterUse)

    def get_coverage(self, name: str, epoch: int, *, checkpoint: str = "", shard: str = "") -> pb.Coverage:
        """Count how often each row was consumed in `epoch` (from 0), up to `checkpoint` or the newest.

        For a program: how often the shard of the split `shard` passed it on.
        """
        request = pb.GetCoverageRequest(name=name, epoch=epoch, checkpoint=checkpoint, shard=shard)
        return self._caller.unary(self._stub.GetCoverage, request, pb.Coverage)

    def list_metrics(self, name: str, *, after_step: int = 0) -> Iterator[pb.MetricPoint]:
        """Yield the metrics of each step after `after_step`, in order."""
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
        """Yield the log of an attempt (0: the newest), of all ranks or one; -1 is the attempt's own process.

        With `follow` it continues until the attempt has ended. A broken stream is resumed where it ended; after
        `reconnect_for_s` seconds without an answer it raises `Unavailable`.
        """
        seen: dict[int, int] = {}
        last_heard = time.monotonic()
        while True:
            request = pb.StreamLogsRequest(name=name, attempt=attempt, rank=rank, follow=follow)
            skip = dict(seen)  # characters of each rank; a log only grows
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
        """Yield committed checkpoints, oldest first."""
        request = pb.ListCheckpointsRequest(parent=training_job)
        return every_page(self._caller, self._stub.ListCheckpoints, request, "checkpoints")

    def download_checkpoint(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> resources_pb2.Checkpoint:
        """Download a checkpoint, or the best one of the job `name`, into `directory`; return it.

        A program's checkpoint keeps the paths that the program reported. Each file is compared with its SHA-256, and
        the folder gets its name once all files are complete and on disk; after a failure no folder of that name exists.
        A broken stream is resumed, for two minutes without progress. The downloaded files stay in
        `.{directory}.millrace-partial` beside it, and the same call continues from there. `on_progress` is called with
        the bytes present and the bytes of all files.

        A folder that holds exactly this checkpoint stays unchanged. Raises `FileExistsError` for a folder with other
        content, and while another process downloads into it; `DataLoss` for a file that is not what was committed.
        """
        from millrace_client.checkpoint_transfer import download

        return download(self._caller, self._stub, name, directory, on_progress)

    def import_checkpoint(
        self,
        training_job_id: str,
        source: str | os.PathLike[str],
        spec: checkpoint_import_pb2.ImportSpec,
        *,
        validate_only: bool = False,
    ) -> checkpoint_import_pb2.ImportCheckpointResponse:
        """Make a checkpoint from a safetensors file, a torch state dict or a Hugging Face folder.

        See `millrace_client.specs.import_spec`. Its name is `trainingJobs/{training_job_id}/checkpoints/imported`. The
        answer's `report` has the outcome for each tensor. Raises `InvalidArgument` if the tensors do not fit the model;
        with `validate_only` nothing is created, and `report.fits` says so instead.
        """
        from millrace_client.checkpoint_transfer import import_weights

        return import_weights(self._caller, self._stub, training_job_id, source, spec, validate_only=validate_only)

    def get_imported_weights(self, name: str) -> checkpoint_import_pb2.ImportedWeights:
        """Return the files of an imported checkpoint, and the report of its import."""
        request = pb.GetImportedWeightsRequest(name=name)
        return self._caller.unary(self._stub.GetImportedWeights, request, checkpoint_import_pb2.ImportedWeights)

    def watch_training_job(
        self, name: str, *, after_sequence: int = 0, reconnect_for_s: float = 120.0
    ) -> Iterator[Update]:
        """Yield the present job, then every event after `after_sequence`, and the job again at each transition.

        It ends when the job is final, suspended or deleted. A broken stream is resumed after the last event seen, so
        that no event is missed or repeated; after `reconnect_for_s` seconds without an answer it raises `Unavailable`.
        """
        last_heard = time.monotonic()
        while True:
            request = pb.WatchTrainingJobRequest(name=name, after_sequence=after_sequence)
            ended = False
            try:
                for number, response in enumerate(self._caller.stream(self._stub.WatchTrainingJob, request)):
                    last_heard = time.monotonic()
                    if response.HasField("event"):
                        after_sequence = response.event.sequence
                        yield response.event
                    else:
                        suspended = response.job.state == resources_pb2.TrainingJob.STATE_SUSPENDED
                        ended = response.job.state in FINAL and not suspended
                        yield response.job
                        if suspended and number > 0:
                            # After the first response, a job follows its events. The server watches a suspended job
                            # until it is resumed.
                            return
            except Unavailable:
                if time.monotonic() - last_heard > reconnect_for_s:
                    raise
            else:
                # A server that shuts down may end the stream normally before the job is final.
                if ended:
                    return
            time.sleep(RECONNECT_PAUSE_S)

    def list_events(self, name: str) -> list[pb.TrainingEvent]:
        """Return the job's events so far, in order, without waiting for new ones."""
        last, sequence = self._last_sequence(name), 0
        events: list[pb.TrainingEvent] = []
        # A server that shuts down may end a stream normally before all events were sent.
        while sequence < last:
            request = pb.WatchTrainingJobRequest(name=name, after_sequence=sequence)
            # No deadline, because a slow store may take any time to read them.
            with contextlib.closing(self._caller.stream(self._stub.WatchTrainingJob, request)) as updates:
                for update in updates:
                    if update.HasField("event"):
                        events.append(update.event)
                        sequence = update.event.sequence
                    if sequence >= last:
                        break
        return events

    def _last_sequence(self, name: str) -> int:
        """Return the number of the job's newest event; 0 if there is none.

        The server reports it, because clocks may differ.
        """
        request = pb.WatchTrainingJobRequest(name=name, after_sequence=BEYOND_ANY_EVENT)
        try:
            for _ in self._caller.stream(self._stub.WatchTrainingJob, request, timeout_s=self._caller.timeout_s):
                pass
        except OutOfRange as beyond:
            return int(beyond.metadata["last_sequence"])
        raise AssertionError(f"{name} has an event of the highest number that there is")

    def wait_training_job(self, name: str, *, reconnect_for_s: float = 120.0) -> resources_pb2.TrainingJob:
        """Wait until the job is final, and return it, whatever its final state is."""
        for _ in self.watch_training_job(name, reconnect_for_s=reconnect_for_s):
            pass
        return self.get_training_job(name)

    def push_code(self, source: str | os.PathLike[str]) -> code_bundle_pb2.CodeBundle:
        """Pack a folder, a wheel (.whl) or one Python file and store it under its digest, `codeBundles/{sha256}`.

        The same content gives the same bundle on every machine. A folder's `.millraceignore` lists what stays out.
        Raises `ValueError`, naming the path, if it cannot be packed.
        """

        return push(self._caller, self._stub, source)

    def get_code_bundle(self, name: str) -> code_bundle_pb2.CodeBundle:
        request = pb.GetCodeBundleRequest(name=name)
        return self._caller.unary(self._stub.GetCodeBundle, request, code_bundle_pb2.CodeBundle)

    def list_code_bundles(self) -> Iterator[code_bundle_pb2.CodeBundle]:
        """Yield all bundles in the order of their names."""
        return every_page(self._caller, self._stub.ListCodeBundles, pb.ListCodeBundlesRequest(), "code_bundles")

    def delete_code_bundle(self, name: str) -> None:
        """Delete a bundle. Raises `FailedPrecondition` while a training job that is not deleted names it."""
        request = pb.DeleteCodeBundleRequest(name=name)
        self._caller.unary(self._stub.DeleteCodeBundle, request, pb.DeleteCodeBundleResponse)

    def create_sweep(self, sweep_id: str, spec: sweep_pb2.SweepSpec, *, validate_only: bool = False) -> sweep_pb2.Sweep:
        """Start a search; see `millrace_client.specs.sweep_spec`.

        `validate_only` only checks, and returns the trials that the sweep would have.
        """
        request = pb.CreateSweepRequest(
            sweep_id=sweep_id, spec=spec, request_id=new_request_id(), validate_only=validate_only
        )
        return self._caller.unary(self._stub.CreateSweep, request, sweep_pb2.Sweep, timeout_s=CHECKED_TIMEOUT_S)

    def get_sweep(self, name: str) -> sweep_pb2.Sweep:
        """Return a sweep with its trials, and the best of them so far."""
        return self._get_sweep(name)

    def _get_sweep(self, name: str, reconnect_for_s: float | None = None) -> sweep_pb2.Sweep:
        request = pb.GetSweepRequest(name=name)
        return self._caller.unary(self._stub.GetSweep, request, sweep_pb2.Sweep, reconnect_for_s=reconnect_for_s)

    def list_sweeps(self) -> Iterator[sweep_pb2.Sweep]:
        """Yield all sweeps in the order of their names, without their trials."""
        return every_page(self._caller, self._stub.ListSweeps, pb.ListSweepsRequest(), "sweeps")

    def cancel_sweep(self, name: str, *, etag: str = "") -> sweep_pb2.Sweep:
        """Ask a sweep and its trials to stop. A sweep in a final state stays unchanged."""
        request = pb.CancelSweepRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.CancelSweep, request, sweep_pb2.Sweep)

    def delete_sweep(self, name: str, *, etag: str = "") -> sweep_pb2.Sweep:
        """Delete a sweep that has ended, with all its trials and their checkpoints."""
        request = pb.DeleteSweepRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.DeleteSweep, request, sweep_pb2.Sweep)

    def watch_sweep(self, name: str, *, reconnect_for_s: float = 120.0) -> Iterator[sweep_pb2.Sweep]:
        """Yield the present sweep, and again after each change, until it has ended.

        After `reconnect_for_s` seconds without an answer it raises `Unavailable`.
        """
        seen: sweep_pb2.Sweep | None = None
        last_heard = time.monotonic()
        while True:
            try:
                sweep = self._get_sweep(name, reconnect_for_s=0.0)
            except Unavailable:
                if time.monotonic() - last_heard > reconnect_for_s:
                    raise
            else:
                last_heard = time.monotonic()
                if sweep != seen:
                    seen = sweep
                    yield sweep
                if sweep.state in SWEEP_OVER:
                    return
            time.sleep(SWEEP_POLL_INTERVAL_S)

    def wait_sweep(self, name: str, *, reconnect_for_s: float = 120.0) -> sweep_pb2.Sweep:
        """Wait until the sweep has ended, and return it, whatever its final state is."""
        for sweep in self.watch_sweep(name, reconnect_for_s=reconnect_for_s):
            last = sweep
        return last


# --- Suggested specifications ---

Making = Operation[data_pb2.DatasetVersion]
Ask = Callable[[str, resources_pb2.TrainingSpec | None], suggestion_pb2.SuggestTrainingSpecResponse]
DONE_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Suggestion:
    """A suggested specification.

    `spec` is complete if `preparation` is None. `choices` has each choice with its reason. `version` is the version
    that `spec` trains on: the requested or the prepared one. As text it is a line for each choice, with its reason.
    """

    spec: resources_pb2.TrainingSpec
    choices: Sequence[suggestion_pb2.Choice]
    preparation: suggestion_pb2.Preparation | None
    version: str

    def complete_spec(self) -> resources_pb2.TrainingSpec:
        """Return `spec`. Raises `ValueError` if a version must be prepared first."""
        if self.preparation is not None:
            raise ValueError(
                f"the specification for {self.version} is incomplete: a version must be prepared first; ask with "
                "prepare=True, or with Millrace.training_spec()"
            )
        return self.spec

    def __str__(self) -> str:
        return "\n".join(f"{choice.field} = {choice.value}: {choice.reason}" for choice in self.choices)


def suggestion_of(answer: suggestion_pb2.SuggestTrainingSpecResponse) -> Suggestion:
    preparation = answer.preparation if answer.HasField("preparation") else None
    return Suggestion(answer.spec, list(answer.choices), preparation, answer.spec.dataset_version)


def prepare(
    data: DataClient, preparation: suggestion_pb2.Preparation, wait: Callable[[Making], data_pb2.DatasetVersion]
) -> str:
    """Return the name of the prepared version.

    It is made once, whichever client asks; one that was deleted, or that ended without a result, is made again. `wait`
    waits for the operation. Raises the operation's error.
    """
    try:
        operation = begin_preparation(data, preparation, preparation.request_id)
        failed = operation.done and operation.proto.HasField("error")
    except NotFound:
        if not _is_there(data, preparation.source):
            raise
        failed = True
    if failed:
        operation = begin_preparation(data, preparation, new_request_id())
    return wait(operation).name


def begin_preparation(data: DataClient, preparation: suggestion_pb2.Preparation, request_id: str) -> Making:
    shares = {split.split: split.weight for split in preparation.splits}
    return data.transform_version(
        preparation.source,
        preparation.transform.steps,
        splits=ratio_split(shares, seed=preparation.split_seed) if shares else None,
        fit_split=preparation.fit_split,
        request_id=request_id,
    )


def prepared_suggestion(
    ask: Ask,
    data: DataClient,
    first: Suggestion,
    wait: Callable[[Making], data_pb2.DatasetVersion] = lambda operation: operation.wait(DONE_TIMEOUT_S),
) -> Suggestion:
    """Suggest a specification for the version that `first.preparation` makes, with the choices of both answers."""
    if first.preparation is None:
        return first
    version = prepare(data, first.preparation, wait)
    second = suggestion_of(ask(version, first.spec))
    return Suggestion(second.spec, [*first.choices, *second.choices], second.preparation, version)


def given_spec(spec: resources_pb2.TrainingSpec | None, overrides: dict[str, Any]) -> resources_pb2.TrainingSpec:
    """Return the fields of `spec`, overridden by named fields."""
    training_spec = resources_pb2.TrainingSpec()
    if spec is not None:
        training_spec.CopyFrom(spec)
    training_spec.MergeFrom(resources_pb2.TrainingSpec(**overrides))
    return training_spec


def _is_there(data: DataClient, version: str) -> bool:
    try:
        data.get_version(version)
    except NotFound:
        return False
    return True


# --- Bundles of code ---

CHUNK_BYTES = 1024 * 1024
# A bundle has at most 64 MiB, which the service checks and writes to the store.
PUSHED_TIMEOUT_S = 300.0


def push(caller: Caller, stub: Any, source: str | os.PathLike[str]) -> code_bundle_pb2.CodeBundle:
    """Pack and store a folder, a wheel or one Python file. A bundle that is already stored is returned.

    Raises `NotABundle`, a `ValueError` that names the path, if it cannot be packed.
    """
    with tempfile.TemporaryFile() as file:
        facts = pack(Path(source), file)

        def requests() -> Iterator[pb.CreateCodeBundleRequest]:
            header = pb.CreateCodeBundleRequest.Header(sha256=facts.sha256, size_bytes=facts.size_bytes)
            yield pb.CreateCodeBundleRequest(header=header)
            yield from _chunks(file)

        # The same bytes make no second bundle, so the call may be repeated.
        return caller.send(stub.CreateCodeBundle, requests, code_bundle_pb2.CodeBundle, timeout_s=PUSHED_TIMEOUT_S)


def bundle_name(source: str | os.PathLike[str]) -> str:
    """Return the name, `codeBundles/{sha256}`, that pushing the source would give. Raises `NotABundle`."""
    with tempfile.TemporaryFile() as file:
        return f"codeBundles/{pack(Path(source), file).sha256}"


def _chunks(file: BinaryIO) -> Iterator[pb.CreateCodeBundleRequest]:
    file.seek(0)
    while data := file.read(CHUNK_BYTES):
        yield pb.CreateCodeBundleRequest(chunk=data)
