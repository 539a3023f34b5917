"""Handing a checkpoint out, file by file. It stays while it is read, whatever retention wishes."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass

from shared.checkpoint import CheckpointEntry
from shared.checkpoint.files import CheckpointFile, files_of, read_file
from shared.checkpoint.references import keep, release, resolve_any
from shared.errors import Conflict, FailedPrecondition, OutOfRange, ResourceExhausted, invalid_field
from shared.reference_markers import REFERENCE_APPEARS_TIMEOUT_S
from shared.storage import ObjectStore

logger = logging.getLogger(__name__)

KIND = "download"
# The state that no download ever has: its marker counts by its age alone, and is written anew while it is read.
NEVER = "ENDED"
RENEW_EVERY_S = REFERENCE_APPEARS_TIMEOUT_S / 4
# A job's best may change while it is being marked.
TRIES = 5


@dataclass(frozen=True)
class CheckpointListing:
    """What is sent before the files: `files` are all of them, the manifest first."""

    entry: CheckpointEntry
    files: list[CheckpointFile]


@dataclass(frozen=True)
class FileBegin:
    """The next bytes are those of `file` from `offset` on."""

    file: CheckpointFile
    offset: int


Part = CheckpointListing | FileBegin | bytes


class CheckpointReader:
    """`clock` gives seconds that only grow."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock

    def read(self, name: str, manifest_sha256: str, path: str, offset: int) -> Generator[Part, None, None]:
        """The listing, then each file from the one at `path` on, that one from `offset` on; empty: from the first.

        Holds `PIECE_BYTES` in memory. Raises what `GetCheckpoint` says, before the first part for what is wrong with
        the request. While the generator is open, and for ten minutes after the death of this process, neither retention
        nor a deletion of the job takes the files away.
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
            # It is retired just now; of a job another is the best by then.
            release(self._store, entry.name, KIND, uid)
        raise FailedPrecondition(
            f"{name} means another checkpoint each time; name one of its checkpoints", fields=[("name", "name one")]
        )

    def _mark(self, entry: CheckpointEntry, uid: str) -> bool:
        """Whether it is still named."""
        try:
            return keep(self._store, entry.name, entry.folder, KIND, uid, f"downloads/{uid}", ends_in=NEVER)
        except ResourceExhausted as error:  # an operator who frees a full store may want its checkpoints first
            logger.warning("%s is read without being kept: %s", entry.name, error.message)
            return True


def _place(files: list[CheckpointFile], path: str, offset: int) -> int:
    """Of the file at `path` among all."""
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
