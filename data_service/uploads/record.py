"""An upload's state, its legal transitions, and where it lies in the store."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shared import names
from shared.durable import Durable, as_state, fields_of
from shared.errors import Unavailable, not_found
from shared.log import ResourceLog
from shared.log.resource_log import Record, State
from shared.storage import ObjectStore

NAME_PATTERN = "datasets/{d}/uploads/{u}"


class UploadState(enum.StrEnum):
    #  OPEN ──▶ COMMITTED
    #    └──────────┴──▶ GONE
    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    # The tombstone: its bytes were taken away, and its id may be used again.
    GONE = "GONE"


@dataclass(frozen=True, kw_only=True)
class UploadRecord(Durable):
    """The whole state of an upload after one transition. Times are seconds since the epoch."""

    name: str
    # Its chunks lie below it, so that what is written late for an upload that is gone never turns up in the next one
    # of the same id.
    uid: str
    create_time: float
    update_time: float
    state: UploadState = UploadState.OPEN
    request_id: str = ""
    # Somebody is about to take it away, unless an import reads it: one nonce for each such attempt. No import may begin
    # to read it, no byte is taken in, and it is not committed, until that is settled.
    ending: str = ""
    # Clients put parts into the store by themselves, so that a chunk may be written over.
    presigned: bool = False
    # Of the dataset that it was started in: a later dataset of the same name has another. Empty: an earlier release
    # started it.
    dataset_uid: str = ""
    # Fixed by the commit.
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
    """None where it never was, and where it is gone."""
    record = log_of(store, name).head()
    upload = UploadRecord.from_state(record.state) if record else None
    return None if upload is None or upload.state is UploadState.GONE else upload


def get_upload(store: ObjectStore, name: str, field: str = "name") -> UploadRecord:
    """Raises `InvalidArgument` naming `field`, and `NotFound`."""
    names.parse(field, name, NAME_PATTERN)
    upload = find_upload(store, name)
    if upload is None:
        raise not_found(name, "it was never started, or aborted, or it has expired; start an upload")
    return upload


def transition(store: ObjectStore, name: str, decide: Callable[[UploadRecord], UploadRecord]) -> UploadRecord:
    """Appends what `decide` makes of the newest state; nothing where it returns that state itself."""

    def step(record: Record | None) -> State | None:
        assert record is not None
        before = UploadRecord.from_state(record.state)
        after = decide(before)
        return None if after is before else after.as_state()

    record = log_of(store, name).update(step)
    assert record is not None
    return UploadRecord.from_state(record.state)


def may_end(name: str) -> Unavailable:
    """For whoever needs an upload of which is not settled yet whether it is taken away."""
    return Unavailable(
        f"{name} is being aborted, unless an import reads it; try again, it is known in a moment",
        reason="UPLOAD_ENDING",
        metadata={"resource": name},
        retry_after_s=0.5,
    )
