"""The jobs of one kind in the store: creating, reading and cancelling them, and finding unfinished ones.

A job's log is in the folder of its resource (`{folder}/log`). A marker below `live/{kind}` names every job that may not
be final, so that a reconciler need not read the whole history.

A job that is deleted goes through DELETING while its objects are removed. Users write a marker and then check that the
job exists. A deletion first records DELETING and then looks for users, so at least one of the two sees the other. While
`deleted_from` is set the deletion can be reverted (`undone`). Once no user was found the log records that
(`condemned`), and it cannot be reverted any more. So if several callers delete at the same time, none can restore a job
that another is removing.

Each change of a job is noted for the index of jobs (`shared.jobs.index`), whose entry may be behind the job's log.

A writer puts a note before it appends to a job's log. The note names the record that is about to be written. So the
note outlives the record's writer, whichever of the two writes is its last, and a merge of the index can
tell whether the record is there yet. A note is an empty object whose key says everything, so a listing reads a thousand
notes at once.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shared.errors import FailedPrecondition, already_exists, not_found
from shared.jobs.transitions import (
    JobRecord,
    JobState,
    check_etag,
    follow_deleted,
    request_cancel,
    request_resume,
    request_suspend,
    undo_delete,
)
from shared.resource_log import ResourceLog, uid_of
from shared.storage import ObjectMissing, ObjectStore

# --- Jobs ---

WAITING = "waiting.txt"
LEAVING = "leaving.txt"
MARKERS_AT_ONCE = 16


@dataclass(frozen=True)
class LiveJob:
    """A marker of a job that may not be final.

    `folder` is that of the resource, `marked_at` is in seconds since the epoch, and `marker` is the key of the marker
    object, which belongs to the job's `generation`.
    """

    uid: str
    folder: str
    marked_at: float
    marker: str
    generation: int


class Jobs:
    """Jobs of one `kind`, e.g. `import` or `train`."""

    def __init__(self, store: ObjectStore, kind: str) -> None:
        self._store = store
        self.kind = kind
        self._changes = Changes(store, kind)
        # The markers as of the last `live`, by their keys. A marker never changes what it says, but for its time.
        self._markers: dict[str, LiveJob] = {}

    def create(self, folder: str, job: JobRecord) -> JobRecord:
        """Make the job durable.

        Raises `AlreadyExists` if the folder has a job that was not deleted, or if this very job was created and deleted
        before.
        """
        # The marker first: a job without one would never run. A job that has a runner needs none.
        marker = "" if job.runner else self._mark(folder, job, job.generation)
        log = self._log(folder)
        before = log.head()
        last = JobRecord.from_state(before.state) if before else None
        if last is None or (last.state is JobState.DELETED and last.uid != job.uid):
            job = follow_deleted(job, last) if last else job
            if log.append(before, job.as_state(), job.attempt):
                return job
        there = self.find(folder)
        if there is not None and there.uid == job.uid:
            return there  # an earlier call made it, and its answer was lost
        if marker:
            self._store.delete(marker)
        raise already_exists(job.name)

    def get(self, folder: str, name: str) -> JobRecord:
        """Return the job. Raises `NotFound` that names `name`."""
        job = self.find(folder)
        if job is None:
            raise not_found(name)
        return job

    def find(self, folder: str) -> JobRecord | None:
        """Return the job, or None if it never existed or was deleted."""
        job = self.newest(folder)
        return None if job is None or job.state is JobState.DELETED else job

    def newest(self, folder: str) -> JobRecord | None:
        """Return the job as `find` does, but also the tombstone of a deleted one."""
        record = ResourceLog(self._store, log_prefix(folder)).head()
        return JobRecord.from_state(record.state) if record else None

    def newest_of(self, folder: str, uid: str) -> JobRecord | None:
        """Return the job with that `uid`, or its tombstone if another job has its name since. None if it never existed.

        It is cheap if the name still belongs to the job. Otherwise it reads all records of its successors.
        """
        log = ResourceLog(self._store, log_prefix(folder))
        record = log.head()
        while record is not None and record.state["uid"] != uid:
            record = log.read(record.number - 1)
        return JobRecord.from_state(record.state) if record else None

    def made_by(self, request_id: str, name: str) -> JobRecord | None:
        """Return the job of that name if this request created it, else None.

        Raises `NotFound` if it was deleted since: the first answer cannot be given any more.
        """
        if not request_id:
            return None
        job = self.newest_of(name, uid_of(request_id, name))
        # Uids of jobs of earlier releases do not derive from their requests.
        if job is None and (newest := self.newest(name)) and newest.spec.get("request_id") == request_id:
            job = newest
        if job is not None and job.state is JobState.DELETED:
            raise not_found(name, f"request_id {request_id} made it, and it was deleted since; use a new UUID4")
        return job

    def cancel(self, folder: str, name: str, etag: str = "", uid: str = "") -> JobRecord:
        """Request the job's end. With `uid` only for that job, and for no later one of its name.

        Raises `NotFound`, and `Conflict` if `etag` is given and not the current generation.
        """
        return self._request(folder, name, etag, request_cancel, uid)

    def suspend(self, folder: str, name: str, etag: str = "") -> JobRecord:
        """Request a pause, as `cancel` does. Raises `FailedPrecondition` for a job that is final or being ended."""
        return self._request(folder, name, etag, request_suspend)

    def resume(self, folder: str, name: str, etag: str = "") -> JobRecord:
        """Request the continuation, as `cancel` does. Raises `FailedPrecondition` if it succeeded or is being ended."""
        while True:
            read = self.get(folder, name)
            if read.unattended:
                # The marker first, as in `create`. It carries the next generation, so that no reconciler removes it
                # because the job still reads as final.
                self._mark(folder, read, read.generation + 1)

            def unless_unmarked(newest: JobRecord, now: float, read: JobRecord = read) -> JobRecord:
                """Resume the job, unless it ended, or was resumed and ended again, meanwhile: it has no marker then."""
                marked = read.unattended and newest.generation == read.generation
                return newest if newest.unattended and not marked else request_resume(newest, now)

            after = self._request(folder, name, etag, unless_unmarked)
            if not after.state.final:
                return after

    def _request(
        self, folder: str, name: str, etag: str, request: Callable[[JobRecord, float], JobRecord], uid: str = ""
    ) -> JobRecord:
        def decide(job: JobRecord) -> JobRecord:
            if uid and job.uid != uid:
                raise not_found(name, "it was deleted, and made anew")
            check_etag(job, etag)
            try:
                return request(job, time.time())
            except ValueError as error:
                raise FailedPrecondition(
                    f"{error}; wait, or ask for something else", reason="WRONG_STATE", metadata={"resource": name}
                ) from None

        self.get(folder, name)
        return self.transition(folder, decide)

    def transition(
        self, folder: str, decide: Callable[[JobRecord], JobRecord], attempt: int | None = None
    ) -> JobRecord:
        """Append the state that `decide` returns for the newest state, unless it returns that state itself."""

        def step(record: Any) -> dict[str, Any] | None:
            before = JobRecord.from_state(record.state)
            after = decide(before)
            return None if after is before else after.as_state()

        record = self._log(folder).update(step, attempt)
        assert record is not None
        return JobRecord.from_state(record.state)

    def live(self) -> list[LiveJob]:
        """Return each live job once, by its newest marker, in the order of marking."""
        keys = [info.key for info in self._store.list(f"live/{self.kind}")]
        known = {key: job for key in keys if (job := self._markers.get(key))}
        unknown = [key for key in keys if key not in known]
        with ThreadPoolExecutor(MARKERS_AT_ONCE) as pool:
            known |= {job.marker: job for job in pool.map(self._read_marker, unknown) if job}
        self._markers = known
        found: dict[str, LiveJob] = {}
        for job in known.values():
            if job.uid not in found or job.generation > found[job.uid].generation:
                found[job.uid] = job
        return sorted(found.values(), key=lambda job: (job.marked_at, job.uid))

    def _read_marker(self, key: str) -> LiveJob | None:
        try:
            marker = json.loads(self._store.get(key))
        except ObjectMissing:  # another reconciler was faster
            return None
        uid, generation, _ = key.rsplit("/", 1)[-1].split(".")
        return LiveJob(uid, marker["folder"], marker["marked_at"], key, int(generation))

    def forget(self, live: LiveJob) -> None:
        """Remove the marker of a job that is final."""
        self._store.delete(live.marker)

    def progress(self, folder: str) -> dict[str, Any]:
        """Return the attempt's last reported progress. Empty before the first report."""
        try:
            progress: dict[str, Any] = json.loads(self._store.get(progress_key(folder)))
        except ObjectMissing:
            return {}
        return progress

    def note_report(self, folder: str) -> None:
        """Note for the index that an attempt has reported."""
        self._changes.note(folder)

    def wait_for(self, folder: str, what: str) -> None:
        """Record for clients what the next attempt waits for. Empty: nothing."""
        if what:
            self._store.put(f"{folder}/{WAITING}", what.encode())
        else:
            self._store.delete(f"{folder}/{WAITING}")
        self._changes.note(folder)

    def waiting_for(self, folder: str) -> str:
        """Return what the next attempt waits for. Empty if it does not wait."""
        try:
            return bytes(self._store.get(f"{folder}/{WAITING}")).decode()
        except ObjectMissing:
            return ""

    def note_leaving(self, folder: str, attempt: int) -> None:
        """Record that a node of this attempt will be taken away: its process may end with it without a report."""
        self._store.put(f"{folder}/{LEAVING}", str(attempt).encode())

    def was_leaving(self, folder: str, attempt: int) -> bool:
        """Return whether `note_leaving` recorded this attempt."""
        try:
            return bytes(self._store.get(f"{folder}/{LEAVING}")).decode() == str(attempt)
        except ObjectMissing:
            return False

    def forget_leaving(self, folder: str) -> None:
        """Remove the record of `note_leaving`: the attempt ended for another reason."""
        self._store.delete(f"{folder}/{LEAVING}")

    def open_log(self, folder: str) -> ResourceLog:
        """Open a job's log for a reader, which reads it again and again: one request where nothing is new."""
        return ResourceLog(self._store, log_prefix(folder))

    def _log(self, folder: str) -> ResourceLog:
        """Open the job's log for a writer, who notes each change for the index (`shared.jobs.index`)."""
        return ResourceLog(self._store, log_prefix(folder), announce=partial(self._changes.note, folder))

    def _mark(self, folder: str, job: JobRecord, generation: int) -> str:
        marker = f"live/{self.kind}/{job.uid}.{generation}.json"
        self._store.put(marker, json.dumps({"folder": folder, "marked_at": time.time()}).encode())
        return marker


