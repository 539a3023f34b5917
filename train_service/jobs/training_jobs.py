"""Training jobs in the store: creating, reading, cancelling and watching them, and suggesting their specifications.

A suggestion follows from a version's schema and statistics by the domain's rules.

The reconciler records recent clusters and the present cluster's use for the service's process, which has no connection
to Ray. `clusters/train.json` holds each distinct set of nodes with the time when it was last seen. A node that is
absent for a while is part of an earlier set: a job that fits that set is accepted, and waits.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds
from google.protobuf import json_format

from millrace.common.v1 import transform_pb2
from shared import names
from shared.checkpoint import CheckpointEntry, CheckpointRegistry, resolve
from shared.checkpoint.ranking import latest
from shared.dataset_version import DatasetVersion, load_version
from shared.dataset_version.manifest import Column
from shared.dataset_version.version import read_report
from shared.durable import as_state
from shared.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    already_exists,
    invalid_field,
)
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.index import IndexedJob, JobIndex
from shared.jobs.transitions import take_up
from shared.resource_log import claimed, claimed_before, uid_of
from shared.settings import CLUSTER_MAX_VARIABLE
from shared.storage import ObjectMissing, ObjectStore
from shared.transforms import Pipeline, ScalarType, TensorSpec, TensorType, schema_of_columns
from shared.transforms.batch import ColumnType
from shared.transforms.records import only_tensor
from shared.transforms.steps.custom import functions_in_children
from train_service.attempt.outcomes import report_lost
from train_service.checkpoints.fine_tuning import FIELD, check_fits, check_name, check_scaling
from train_service.domain import suggesting as known
from train_service.domain.capacity import (
    ClusterUse,
    Resources,
    beyond,
    first_bundle,
    kind_of,
    lasts,
    never_fits,
    resources_text,
)
from train_service.domain.order import MIN_LANES, default_lanes
from train_service.domain.spec import RUN_DEVICE, TrainingSpec, spec_of_job, with_devices
from train_service.domain.suggesting import MAX_VALUES, ColumnFacts, Suggestion, VersionFacts, suggest
from train_service.jobs.deletion import Deletions, using_inputs
from train_service.jobs.model_check import check_model, check_outputs
from train_service.jobs.own_code import OwnModelCheck, ProgramCheck
from train_service.jobs.run_records import FollowedJob
from train_service.loading.preprocessing import FIELD as TRANSFORM_FIELD
from train_service.loading.preprocessing import fitted, fitted_program, steps_of_run
from train_service.records.event_log import TRAIN_KIND, Event, EventLog

# --- Jobs ---

logger = logging.getLogger(__name__)

COLLECTION = "trainingJobs"
PATTERN = "trainingJobs/{j}"
# The most events that one poll of a watcher reads. Events are read one by one, perhaps from a slow store, and clients
# treat silence as the end of the events.
EVENTS_AT_ONCE = 8
# How long a call waits while other calls' models are checked.
CHECK_WAIT_S = 60.0


@dataclass(frozen=True)
class JobView:
    """A job as clients see it.

    It has the job's record, its progress, its newest and its best checkpoint, and what the next attempt waits for, if
    anything.
    """

    record: JobRecord
    progress: dict[str, Any]
    newest: CheckpointEntry | None = None
    best: CheckpointEntry | None = None
    waiting_for: str = ""


class TrainingJobs:
    """Operations on training jobs in the store.

    All methods block on the store, so call them from threads. Names are `trainingJobs/{j}`.
    """

    def __init__(
        self,
        store: ObjectStore,
        deletions: Deletions | None = None,
        cluster_max: Mapping[str, float] | None = None,
        programs: ProgramCheck | None = None,
    ) -> None:
        """Create the operations over `store`.

        `cluster_max` is the size that the cluster never exceeds, as the operator set it; if None, the cluster is taken
        to stay as large as it has been. `programs` checks users' programs; the default refuses them.
        """
        self._store = store
        self._cluster_max = cluster_max
        self._clusters = ClusterMemory(store)
        self._programs = programs or ProgramCheck(store)
        self.own_models = OwnModelCheck(store, self._programs)
        self._deletions = deletions or Deletions(store)
        self._jobs = Jobs(store, TRAIN_KIND)
        self.index = JobIndex(store, TRAIN_KIND, COLLECTION, lambda job: _shown(self.view(job)))
        # The first call imports torch, and first imports must not race. Neither may the code that silences torch's
        # warnings.
        self._checking = threading.Lock()

    def create(self, job_id: str, spec: TrainingSpec, request_id: str, digest: str, validate_only: bool) -> JobView:
        """Create a job, which is durable when this returns.

        `digest` is the digest of the request's body. Raises the errors that the RPC's comment lists.
        """
        names.check_id("training_job_id", job_id)
        request_id = names.check_request_id("request_id", request_id)
        if not validate_only and (first := self._first_answer(request_id, digest)):
            return self.view(first)
        spec = self.checked(spec)
        job = _new_job(job_id, spec, request_id=request_id, digest=digest)
        if validate_only:
            if self._jobs.find(job.name):
                raise already_exists(job.name)
            self.check_ever_fits(spec)
            return JobView(job, {})
        with claimed(self._store, TRAIN_KIND, request_id, digest, job.name) as claim:
            first = self._jobs.made_by(request_id, claim.name) if claim.repeated else None
            if first is None:
                self.check_ever_fits(spec)
            return self.view(first or self.make(job, spec))

    def begin_external_attempt(self, job_id: str, spec: TrainingSpec, runner: str, device: str) -> JobRecord:
        """Begin an attempt that the caller must run.

        Return the job with that attempt; the caller is its `runner`.

        The job is created if there is none of that name. A job that SUCCEEDED is returned as it is. The new attempt
        supersedes an attempt that is still at work. `device` is the device of the attempt, GPU or CPU.

        Raises as `create` does, and `FailedPrecondition` for a job that the service runs or that is being deleted.
        """
        names.check_id("job", job_id)
        job = self._jobs.find(f"{COLLECTION}/{job_id}")
        if job is None:
            spec = self.checked(spec)
            job = self.make(_new_job(job_id, spec, runner=runner), spec)
        spec = _with_lanes_of(job, spec)
        begun = TrainingSpec.from_config(job.spec["training"])
        given = self._fitted(spec)
        # The initial checkpoint was resolved when the job was created, and may have been deleted since.
        same_start = _may_mean(given.initial_checkpoint, begun.initial_checkpoint)
        if not same_start or replace(given, initial_checkpoint=begun.initial_checkpoint) != begun:
            raise already_exists(job.name, "with another spec; use another id")

        def begin(newest: JobRecord) -> JobRecord:
            problem = "another process has begun it just now" if newest.attempt != job.attempt else ""
            if not problem:
                try:
                    run = newest.choices.get(RUN_DEVICE, device)
                    return take_up(newest, time.time(), with_devices(newest.choices, run, device))
                except ValueError as error:
                    problem = str(error)
            raise FailedPrecondition(
                f"{job.name} is not for {runner}: {problem}; use another id",
                reason="WRONG_STATE",
                metadata={"resource": job.name},
            )

        if job.runner and not job.state.final:
            report_lost(self._store, job)
        with using_inputs(self._store, TRAIN_KIND, job, self._still_read(job)):
            pass  # as in `resume`
        return self._jobs.transition(job.name, begin, attempt=job.attempt + 1)

    def _fitted(self, spec: TrainingSpec) -> TrainingSpec:
        """Return `spec` as `checked` does, using the store alone. Only a user's own model is checked again in full."""
        if spec.program is not None:
            return fitted_program(self._store, spec)
        return self.checked(spec) if spec.model.is_own else fitted(self._store, spec)[0]

    def warm_up(self) -> None:
        """Import what the first `create` needs, ahead of that call."""
        with self._checking:
            from shared.models import known_builders

            known_builders()

    def suggest(self, version: str, given: Mapping[str, Any], custom_allowed: Collection[str]) -> Suggestion:
        """Return a suggested specification for a dataset version. See `suggest_spec`."""
        return suggest_spec(self._store, version, given, custom_allowed)

    def get(self, name: str) -> JobView:
        names.parse("name", name, PATTERN)
        return self.view(self._jobs.get(name, name))

    def follow(self, name: str) -> FollowedJob[JobView]:
        """Open a job for repeated reads. Raises `InvalidArgument`."""
        names.parse("name", name, PATTERN)
        return FollowedJob(self._store, name, self.view, self._jobs.waiting_for)

    def exists(self, name: str) -> bool:
        return self._jobs.find(name) is not None

    def page(self, page_size: int, page_token: str) -> tuple[list[JobView], str]:
        """Return one page in the order of names, and the token of the next.

        The index has the reports of attempts at work as of some seconds ago, and everything else as it is now.
        """
        size, after = names.checked_size(page_size), names.key_of(page_token)
        if (page := self.index.page(f"{COLLECTION}/{after}", size)) is not None:
            jobs, more = page
            last = jobs[-1].record.name.rpartition("/")[2] if more else ""
            return [_view_of(job) for job in jobs], names.token_of(last) if more else ""
        # The index is being built: read the logs.
        ids, token = names.page(self._store.folders(COLLECTION), page_size, page_token)
        found = [self._jobs.find(f"{COLLECTION}/{one}") for one in ids]
        return [self.view(job) for job in found if job], token

    def cluster_use(self) -> tuple[ClusterUse, dict[str, str], float]:
        """Return who uses the Ray cluster.

        The second value maps the attempts' actors to their jobs' names, the third is the time of the observation.

        Reads the live jobs of those kinds that hold resources.
        """
        use, seen_at = self._clusters.use()
        names: dict[str, str] = {}
        for kind in {kind_of(holder.attempt) for holder in use.holders if holder.attempt}:
            jobs = Jobs(self._store, kind)
            for live in jobs.live():
                if (job := jobs.find(live.folder)) is not None and job.actor:
                    names[job.actor] = job.name
        return use, names, seen_at

    def cancel(self, name: str, etag: str) -> JobView:
        names.parse("name", name, PATTERN)
        return self.view(self._jobs.cancel(name, name, etag))

    def delete(self, name: str, etag: str) -> JobView:
        """Start a deletion and return the DELETING job.

        The deletion finishes in the background. Raises the errors that the RPC's comment lists.
        """
        names.parse("name", name, PATTERN)
        view = self.view(self._deletions.begin(name, etag))
        self._deletions.finish_soon(name)
        return view

    def suspend(self, name: str, etag: str) -> JobView:
        names.parse("name", name, PATTERN)
        return self.view(self._jobs.suspend(name, name, etag))

    def resume(self, name: str, etag: str) -> JobView:
        """Resume a job. Raises `FailedPrecondition` if the job is over and its dataset version has been deleted."""
        names.parse("name", name, PATTERN)
        job = self._jobs.get(name, name)
        if not job.state.final:
            return self.view(self._jobs.resume(name, name, etag))
        spec = self._still_read(job)
        if spec.program is not None or spec.model.is_own:
            self._programs.own_code.require_own_code()
        try:
            # The inputs of a finished job may be deleted; from here on they may not. The reference marks stay even if
            # the resumption is refused: another resumption may have been faster. The marks of a job that stays finished
            # soon expire.
            with using_inputs(self._store, TRAIN_KIND, job, spec):
                pass
        except NotFound as error:
            raise FailedPrecondition(
                f"{name} cannot go on: {error.message}; train anew on what there is",
                reason="VERSION_GONE",
                metadata={"resource": name, "dataset_version": spec.dataset_version},
            ) from None
        return self.view(self._jobs.resume(name, name, etag))

    def checkpoints(self, name: str, page_size: int, page_token: str) -> tuple[list[CheckpointEntry], str]:
        names.parse("parent", name, PATTERN)
        self._jobs.get(name, name)
        size, after = names.checked_size(page_size), names.key_of(page_token)
        chosen, more = CheckpointRegistry(self._store, name).poll(lambda view: view.page(after, size))
        return chosen, names.token_of(chosen[-1].name) if more else ""

    def events(self, name: str, after_sequence: int) -> list[Event]:
        """Return the next written events: at most `EVENTS_AT_ONCE`, or what is left of a segment and fits a page."""
        return EventLog(self._store, name).page(after_sequence, EVENTS_AT_ONCE)

    def check_sequence(self, name: str, after_sequence: int) -> None:
        """Raise `OutOfRange` for an unknown sequence number. An event must have the number, or it is 0."""
        last = EventLog(self._store, name).last_sequence()
        if not 0 <= after_sequence <= last:
            wrong = "must be 0 or more" if after_sequence < 0 else f"is beyond the last event, {last}"
            raise OutOfRange(
                f"after_sequence {after_sequence} {wrong}; use 0 to {last}",
                reason="SEQUENCE_OUT_OF_RANGE",
                metadata={"resource": name, "last_sequence": str(last)},
                fields=[("after_sequence", f"use 0 to {last}")],
            )

    def _still_read(self, job: JobRecord) -> TrainingSpec:
        """Return the job's specification with the inputs that it still reads.

        Once the job has a checkpoint of its own to resume from, it no longer needs its initial checkpoint.
        """
        spec = TrainingSpec.from_config(job.spec["training"])
        has_own = not CheckpointRegistry(self._store, job.name).poll(lambda view: view.is_empty)
        return replace(spec, initial_checkpoint="") if has_own else spec

    def checked(self, spec: TrainingSpec) -> TrainingSpec:
        """Return `spec` with its version's defaults.

        Raises the errors that `CreateTrainingJob` lists for a specification.
        """
        if spec.program is not None:
            return self._programs.checked(spec)
        if spec.model.is_own:
            return self._with_initial_checkpoint(self.own_models.checked(spec))
        spec, version, prepared = fitted(self._store, spec)
        with self._alone():
            check_model(spec, only_tensor(prepared), steps_of_run(spec, version))
        return self._with_initial_checkpoint(spec)

    def check_outputs(self, spec: TrainingSpec, model_input: TensorSpec) -> None:
        """Check the outputs of the model.

        It must accept rows of `model_input` and produce the outputs of its task. Raises as `create` does.
        """
        with self._alone():
            check_outputs(spec, model_input)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock for model checks.

        Raises `ResourceExhausted` if other calls' checks take longer than `CHECK_WAIT_S`.
        """
        if not self._checking.acquire(timeout=CHECK_WAIT_S):
            raise ResourceExhausted(
                f"other calls' models have been checked for {CHECK_WAIT_S:g} s already; try again later",
                reason="TOO_MANY_MODELS",
            )
        try:
            yield
        finally:
            self._checking.release()

    def _with_initial_checkpoint(self, spec: TrainingSpec) -> TrainingSpec:
        """Return `spec` with its initial checkpoint resolved.

        A name that ends in `final` becomes the name of the checkpoint that it refers to.
        """
        if not spec.initial_checkpoint:
            return spec
        check_name(spec.initial_checkpoint)
        entry = resolve(self._store, FIELD, spec.initial_checkpoint)
        if not spec.model.is_own:  # a user's code runs only in the check's child process
            check_fits(self._store, entry, spec.model)
        check_scaling(self._store, entry, spec)
        return replace(spec, initial_checkpoint=entry.name)

    def check_ever_fits(self, spec: TrainingSpec) -> None:
        """Raise `FailedPrecondition` for workers that never fit.

        There are more of them than the cluster can ever hold.
        """
        check_ever_fits(spec, self._clusters, self._cluster_max)

    def make(self, job: JobRecord, spec: TrainingSpec) -> JobRecord:
        """Make a job durable whose `spec` was checked. For a repeated record, return the existing job."""
        try:
            with using_inputs(self._store, TRAIN_KIND, job, spec) as version:
                # Clients may ask which rows the run consumed after the version has been deleted.
                if version is not None:
                    job = replace(job, spec={**job.spec, "train_split": asdict(version.split(spec.train_split))})
                return self._jobs.create(job.name, job)
        except AlreadyExists:
            # A concurrent call with the same request may have created the job.
            if there := self._jobs.made_by(job.spec["request_id"], job.name):
                return there
            raise

    def _first_answer(self, request_id: str, digest: str) -> JobRecord | None:
        """Return the job that an earlier call with this id created.

        Its inputs may have been deleted since, so the specification is not checked again. Raises `AlreadyExists` if the
        body was different.
        """
        name = claimed_before(self._store, TRAIN_KIND, request_id, digest)
        return self._jobs.made_by(request_id, name) if name else None

    def view(self, record: JobRecord) -> JobView:
        """Return a job as clients see it."""
        ranking = spec_of_job(record.spec["training"], record.choices).checkpoints.ranking
        registry = CheckpointRegistry(self._store, record.name)
        try:
            newest, chosen = registry.poll(lambda view: (view.newest(), view.best(ranking)))
        except DataLoss as error:  # a page is lost: the job can still be looked at, cancelled and deleted
            logger.warning("%s: the best checkpoint is not known: %s", record.name, error.message)
            newest, chosen = latest(registry.state().checkpoints), None
        begins = record.state in (JobState.PENDING, JobState.RECOVERING)
        waiting_for = self._jobs.waiting_for(record.name) if begins else ""
        return JobView(record, self._jobs.progress(record.name), newest, chosen, waiting_for)


def _shown(view: JobView) -> dict[str, Any]:
    """Return what the index has of a view besides the record."""
    return {
        "progress": view.progress,
        "newest": as_state(view.newest) if view.newest else None,
        "best": as_state(view.best) if view.best else None,
        "waiting_for": view.waiting_for,
    }


def _view_of(job: IndexedJob) -> JobView:
    newest, best = job.shown["newest"], job.shown["best"]
    return JobView(
        job.record,
        job.shown["progress"],
        CheckpointEntry.from_state(newest) if newest else None,
        CheckpointEntry.from_state(best) if best else None,
        job.shown["waiting_for"],
    )


def _with_lanes_of(job: JobRecord, spec: TrainingSpec) -> TrainingSpec:
    """Return `spec` with the lanes of `job`.

    `spec` must have the default, and the job `MIN_LANES`. Jobs of earlier releases always had `MIN_LANES`; this keeps
    their order of rows.
    """
    begun: int = job.spec["training"]["lanes"]
    is_default = spec.lanes == default_lanes(spec.num_workers)
    return replace(spec, lanes=begun) if is_default and begun == MIN_LANES else spec


def _may_mean(given: str, settled: str) -> bool:
    """Return whether `given` may have meant `settled`.

    Both name checkpoints. A job's `final` checkpoint is not always the same one.
    """
    job, is_final, _ = given.partition("/checkpoints/final")
    return given == settled or (bool(is_final) and settled.startswith(f"{job}/checkpoints/"))


def _new_job(job_id: str, spec: TrainingSpec, *, request_id: str = "", digest: str = "", runner: str = "") -> JobRecord:
    now, name = time.time(), f"{COLLECTION}/{job_id}"
    return JobRecord(
        uid=uid_of(request_id, name),
        name=name,
        spec={"training": spec.as_config(), "request_id": request_id},
        body_sha256=digest,
        create_time=now,
        update_time=now,
        max_failures=spec.max_failures,
        max_preemptions=spec.max_preemptions,
        runner=runner,
    )


# --- Recent clusters ---

KEY = "clusters/train.json"
USE_KEY = "clusters/use.json"
# The use is written again after this time although nothing changed. This shows that the reconciler still runs.
USE_REFRESHED_S = 60.0
GIB = 2.0**30
REMEMBERED_S = 24 * 3600.0
# How often an unchanged set of nodes is written again.
REFRESHED_S = 600.0
AS_LATE_S = 3600.0
MAX_REMEMBERED = 100


class ClusterMemory:
    """The store's records of clusters. `clock` returns seconds since the epoch."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._last: tuple[list[dict[str, float]], float] = ([], 0.0)
        self._last_use: tuple[ClusterUse | None, float] = (None, 0.0)

    def note(self, nodes: Sequence[Resources]) -> None:
        """Record the totals of all present nodes. Cheap while nothing changes."""
        now = self._clock()
        seen = sorted((_lasting(node) for node in nodes), key=str)
        last, at = self._last
        if not seen or (seen == last and now - at < REFRESHED_S):
            return
        lasting = [one for one in self._read() if now - one["seen"] < REMEMBERED_S and one["nodes"] != seen]
        kept = [*_largest(lasting), {"nodes": seen, "seen": now}][-MAX_REMEMBERED:]
        self._store.put(KEY, json.dumps({"clusters": kept}).encode())
        self._last = (seen, now)

    def note_use(self, use: ClusterUse) -> None:
        """Record who uses the cluster now. Cheap while nothing changes."""
        now = self._clock()
        last, at = self._last_use
        if use == last and now - at < USE_REFRESHED_S:
            return
        self._store.put(USE_KEY, json.dumps({"time": now, **asdict(use)}).encode())
        self._last_use = (use, now)

    def use(self) -> tuple[ClusterUse, float]:
        """Return the cluster's use and its time.

        The time is in seconds since the epoch, or 0 if the use was never seen.
        """
        try:
            state = json.loads(self._store.get(USE_KEY))
            return ClusterUse.from_state(state), float(state["time"])
        except ObjectMissing:
            return ClusterUse(), 0.0

    def clusters(self) -> list[list[Resources]]:
        """Return the last day's sets of nodes. The newest is the last."""
        now = self._clock()
        return [one["nodes"] for one in self._read() if now - one["seen"] < REMEMBERED_S]

    def _read(self) -> list[dict[str, Any]]:
        try:
            found = json.loads(self._store.get(KEY))["clusters"]
            return [{"nodes": list(one["nodes"]), "seen": float(one["seen"])} for one in found]
        except ObjectMissing:
            return []
        except (ValueError, KeyError, TypeError):
            logger.exception("%s cannot be read; the reconciler writes it anew", KEY)
            return []


