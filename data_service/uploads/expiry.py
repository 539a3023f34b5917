"""An upload as it is at present: what is there of it, and when it is taken away unasked."""

from __future__ import annotations

from dataclasses import dataclass

from data_service.uploads.chunks import chain_of
from data_service.uploads.record import UploadRecord, UploadState
from shared.storage import ObjectStore

OPEN_FOR_S = 24 * 3600.0
COMMITTED_FOR_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Upload:
    """`expire_time` is in seconds since the epoch; `hashed_size` are the bytes from 0 on whose digest this process
    has."""

    record: UploadRecord
    acknowledged_size: int
    expire_time: float
    hashed_size: int = 0


def as_it_is(store: ObjectStore, record: UploadRecord) -> Upload:
    if record.state is UploadState.COMMITTED:
        return Upload(record, record.size_bytes, record.update_time + COMMITTED_FOR_S, hashed_size=record.size_bytes)
    infos = list(store.list(record.chunks_prefix))
    chain = chain_of(record.chunks_prefix, ((int(one.key.rsplit("/", 1)[-1]), one.size_bytes) for one in infos))
    newest_byte = max((one.modified for one in infos), default=record.create_time)
    return Upload(record, chain.end, max(record.create_time, newest_byte) + OPEN_FOR_S)


def has_expired(store: ObjectStore, record: UploadRecord, now: float) -> bool:
    """Of one that is OPEN or COMMITTED; the chunks of one that is young are not listed."""
    return record.create_time + OPEN_FOR_S <= now and as_it_is(store, record).expire_time <= now
