"""What clients read of a training job: the records of its run, and its states and events as they come.

The records are the rows that the run consumed, its metrics, its logs, and its checkpoints.

Clients download a checkpoint file by file. Retention does not delete it while it is read.

A job is read again and again for all of its watchers together.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from shared import names
from shared.checkpoint import CheckpointEntry, CheckpointRegistry, load_checkpoint
from shared.checkpoint.format import CheckpointFile, files_of, load_program_checkpoint, read_file
from shared.checkpoint.references import FINAL, keep, release, resolve_any
from shared.dataset_version import VersionReader, load_version
from shared.dataset_version.manifest import Split
from shared.durable import fields_of
from shared.errors import (
    Conflict,
    DataLoss,
    FailedPrecondition,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    invalid_field,
    not_found,
)
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.registry import log_prefix
from shared.reference_markers import REFERENCE_APPEARS_TIMEOUT_S
from shared.resource_log import Record, ResourceLog
from shared.storage import ObjectStore
from train_service.checkpoints.coverage_records import read_part, row_ids_of, skipped_of
from train_service.domain.coverage_counts import (
    PREFIX,
    CoverageCounts,
    count_drawn,
    count_given,
    count_rows,
    is_epoch_done,
    last_epoch,
    last_pass,
)
from train_service.domain.order import Ints, blocks_of, epoch_order, steps_per_epoch
from train_service.domain.spec import TrainingSpec, spec_of_job
from train_service.records.event_log import REPORT_INTERVAL_S, TRAIN_KIND, Event, EventKind, EventLog
from train_service.records.logs import LogReader, find_logs
from train_service.records.metrics_log import MetricPoint, metrics_page

# --- Coverage, metrics and logs ---

logger = logging.getLogger(__name__)

PATTERN = "trainingJobs/{j}"
# The basis of a coverage; see the contract.
OPTIMIZER, GIVEN, INDICES, NO_WITNESS = "OPTIMIZER", "GIVEN", "INDICES", "NONE"
FIRST_LOADER = f"{PREFIX}0"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The coverage of one epoch.

    `checkpoint` is the checkpoint up to which rows were counted; empty if there is none yet.
    """

    training_job: str
    epoch: int
    checkpoint: str
    counts: CoverageCounts
    epoch_done: bool
    # Steps of the epoch that the loss scaler skipped.
    skipped_steps: int = 0
    witness: str = OPTIMIZER
    # For a program: the split.
    shard: str = ""