def check_ever_fits(spec: TrainingSpec, memory: ClusterMemory, most: Mapping[str, float] | None) -> None:
    """Raise `FailedPrecondition` for workers that never fit.

    The error names the fields that request too much for the fewest workers. With `most`, the operator's bound, a
    request may not exceed it. Otherwise a cluster of the last day must be able to hold the workers.
    """
    if most is None:
        clusters = memory.clusters()
        fields, has = never_fits(spec, clusters)
        known = f"the cluster has {has} in all"
        remedy = f"ask for less; of a cluster that grows, its operator sets {CLUSTER_MAX_VARIABLE}"
        bundle = first_bundle(spec, clusters[-1] if clusters else [])
    else:
        fields, known = beyond(spec, most), f"the cluster never has more than {resources_text(most)}"
        remedy, bundle = "ask for less", first_bundle(spec, [])
    if fields:
        number = spec.effective_min_workers
        wanted = f"{number} worker{'' if number == 1 else 's'} of {resources_text(bundle)} can never be placed"
        raise FailedPrecondition(
            f"{', '.join(fields)}: {wanted}: {known}; {remedy}",
            reason="NEVER_SCHEDULABLE",
            fields=[(field, f"{known}; {remedy}") for field in fields],
        )


def _largest(clusters: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the clusters without parts of others.

    A cluster is dropped if it is part of a larger one that was seen as late or nearly as late. A job that fits a part
    of a cluster fits all of it.
    """
    sizes = [_counted(cluster["nodes"]) for cluster in clusters]
    return [
        one
        for one, size in zip(clusters, sizes, strict=True)
        if not any(
            size < larger and one["seen"] <= other["seen"] + AS_LATE_S
            for other, larger in zip(clusters, sizes, strict=True)
        )
    ]


def _counted(nodes: Sequence[Resources]) -> Counter[str]:
    return Counter(json.dumps(node, sort_keys=True) for node in nodes)


def _lasting(node: Resources) -> dict[str, float]:
    """Return the lasting resources of a node.

    Memory is in whole GiB, because it differs a little at each start of a node.
    """
    kept = {name: amount for name, amount in node.items() if lasts(name)}
    return {name: math.ceil(amount / GIB) * GIB if name == "memory" else amount for name, amount in kept.items()}


# --- Suggestions ---

Json = Mapping[str, Any]
# (check of an Arrow type, kind)
KINDS = (
    (kinds.is_boolean, known.BOOLEAN),
    (kinds.is_integer, known.INTEGER),
    (kinds.is_floating, known.NUMBER),
    (kinds.is_string, known.TEXT),
    (kinds.is_binary, known.BYTES),
    (kinds.is_temporal, known.TIME),
)


def suggest_spec(store: ObjectStore, name: str, given: Json, custom_allowed: Collection[str] = ()) -> Suggestion:
    """Return a suggestion for the version `name`.

    `given` is the JSON form of a partial specification. Raises the errors that the RPC's comment lists.
    """
    version = load_version(store, name)
    wanted = given.get("train_split") or "train"
    facts = version_facts(version, read_report(store, version).get("columns", []), wanted)

    def shape_made(column: str) -> tuple[int, ...]:
        return _shape_made(version, given, column, custom_allowed)

    return suggest(facts, given, shape_made)


def version_facts(version: DatasetVersion, statistics: Sequence[Json], train_split: str) -> VersionFacts:
    """Return the facts of a version. `statistics` are those of its quality report."""
    by_column: dict[str, list[Json]] = {}
    for one in statistics:
        by_column.setdefault(one["column"], []).append(one)
    schema = schema_of_columns(version.columns)
    columns = [
        _facts(column, schema[column.name], by_column.get(column.name, ()), train_split) for column in version.columns
    ]
    splits = {split.name: split.row_count for split in version.manifest.splits}
    return VersionFacts(
        name=version.name,
        columns=columns,
        splits=splits,
        size_bytes=version.manifest.size_bytes,
    )


def _facts(column: Column, column_type: ColumnType, statistics: Sequence[Json], train_split: str) -> ColumnFacts:
    """Return the facts of a column over all splits.

    Mean and deviation are those of the training split, or of the first split if there are none.
    """
    numbers = [one["numbers"] for one in statistics if "numbers" in one]
    of_train = next((one for one in statistics if one["split"] == train_split), statistics[0] if statistics else {})
    values = _values(statistics)
    return ColumnFacts(
        name=column.name,
        kind=known.TENSOR if isinstance(column_type, TensorType) else _kind(column_type.arrow_type),
        dtype=column_type.dtype if isinstance(column_type, TensorType) else "",
        shape=tuple(column.shape),
        value_names=tuple(column.value_names),
        known=bool(statistics),
        rows=sum(int(one["rowCount"]) for one in statistics),
        nulls=sum(int(one["nullCount"]) for one in statistics),
        nans=sum(int(one["nanCount"]) for one in statistics),
        # JSON spells infinities as strings.
        infinite=any(isinstance(number.get(bound), str) for number in numbers for bound in ("min", "max")),
        distinct=max((int(one["distinctCount"]) for one in statistics), default=0) if values is None else len(values),
        values=values,
        least=min((float(one["min"]) for one in numbers), default=None),
        most=max((float(one["max"]) for one in numbers), default=None),
        mean=_finite(of_train.get("numbers", {}).get("mean")),
        deviation=_finite(of_train.get("numbers", {}).get("deviation")),
    )


def _values(statistics: Sequence[Json]) -> tuple[Any, ...] | None:
    """Return all distinct values over all splits.

    The result is None if a split's statistics lack some of its values.
    """
    found: set[Any] = set()
    for one in statistics:
        values = one.get("values", ())
        if not one["distinctIsExact"] or len(values) < int(one["distinctCount"]):
            return None
        found |= {_scalar(each["value"]) for each in values}
    return tuple(sorted(found)) if statistics and 0 < len(found) <= MAX_VALUES else None


def _scalar(value: Json) -> Any:
    (kind,) = value
    return int(value[kind]) if kind == "integer" else float(value[kind]) if kind == "number" else value[kind]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _kind(arrow_type: pa.DataType) -> str:
    return next((kind for check, kind in KINDS if check(arrow_type)), known.OTHER)


def _shape_made(version: DatasetVersion, given: Json, column: str, custom_allowed: Collection[str]) -> tuple[int, ...]:
    """Return the shape of a transformed row.

    The given transform is applied to `column`. Raises `InvalidArgument` unless it is a tensor of a fixed shape.
    """
    message = json_format.ParseDict(given.get("transform", {}), transform_pb2.Transform())
    pipeline = Pipeline.from_proto(message, column, TRANSFORM_FIELD, custom_allowed)
    with functions_in_children():
        made = pipeline.output(schema_of_columns(version.columns)).get(column)
    lengths = tuple(one for one in made.shape if one is not None) if isinstance(made, TensorType) else ()
    if not isinstance(made, TensorType) or not lengths or len(lengths) < len(made.shape):
        shown = "nothing" if made is None else str(made.arrow_type) if isinstance(made, ScalarType) else str(made)
        raise invalid_field(
            TRANSFORM_FIELD, shown, f"column {column!r} must become a tensor of a fixed shape; add steps"
        )
    return lengths
