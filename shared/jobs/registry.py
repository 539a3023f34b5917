"""The jobs of one kind in the store: creating, reading, cancelling, and finding those still to be done.

A job's log lives in the folder of the resource that it makes (`{folder}/log`). A marker below `live/{kind}` names every
job that may not be final, so that a reconciler need not read all the history there is.

A job that is deleted goes through DELETING, for those that take away what it made.
Users leave a marker and then look whether the job is there; a deletion says DELETING first and looks for users then, so
one of both sees the other. While `deleted_from` is set there is a way back (`undone`); once no user was found the log
says so (`condemned`), and there is none: of several that delete at the same time none can give back what another is
removing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from shared.log import ResourceLog
from shared.requests import uid_of
from shared.storage import ObjectMissing, ObjectStore

# --- Jobs ---

WAITING = "waiting.txt"
LEAVING = "leaving.txt"


@dataclass(frozen=True)
class LiveJob:
    """`folder` is that of the resource; `marked_at` in seconds since the epoch; `marker` the object that says it,
    of the job's `generation`."""

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

    def create(self, folder: str, job: JobRecord) -> JobRecord:
        """Makes the job durable. Raises `AlreadyExists` when there is one in the folder that was not deleted, or this
        very one was made and deleted before."""
        # The marker first: a job without one would never be done. One that has a runner is done without.
        marker = "" if job.runner else self._mark(folder, job, job.generation)
        log = ResourceLog(self._store, log_prefix(folder))
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
        """Raises `NotFound` naming `name`."""
        job = self.find(folder)
        if job is None:
            raise not_found(name)
        return job

    def find(self, folder: str) -> JobRecord | None:
        """None where none ever was, or where it was deleted."""
        job = self.newest(folder)
        return None if job is None or job.state is JobState.DELETED else job

    def newest(self, folder: str) -> JobRecord | None:
        """As `find`, but gives the tombstone of a deleted one, too."""
        record = ResourceLog(self._store, log_prefix(folder)).head()
        return JobRecord.from_state(record.state) if record else None

    def newest_of(self, folder: str, uid: str) -> JobRecord | None:
        """As `newest`, of the job of that `uid`: its tombstone where another has taken its name since. None where it
        never was. Cheap where the name is its own; else it reads all that others wrote."""
        log = ResourceLog(self._store, log_prefix(folder))
        record = log.head()
        while record is not None and record.state["uid"] != uid:
            record = log.read(record.number - 1)
        return JobRecord.from_state(record.state) if record else None

    def since(self, folder: str, name: str, seen: JobRecord) -> list[JobRecord]:
        """The states of the job behind `seen`, which it had once, oldest first: none where it has `seen` still. They
        cost one read each. Of a job that was made anew since, all its own states.

        Raises `NotFound` naming `name` where it was deleted.
        """
        log = ResourceLog(self._store, log_prefix(folder))
        record = log.head()
        newest = JobRecord.from_state(record.state) if record else None
        if record is None or newest is None or newest.state is JobState.DELETED:
            raise not_found(name)
        behind: list[JobRecord] = []
        while record is not None:
            job = JobRecord.from_state(record.state)
            if job == seen or job.uid != newest.uid:
                break
            behind.append(job)
            record = log.read(record.number - 1)
        return behind[::-1]

    def made_by(self, request_id: str, name: str) -> JobRecord | None:
        """The job of that name if this request made it; somebody else's is not the answer to it.

        Raises `NotFound` where it was deleted since: the first answer cannot be given any more.
        """
        if not request_id:
            return None
        job = self.newest_of(name, uid_of(request_id, name))
        # Jobs of earlier releases have uids that do not come from their requests.
        if job is None and (newest := self.newest(name)) and newest.spec.get("request_id") == request_id:
            job = newest
        if job is not None and job.state is JobState.DELETED:
            raise not_found(name, f"request_id {request_id} made it, and it was deleted since; use a new UUID4")
        return job

    def cancel(self, folder: str, name: str, etag: str = "", uid: str = "") -> JobRecord:
        """Writes the wish; with `uid` given only for that job, and for no later one of its name.

        Raises `NotFound`, and `Conflict` when `etag` is given and not the present generation.
        """
        return self._request(folder, name, etag, request_cancel, uid)

    def suspend(self, folder: str, name: str, etag: str = "") -> JobRecord:
        """As `cancel`. Raises `FailedPrecondition` for a job that is over, or is being ended."""
        return self._request(folder, name, etag, request_suspend)

    def resume(self, folder: str, name: str, etag: str = "") -> JobRecord:
        """As `cancel`. Raises `FailedPrecondition` for a job that succeeded, or is being ended."""
        while True:
            read = self.get(folder, name)
            if read.unattended:
                # The marker first, as in `create`; of the generation to come, so that no reconciler takes it away
                # because the job, as it reads it still, is over.
                self._mark(folder, read, read.generation + 1)

            def unless_unmarked(newest: JobRecord, now: float, read: JobRecord = read) -> JobRecord:
                """As it is where it has ended since, or was resumed and ended again: no marker is for that."""
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
        """Appends what `decide` makes of the newest state; nothing where it returns that state itself."""

        def step(record: Any) -> dict[str, Any] | None:
            before = JobRecord.from_state(record.state)
            after = decide(before)
            return None if after is before else after.as_state()

        record = ResourceLog(self._store, log_prefix(folder)).update(step, attempt)
        assert record is not None
        return JobRecord.from_state(record.state)

    def live(self) -> list[LiveJob]:
        """Each once, by its newest marker; the one marked first comes first."""
        found: dict[str, LiveJob] = {}
        for info in self._store.list(f"live/{self.kind}"):
            try:
                marker = json.loads(self._store.get(info.key))
            except ObjectMissing:  # another reconciler was faster
                continue
            uid, generation, _ = info.key.rsplit("/", 1)[-1].split(".")
            job = LiveJob(uid, marker["folder"], marker["marked_at"], info.key, int(generation))
            if uid not in found or job.generation > found[uid].generation:
                found[uid] = job
        return sorted(found.values(), key=lambda job: job.marked_at)

    def forget(self, live: LiveJob) -> None:
        """Removes the marker of a job that is final."""
        self._store.delete(live.marker)

    def progress(self, folder: str) -> dict[str, Any]:
        """What the attempt last reported; empty before the first report."""
        try:
            progress: dict[str, Any] = json.loads(self._store.get(progress_key(folder)))
        except ObjectMissing:
            return {}
        return progress

    def wait_for(self, folder: str, what: str) -> None:
        """Notes for clients what the next attempt waits for; empty: nothing."""
        if what:
            self._store.put(f"{folder}/{WAITING}", what.encode())
        else:
            self._store.delete(f"{folder}/{WAITING}")

    def waiting_for(self, folder: str) -> str:
        """What the next attempt waits for; empty where it does not wait."""
        try:
            return bytes(self._store.get(f"{folder}/{WAITING}")).decode()
        except ObjectMissing:
            return ""

    def note_leaving(self, folder: str, attempt: int) -> None:
        """Notes that a node of this attempt will be taken away: its process may go with it before it can say so."""
        self._store.put(f"{folder}/{LEAVING}", str(attempt).encode())

    def was_leaving(self, folder: str, attempt: int) -> bool:
        """Whether that was noted of this attempt."""
        try:
            return bytes(self._store.get(f"{folder}/{LEAVING}")).decode() == str(attempt)
        except ObjectMissing:
            return False

    def forget_leaving(self, folder: str) -> None:
        """Takes back what was noted of an attempt: it ended for another reason."""
        self._store.delete(f"{folder}/{LEAVING}")

    def _mark(self, folder: str, job: JobRecord, generation: int) -> str:
        marker = f"live/{self.kind}/{job.uid}.{generation}.json"
        self._store.put(marker, json.dumps({"folder": folder, "marked_at": time.time()}).encode())
        return marker