class RunRecords:
    """Read access to the records of runs.

    All methods block on the store, so call them from threads. Names are `trainingJobs/{j}`.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._jobs = Jobs(store, TRAIN_KIND)

    def coverage(self, name: str, epoch: int, checkpoint: str, shard: str = "") -> Coverage:
        """Return how often each row of an epoch was consumed.

        `shard` is the split that a program read; empty means the training split. Raises `OutOfRange` for an epoch that
        the job does not have, `InvalidArgument` for a shard of a job without a program, `DataLoss` if a record is
        damaged, and `FailedPrecondition` if only a deleted dataset version knew the rows.
        """
        names.parse("name", name, PATTERN)
        job = self._jobs.get(name, name)
        spec = spec_of_job(job.spec["training"], job.choices)
        if spec.program is None:
            if shard:
                raise invalid_field("shard", shard, f"{name} has no program: leave it out")
            _check_epoch(name, epoch, spec.epochs)
        split = self._train_split(job, spec) if spec.program is None else None
        while True:
            entry = self._checkpoint(name, checkpoint)
            try:
                if split is None:
                    return self._count_shard(name, spec, shard or spec.train_split, epoch, entry)
                return self._count(name, spec, split, epoch, entry)
            except DataLoss:
                # Retention may have deleted the checkpoint meanwhile; then the name resolves to another one.
                if entry is None or entry == self._checkpoint(name, checkpoint):
                    raise

    def _count(
        self, name: str, spec: TrainingSpec, split: Split, epoch: int, entry: CheckpointEntry | None
    ) -> Coverage:
        steps = steps_per_epoch(split.row_count, spec.global_batch_size)
        begin, end = epoch * steps, (epoch + 1) * steps
        parts = load_checkpoint(self._store, entry.folder, entry.manifest_sha256).content.coverage if entry else ()
        skipped: list[Ints] = []
        skipped_steps: set[int] = set()

        def consumed() -> Iterator[Ints]:
            for part in parts:
                if part.first_step < end and part.end_step > begin:
                    table = read_part(self._store, part)
                    rows, steps = skipped_of(table, epoch)
                    skipped.append(rows)
                    skipped_steps.update(steps)
                    yield row_ids_of(table, epoch)

        try:
            counts = count_rows(consumed(), split.first_row_id, split.row_count, skipped_parts=skipped)
        except ValueError as error:
            raise DataLoss(f"the record of what {name} consumed is wrong: {error}", reason="WRONG_ROW_IDS") from None
        return Coverage(
            training_job=name,
            epoch=epoch,
            checkpoint=entry.name if entry else "",
            counts=counts,
            epoch_done=entry is not None and entry.step >= end,
            skipped_steps=len(skipped_steps),
        )

    def _count_shard(
        self, name: str, spec: TrainingSpec, shard: str, epoch: int, entry: CheckpointEntry | None
    ) -> Coverage:
        """Count the rows by a checkpoint's positions. The checkpoint is a program's."""
        saved = None
        if entry is not None:
            content = load_program_checkpoint(self._store, entry.folder, entry.manifest_sha256)
            saved = content.positions.get(shard)
            # The first loader stands for the training split of a program that reads its own data.
            loader = shard if shard in content.indices or shard != spec.train_split else FIRST_LOADER
            if saved is None and loader in content.indices:
                return self._count_loader(name, loader, epoch, entry, content.indices[loader])
        if entry is None or saved is None:
            # The program reads its own data, or has not been given a row of this split.
            _check_epoch(name, epoch, 1)
            nothing = CoverageCounts(
                row_count=0, seen_once=0, missing=0, repeated=0, missing_row_ids=[], repeated_row_ids=[]
            )
            return Coverage(
                training_job=name,
                epoch=epoch,
                checkpoint=entry.name if entry else "",
                counts=nothing,
                epoch_done=False,
                witness=NO_WITNESS,
                shard=shard,
            )
        _check_epoch(name, epoch, last_epoch(saved) + 1)
        try:
            version = load_version(self._store, spec.dataset_version)
        except NotFound as error:
            raise _version_gone(name, spec, error) from None
        groups = VersionReader(self._store, version).row_groups(shard).row_counts
        order = epoch_order(blocks_of(groups, spec.lanes), spec.lanes, spec.seed, epoch, spec.window_rows)
        return Coverage(
            training_job=name,
            epoch=epoch,
            checkpoint=entry.name,
            counts=count_given(saved["given"], order, version.split(shard).first_row_id),
            epoch_done=is_epoch_done(saved, epoch),
            witness=GIVEN,
            shard=shard,
        )

    def _count_loader(
        self, name: str, loader: str, epoch: int, entry: CheckpointEntry, record: Mapping[str, Any]
    ) -> Coverage:
        """Count the indices that a program's own loader gave it."""
        _check_epoch(name, epoch, last_pass(dict(record)) + 1)
        return Coverage(
            training_job=name,
            epoch=epoch,
            checkpoint=entry.name,
            counts=count_drawn(dict(record), epoch),
            epoch_done=record["done"] > epoch,
            witness=INDICES,
            shard=loader,
        )

    def metrics(self, name: str, after_step: int, page_size: int, page_token: str) -> tuple[list[MetricPoint], str]:
        """Return a page of points after `after_step`. The second value is the token of the next page."""
        names.parse("name", name, PATTERN)
        self._jobs.get(name, name)
        return metrics_page(self._store, name, after_step, page_size, page_token)

    def logs(self, name: str, attempt: int, rank: int | None, follow: bool) -> LogReader:
        """Return a reader of an attempt's log.

        It reads one rank or all. Attempt 0 is the newest.

        Raises `NotFound` if there is no log and, with `follow`, none will be written.
        """
        names.parse("name", name, PATTERN)
        if attempt < 0:
            raise invalid_field("attempt", attempt, "use 0 for the newest, or the number of an attempt")
        if rank is not None and rank < -1:
            raise invalid_field("rank", rank, "use -1 for the attempt's own process, or a rank from 0")
        return find_logs(self._store, self._jobs, name, attempt, rank, follow)

    def _train_split(self, job: JobRecord, spec: TrainingSpec) -> Split:
        """Return the training split of the job.

        It comes from the job's record, because the version may have been deleted since the run.

        Jobs of earlier releases have no such record; for them the version is read.
        """
        if split := job.spec.get("train_split"):
            return Split(**fields_of(Split, split))
        try:
            return load_version(self._store, spec.dataset_version).split(spec.train_split)
        except NotFound as error:
            raise _version_gone(job.name, spec, error) from None

    def _checkpoint(self, name: str, checkpoint: str) -> CheckpointEntry | None:
        registry = CheckpointRegistry(self._store, name)
        if not checkpoint:
            return registry.newest()
        names.parse("checkpoint", checkpoint, f"{PATTERN}/checkpoints/{{c}}")
        if not checkpoint.startswith(f"{name}/"):
            raise invalid_field("checkpoint", checkpoint, f"name one of {name}")
        is_final = checkpoint == f"{name}/checkpoints/{FINAL}"
        entry = registry.poll(lambda view: view.final() if is_final else view.find(checkpoint))
        if entry is None:
            raise not_found(checkpoint)
        return entry