def log_prefix(folder: str) -> str:
    return f"{folder}/log"


def progress_key(folder: str) -> str:
    return f"{folder}/progress.json"


# --- Deletion ---

# At most this many objects are deleted between two reads of the log, or as many as one request deletes.
KEYS_BETWEEN_POLLS = 32


def while_deleting(jobs: Jobs, job: JobRecord, decide: Callable[[JobRecord], JobRecord]) -> JobRecord:
    """Append the state that `decide` returns, if the newest state is this job's and DELETING."""

    def step(newest: JobRecord) -> JobRecord:
        deleting = newest.uid == job.uid and newest.state is JobState.DELETING
        return decide(newest) if deleting else newest

    return jobs.transition(job.name, step)


def remove_objects(store: ObjectStore, jobs: Jobs, job: JobRecord, keys: Sequence[str]) -> bool:
    """Delete `keys`, listed before, while the log's state of this job is unchanged.

    The log is read repeatedly: if another process has finished the deletion, a new job of the name may have created
    objects with the same keys. Return whether all keys are deleted.
    """
    step = max(KEYS_BETWEEN_POLLS, store.keys_a_deletion)
    for start in range(0, max(1, len(keys)), step):
        now = jobs.newest(job.name)
        if now is None or now.uid != job.uid or now.state is not job.state:
            return False
        store.delete_all(keys[start : start + step])
    return True