def log_prefix(folder: str) -> str:
    return f"{folder}/log"


def progress_key(folder: str) -> str:
    return f"{folder}/progress.json"


# --- Deletion ---

# So many objects are deleted between two looks at the log.
KEYS_BETWEEN_POLLS = 32


def while_deleting(jobs: Jobs, job: JobRecord, decide: Callable[[JobRecord], JobRecord]) -> JobRecord:
    """Appends what `decide` makes of the newest state, while it is this same job and DELETING."""

    def step(newest: JobRecord) -> JobRecord:
        deleting = newest.uid == job.uid and newest.state is JobState.DELETING
        return decide(newest) if deleting else newest

    return jobs.transition(job.name, step)


def remove_objects(store: ObjectStore, jobs: Jobs, job: JobRecord, keys: Sequence[str]) -> bool:
    """Deletes `keys`, which were listed before, while the log says of this same job what it said when `job` was read.

    The log is read again as it goes on: where another process has finished the deletion, a new job of the name may have
    made objects of the same keys. Returns whether all of them are gone.
    """
    for start in range(0, max(1, len(keys)), KEYS_BETWEEN_POLLS):
        now = jobs.newest(job.name)
        if now is None or now.uid != job.uid or now.state is not job.state:
            return False
        for key in keys[start : start + KEYS_BETWEEN_POLLS]:
            store.delete(key)
    return True


def undone(job: JobRecord) -> JobRecord:
    """What it was before, with the time that it had; as it is where there is no way back."""
    return undo_delete(job, job.update_time) if job.deleted_from is not None else job


def condemned(job: JobRecord) -> JobRecord:
    """DELETING for good."""
    return replace(job, deleted_from=None) if job.deleted_from is not None else job