def _check_epoch(name: str, epoch: int, epochs: int) -> None:
    if not epochs:
        raise OutOfRange(
            f"epoch {epoch} is none of {name}, which was imported and read no rows",
            reason="EPOCH_OUT_OF_RANGE",
            metadata={"resource": name, "epochs": "0"},
        )
    if not 0 <= epoch < epochs:
        raise OutOfRange(
            f"epoch {epoch} is none of {name}; use 0 to {epochs - 1}",
            reason="EPOCH_OUT_OF_RANGE",
            metadata={"resource": name, "epochs": str(epochs)},
            fields=[("epoch", f"use 0 to {epochs - 1}")],
        )


def _version_gone(name: str, spec: TrainingSpec, error: NotFound) -> FailedPrecondition:
    return FailedPrecondition(
        f"which rows {name} had to consume is not known any more: {error.message}",
        reason="VERSION_GONE",
        metadata={"resource": name, "dataset_version": spec.dataset_version},
    )


# --- Files of a checkpoint ---

KIND = "download"
# A state that no download ever has, so the age of the marker alone decides; a reader renews its marker.
NEVER = "ENDED"
RENEW_EVERY_S = REFERENCE_APPEARS_TIMEOUT_S / 4
# A job's best checkpoint may change while it is being marked.
TRIES = 5


@dataclass(frozen=True)
class CheckpointListing:
    """The message before the files. `files` are all of them, the manifest first."""

    entry: CheckpointEntry
    files: list[CheckpointFile]


@dataclass(frozen=True)
class FileBegin:
    """The beginning of a file's bytes. The next bytes are those of `file` from `offset` on."""

    file: CheckpointFile
    offset: int


Part = CheckpointListing | FileBegin | bytes


