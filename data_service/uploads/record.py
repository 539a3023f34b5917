"""An upload's record.

Its state and transitions, its expiry, and the markers of the jobs that read it.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from data_service.uploads.chunks import chain_of
from shared import names
from shared.durable import Durable, as_state, fields_of
from shared.errors import STORE_OUTAGES, MillraceError, Unavailable, not_found
from shared.jobs import Jobs, JobState
from shared.log import OUTCOME_UNKNOWN, Record, ResourceLog, State
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

# --- Record ---
# An upload's state, its transitions, and its location in the store.

NAME_PATTERN = "datasets/{d}/uploads/{u}"


class UploadState(enum.StrEnum):
    #  OPEN ──▶ COMMITTED
    #    └──────────┴──▶ GONE
    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    # The tombstone: its bytes were deleted, and its id may be used again.
    GONE = "GONE"


@dataclass(frozen=True, kw_only=True)
class UploadRecord(Durable):
    """The complete state of an upload after one transition.

    Times are seconds since the epoch.
    """

    name: str
    # Its chunks are below the uid, so that a late write for a deleted upload never appears in the next one of the same
    # id.
    uid: str
    create_time: float
    update_time: float
    state: UploadState = UploadState.OPEN
    request_id: str = ""
    # A nonce of the present attempt to remove the upload, which fails if an import reads it. Until that is settled, no
    # import may begin to read it, no byte is accepted, and it is not committed.
    ending: str = ""
    # Clients put parts into the store directly, so that a chunk may be overwritten.
    presigned: bool = False
    # The uid of the dataset in which it was started: a later dataset of the same name has another. Empty: an earlier
    # release started it.
    dataset_uid: str = ""
    # Set by the commit.
    size_bytes: int = 0
    sha256: str = ""

    def as_state(self) -> dict[str, Any]:
        state: dict[str, Any] = as_state(self)
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> UploadRecord:
        return cls(**{**fields_of(cls, state), "state": UploadState(state["state"])})

    @property
    def chunks_prefix(self) -> str:
        return chunks_of(self.name, self.uid)

    def committed(self, size_bytes: int, sha256: str, now: float) -> UploadRecord:
        return replace(self, state=UploadState.COMMITTED, size_bytes=size_bytes, sha256=sha256, update_time=now)

    def gone(self, now: float) -> UploadRecord:
        return replace(self, state=UploadState.GONE, update_time=now)


def chunks_of(name: str, uid: str) -> str:
    return f"{name}/chunks/{uid}"


def log_of(store: ObjectStore, name: str) -> ResourceLog:
    return ResourceLog(store, f"{name}/log")


def find_upload(store: ObjectStore, name: str) -> UploadRecord | None:
    """Returns the upload; None if it never existed, or was deleted."""
    record = log_of(store, name).head()
    upload = UploadRecord.from_state(record.state) if record else None
    return None if upload is None or upload.state is UploadState.GONE else upload


def get_upload(store: ObjectStore, name: str, field: str = "name") -> UploadRecord:
    """Returns the upload; raises `InvalidArgument` naming `field`, and `NotFound`."""
    names.parse(field, name, NAME_PATTERN)
    upload = find_upload(store, name)
    if upload is None:
        raise not_found(name, "it was never started, or aborted, or it has expired; start an upload")
    return upload


def transition(store: ObjectStore, name: str, decide: Callable[[UploadRecord], UploadRecord]) -> UploadRecord:
    """Appends the state that `decide` returns for the newest; nothing if it returns the same object."""

    def step(record: Record | None) -> State | None:
        assert record is not None
        before = UploadRecord.from_state(record.state)
        after = decide(before)
        return None if after is before else after.as_state()

    record = log_of(store, name).update(step)
    assert record is not None
    return UploadRecord.from_state(record.state)


def may_end(name: str) -> Unavailable:
    """Returns the error for an upload whose removal is not settled yet."""
    return Unavailable(
        f"{name} is being aborted, unless an import reads it; try again, it is known in a moment",
        reason="UPLOAD_ENDING",
        metadata={"resource": name},
        retry_after_s=0.5,
    )


# --- Expiry ---
# An upload's present state: its bytes so far, and its expiry.

OPEN_FOR_S = 24 * 3600.0
COMMITTED_FOR_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Upload:
    """An upload at present.

    `expire_time` is in seconds since the epoch; `hashed_size` is the number of bytes from 0 whose digest this process
    has.
    """

    record: UploadRecord
    acknowledged_size: int
    expire_time: float
    hashed_size: int = 0


def as_it_is(store: ObjectStore, record: UploadRecord) -> Upload:
    if record.state is UploadState.COMMITTED:
        return Upload(record, record.size_bytes, record.update_time + COMMITTED_FOR_S, hashed_size=record.size_bytes)
    infos = list(store.list(record.chunks_prefix))
    chain = chain_of(record.chunks_prefix, ((int(info.key.rsplit("/", 1)[-1]), info.size_bytes) for info in infos))
    newest_byte = max((one.modified for one in infos), default=record.create_time)
    return Upload(record, chain.end, max(record.create_time, newest_byte) + OPEN_FOR_S)


def has_expired(store: ObjectStore, record: UploadRecord, now: float) -> bool:
    """Returns whether an OPEN or COMMITTED upload has expired.

    The chunks of a recent one are not listed.
    """
    return record.create_time + OPEN_FOR_S <= now and as_it_is(store, record).expire_time <= now


# --- Users ---
# Markers of an upload's readers: `datasets/{d}/uploads/{u}/users/{kind}-{uid}.json`.

# A marker is written before its job: without a job it counts for this time.
JOB_IS_COMING_S = 60.0


def mark_used(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> None:
    """Keeps the upload while the job `uid`, of this kind and in this folder, is not final.

    Call it before the job is created. Raises `NotFound` if the upload was deleted, and `Unavailable` while it is being
    aborted, which may still be refused.
    """
    store.put(_key(name, kind, uid), _marker(folder))
    # A removal records its ending first and then looks for markers, so one of both sees the other.
    upload = find_upload(store, name)
    if upload is None or upload.ending:
        _let_go(store, name, kind, uid, folder)
        if upload:
            raise may_end(name)
        raise not_found(name, "it was aborted, or it has expired; send it again")


@contextmanager
def using(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> Iterator[None]:
    """Marks the upload like `mark_used`, while the body creates the job.

    The marker is removed if the body is refused.
    """
    mark_used(store, name, kind, uid, folder)
    try:
        yield
    except MillraceError as error:
        # After an outage the job may exist nevertheless; a sweep settles that.
        if not isinstance(error, OUTCOME_UNKNOWN):
            with suppress(*STORE_OUTAGES):
                _let_go(store, name, kind, uid, folder)
        raise
    # An equal call that was refused just before may have removed the marker, see `_let_go`.
    with suppress(ObjectExists, *STORE_OUTAGES):
        store.put_if_absent(_key(name, kind, uid), _marker(folder))


def unmark(store: ObjectStore, name: str, kind: str, uid: str) -> None:
    """Removes a marker; a missing one is no error."""
    store.delete(_key(name, kind, uid))


def live_references(store: ObjectStore, name: str) -> list[str]:
    """Returns the names of the live jobs that read the upload; removes outdated markers."""
    references = []
    for info in store.list(f"{name}/users"):
        kind, _, uid = info.key.rsplit("/", 1)[-1].removesuffix(".json").rpartition("-")
        try:
            marker = json.loads(store.get(info.key))
        except ObjectMissing:  # unmarked just now
            continue
        # Includes the tombstone of a deleted job, which is not still to come.
        job = Jobs(store, kind).newest_of(marker["folder"], uid)
        if job is not None:
            is_live = not job.state.final
        else:
            is_live = time.time() - marker["marked_at"] < JOB_IS_COMING_S
        if is_live:
            references.append(marker["folder"])
        else:
            store.delete(info.key)
    return sorted(references)


def _let_go(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> None:
    """Removes the marker of a refused call, unless an equal call has created the job.

    The creator of the job marks the upload again afterwards, so one of both sees the other.
    """
    if not _is_made(store, kind, uid, folder):
        unmark(store, name, kind, uid)
        if _is_made(store, kind, uid, folder):
            with suppress(ObjectExists):
                store.put_if_absent(_key(name, kind, uid), _marker(folder))


def _is_made(store: ObjectStore, kind: str, uid: str, folder: str) -> bool:
    job = Jobs(store, kind).newest(folder)
    return job is not None and job.uid == uid and job.state is not JobState.DELETED


def _marker(folder: str) -> bytes:
    return json.dumps({"folder": folder, "marked_at": time.time()}).encode()


def _key(name: str, kind: str, uid: str) -> str:
    return f"{name}/users/{kind}-{uid}.json"