def undone(job: JobRecord) -> JobRecord:
    """Return the job's state before the deletion, or the job itself if it cannot be reverted."""
    return undo_delete(job, job.update_time) if job.deleted_from is not None else job


def condemned(job: JobRecord) -> JobRecord:
    """Return the job with a deletion that cannot be reverted."""
    return replace(job, deleted_from=None) if job.deleted_from is not None else job


# --- Notes of changed jobs ---

# The kinds of jobs that have an index. Notes of other kinds would never be removed.
INDEXED_KINDS = frozenset({"train", "sweep", "import"})
# The number in a note of a change that is written already, and is not in the log: a report, or what a job waits for.
NO_RECORD = 0
KEY = re.compile(r"(?P<name>.+)\.(?P<number>\d+)\.[0-9a-f]+")


@dataclass(frozen=True)
class Change:
    """A note: the job `name` changes with the record `number` of its log. `key` is the note's own."""

    name: str
    number: int
    key: str


class Changes:
    """The notes of one kind of jobs. A kind without an index has none."""

    def __init__(self, store: ObjectStore, kind: str) -> None:
        self._store = store
        self._folder = f"{folder_of_index(kind)}/changes"
        self._is_indexed = kind in INDEXED_KINDS

    def note(self, name: str, number: int = NO_RECORD) -> None:
        """Note that record `number` of the job's log is about to be written."""
        if self._is_indexed:
            # Each note has a key of its own: a reader removes those that it has read, and no later one.
            self._store.put(f"{self._folder}/{name.replace('/', ',')}.{number}.{uuid.uuid4().hex[:12]}", b"")

    def read(self) -> list[Change]:
        """Return all notes, in the order of the jobs' names."""
        keys = [info.key for info in self._store.list(self._folder)]
        found = [(match, key) for key in keys if (match := KEY.fullmatch(key.rsplit("/", 1)[-1]))]
        changes = [Change(match["name"].replace(",", "/"), int(match["number"]), key) for match, key in found]
        return sorted(changes, key=lambda one: (one.name, one.number))

    def forget(self, changes: Iterable[Change]) -> None:
        self._store.delete_all(change.key for change in changes)


def folder_of_index(kind: str) -> str:
    return f"index/{kind}/v1"