class CheckpointReader:
    """A reader of checkpoint files. `clock` returns monotonic seconds."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock

    def read(self, name: str, manifest_sha256: str, path: str, offset: int) -> Generator[Part, None, None]:
        """Yield the listing, then each file.

        Files begin with the one at `path`, and its bytes with `offset`.

        An empty `path` means the first file. Holds `PIECE_BYTES` in memory. Raises the errors that `GetCheckpoint`
        lists; errors of the request are raised before the first part. While the generator is open, and for ten minutes
        after the death of this process, neither retention nor a deletion of the job removes the files.
        """
        if offset < 0:
            raise invalid_field("offset", offset, "use 0 or more")
        if offset and not path:
            raise invalid_field("path", path, "name the file that the offset is in")
        uid = uuid.uuid4().hex
        entry = self._hold(name, uid)
        try:
            if manifest_sha256 and manifest_sha256 != entry.manifest_sha256:
                raise Conflict(
                    f"{name} means {entry.name} with the manifest {entry.manifest_sha256} by now, not the one that was "
                    "begun; begin anew, or name the checkpoint itself",
                    reason="CHECKPOINT_CHANGED",
                    metadata={"resource": entry.name, "manifest_sha256": entry.manifest_sha256},
                )
            files = files_of(self._store, entry.folder, entry.manifest_sha256)
            left = files[_place(files, path, offset) :]
            yield CheckpointListing(entry, files)
            held_at = self._clock()
            for file in left:
                yield FileBegin(file, offset)
                for piece in read_file(self._store, file, offset):
                    yield piece
                    if self._clock() - held_at > RENEW_EVERY_S:
                        self._mark(entry, uid)
                        held_at = self._clock()
                offset = 0
        finally:
            release(self._store, entry.name, KIND, uid)

    def _hold(self, name: str, uid: str) -> CheckpointEntry:
        for _ in range(TRIES):
            entry = resolve_any(self._store, "name", name)
            if self._mark(entry, uid):
                return entry
            # Retention is removing this checkpoint. If the name is a job's, it resolves to another checkpoint next
            # time.
            release(self._store, entry.name, KIND, uid)
        raise FailedPrecondition(
            f"{name} means another checkpoint each time; name one of its checkpoints", fields=[("name", "name one")]
        )

    def _mark(self, entry: CheckpointEntry, uid: str) -> bool:
        """Mark the checkpoint as in use. Return whether the registry still names it."""
        try:
            return keep(self._store, entry.name, entry.folder, KIND, uid, f"downloads/{uid}", ends_in=NEVER)
        except ResourceExhausted as error:  # an operator who frees a full store may want its checkpoints first
            logger.warning("%s is read without being kept: %s", entry.name, error.message)
            return True


def _place(files: list[CheckpointFile], path: str, offset: int) -> int:
    """Return the index of the file at `path`."""
    if not path:
        return 0
    for place, file in enumerate(files):
        if file.path == path:
            if offset > file.size_bytes:
                raise OutOfRange(
                    f"offset {offset} is beyond the end of {path}, which has {file.size_bytes} bytes",
                    reason="OFFSET_OUT_OF_RANGE",
                    metadata={"size_bytes": str(file.size_bytes)},
                    fields=[("offset", f"use 0 to {file.size_bytes}")],
                )
            return place
    raise invalid_field("path", path, "the checkpoint has no such file; its manifest names them")


# --- Followed job ---

# The newest events that are kept for watchers. Those who are further behind read the log themselves.
KEPT_EVENTS = 256
# How often events and what the job waits for are read, a little below the longest interval between two readings.
SIDE_INTERVAL_S = 0.9
WAITING = (JobState.PENDING, JobState.RECOVERING)


class View(Protocol):
    """A job as clients see it."""

    @property
    def record(self) -> JobRecord: ...

    @property
    def waiting_for(self) -> str: ...


V = TypeVar("V", bound=View)


@dataclass(frozen=True)
class JobReading(Generic[V]):
    """A job and its events at one time.

    `states` are those since the job was first read, oldest first, and `view` shows the newest of them. `events` are the
    newest events up to the number `last_sequence`. They were read after the states.
    """

    states: tuple[JobRecord, ...]
    view: V
    events: tuple[Event, ...]
    last_sequence: int

    def has(self, record: JobRecord) -> bool:
        """Return whether the reading is not older than this state of the job, or is of another job of its name."""
        return record in self.states or record.uid != self.states[0].uid

    def states_after(self, record: JobRecord) -> Sequence[JobRecord]:
        """Return the states after `record`, oldest first; of another job all. Empty if the reading is older."""
        if record.uid != self.states[0].uid:
            return self.states
        return self.states[self.states.index(record) + 1 :] if record in self.states else ()

    def events_after(self, sequence: int) -> Sequence[Event] | None:
        """Return the events after the number `sequence`, or None if the reading has only later ones."""
        missing = self.last_sequence - sequence
        if missing <= 0:
            return ()
        return self.events[-missing:] if missing <= len(self.events) else None


class FollowedJob(Generic[V]):
    """Reads one job again and again, see `shared.streaming.Follower`.

    `describe` returns the view of a state, and `waiting_for` what the next attempt waits for. Both read the store.

    The job's log is read each time: one request if nothing is new. Once in `SIDE_INTERVAL_S` comes one more, for the
    next event or, in turns, for what a waiting job waits for. After a new state all events are read.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        describe: Callable[[JobRecord], V],
        waiting_for: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._name = name
        self._describe = describe
        self._waiting_for = waiting_for
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = ResourceLog(store, log_prefix(name))
        self._event_log = EventLog(store, name)
        self._reading: JobReading[V] | None = None
        self._side_read_at = 0.0
        self._turn = 0
        # An attempt, and by how much its worker's clock was ahead at most.
        self._ahead = (0, 0.0)

    @property
    def number(self) -> int:
        return self._log.newest_known.number if self._log.newest_known else 0

    def read(self) -> JobReading[V]:
        """Return the job as it is now. Raises `NotFound`."""
        before = self._log.newest_known
        record = self._log.head()
        job = JobRecord.from_state(record.state) if record else None
        if record is None or job is None or job.state is JobState.DELETED:
            raise not_found(self._name)
        there = self._reading
        if there is None or job.uid != there.view.record.uid:
            # A job that was created anew has events of its own, which begin with number 1.
            last = self._event_log.last_sequence() if there is None else 0
            if there is not None:
                self._event_log = EventLog(self._store, self._name)
            there = JobReading((job,), self._describe(job), (), last)
            self._reading = self._with_events(there, to_the_end=True, is_new_state=True)
        elif record is not before:
            there = replace(there, states=(*there.states, *self._since(there.states[-1], record)))
            there = replace(there, view=self._describe(job))
            self._reading = self._with_events(there, to_the_end=True, is_new_state=True)
        elif job.state.final or self._clock() - self._side_read_at >= SIDE_INTERVAL_S:
            self._reading = self._with_side(there)
        else:
            return there
        self._side_read_at = self._clock()
        return self._reading

    def _since(self, seen: JobRecord, record: Record) -> list[JobRecord]:
        """Return the states after `seen` up to that of `record`, oldest first."""
        newest = JobRecord.from_state(record.state)
        behind = [newest]
        number = record.number - 1
        while (earlier := self._log.read(number)) is not None:
            job = JobRecord.from_state(earlier.state)
            if job == seen or job.uid != newest.uid:
                break
            behind.append(job)
            number -= 1
        return behind[::-1]

    def _with_side(self, there: JobReading[V]) -> JobReading[V]:
        """Return the reading with what may change without a new state."""
        job = there.view.record
        self._turn += 1
        if job.state not in WAITING or self._turn % 2:
            # A job that waits has no attempt that writes events, but events of the last one may come late.
            return self._with_events(there, to_the_end=job.state.final)
        if self._waiting_for(self._name) == there.view.waiting_for:
            return there
        return replace(there, view=self._describe(job))

    def _with_events(self, there: JobReading[V], *, to_the_end: bool, is_new_state: bool = False) -> JobReading[V]:
        """Return the reading with the events that were written since.

        Reports come `REPORT_INTERVAL_S` apart. So unless asked to read `to_the_end`, no event is looked for right
        behind a recent report.

        Events are gathered only after the end of a job. So those of a state that has been read before are records.
        """
        found: list[Event] = []
        for event in self._event_log.after(there.last_sequence, also_gathered=is_new_state):
            found.append(event)
            is_recent = event.kind is EventKind.PROGRESS and self._age_s(event) < REPORT_INTERVAL_S
            if is_recent and not to_the_end:
                break
        if not found:
            return there
        events = (*there.events, *found)[-KEPT_EVENTS:]
        return replace(there, events=events, last_sequence=found[-1].sequence)

    def _age_s(self, event: Event) -> float:
        """Return how long ago an event was written, as far as the worker's clock is not found to be ahead."""
        attempt, ahead_s = self._ahead
        age_s = self._wall_clock() - event.time
        ahead_s = max(-age_s, ahead_s if event.attempt == attempt else 0.0)
        self._ahead = (event.attempt, ahead_s)
        return age_s + ahead_s
