"""Uploads large files straight into the store, by URLs that the data service has signed."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import resources_pb2
from millrace_client.calls import FIRST_PAUSE_S, LONGEST_PAUSE_S, OUTAGE_TIMEOUT_S, Caller, RetryBudget, new_request_id
from millrace_client.errors import FailedPrecondition, NotFound, Unavailable
from millrace_client.uploads import SILENCE_S, OnProgress, commit, telling_how_to_resume

AT_ONCE = 4
PIECE_BYTES = 1 << 20
FORBIDDEN, FIRST_OF_SERVER = 403, 500
# Client errors that pass: a request that took too long, and too many requests.
PASSING = (408, 429)


def upload_presigned(
    caller: Caller,
    stub: Any,
    dataset: str,
    path: str | os.PathLike[str],
    *,
    upload_id: str = "",
    part_size_bytes: int = 0,
    on_progress: OnProgress | None = None,
) -> resources_pb2.Upload:
    """Send a file in parts, `AT_ONCE` at a time, into a new upload of `datasets/{d}`, and commit it.

    A part has 5 MiB to 5 GiB; 0 means 64 MiB, or more if 64 MiB would make more than 2,000 parts. The store must be S3,
    and its public endpoint must be reachable from here. A failed part is sent again, for two minutes plus the time that
    it took to fail. If that does not help, the error's `metadata["upload"]` names the upload; `resume_upload` then
    sends the missing parts through the service. Raises `FailedPrecondition` for another store, and if the store refuses
    a part.
    """
    with Path(path).open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        request = pb.StartUploadRequest(
            parent=dataset,
            upload_id=upload_id,
            request_id=new_request_id(),
            presigned=pb.PresignedParts(size_bytes=size_bytes, part_size_bytes=part_size_bytes),
        )
        # The same request returns the same parts, with URLs that are valid for another hour.
        sending = _Sending(file.fileno(), lambda: caller.unary(stub.StartUpload, request, resources_pb2.Upload))
        with telling_how_to_resume(sending.name):
            sha256 = sending.run(on_progress)
            return commit(caller, stub, sending.name, size_bytes, sha256)


class _Sending:
    """The parallel sending of a file's parts. `start` returns the upload with its parts at each call."""

    def __init__(self, file: int, start: Callable[[], resources_pb2.Upload]) -> None:
        self._file = file
        self._start = start
        self._upload = start()
        self._over = threading.Event()

    @property
    def name(self) -> str:
        return self._upload.name

    def run(self, on_progress: OnProgress | None) -> str:
        """Send all parts, and return the file's SHA-256."""
        parts = list(self._upload.presigned_parts)
        total, sent = sum(part.size_bytes for part in parts), 0
        threads = ThreadPoolExecutor(AT_ONCE + 1, thread_name_prefix="presigned-upload")
        try:
            digest = threads.submit(self._sha256, total)
            putting = {threads.submit(self._put, number): part for number, part in enumerate(parts)}
            for done in as_completed(putting):
                done.result()
                sent += putting[done].size_bytes
                if on_progress:
                    on_progress(sent, total)
            return digest.result()
        finally:
            self._over.set()
            threads.shutdown(wait=True, cancel_futures=True)

    def _sha256(self, size_bytes: int) -> str:
        digest, part = hashlib.sha256(), _Part(self._file, 0, size_bytes, self._over)
        while piece := part.read(PIECE_BYTES):
            digest.update(piece)
        return digest.hexdigest()

    def _put(self, number: int) -> None:
        pause_s, forbidden, until = FIRST_PAUSE_S, False, 0.0
        while True:
            part, began = self._upload.presigned_parts[number], time.monotonic()
            body = _Part(self._file, part.offset, part.size_bytes, self._over)
            headers = {"Content-Length": str(part.size_bytes), "Content-Type": "application/octet-stream"}
            try:
                with urlopen(Request(part.url, body, headers, method="PUT"), timeout=SILENCE_S):
                    return
            except HTTPError as error:
                why = f"HTTP {error.code}"
                if not _may_pass(error) and (forbidden or error.code != FORBIDDEN):
                    raise FailedPrecondition(
                        f"the store refuses the part at {part.offset}: {why}", reason="PART_REFUSED"
                    ) from error
                forbidden = error.code == FORBIDDEN
            except (OSError, HTTPException) as error:
                if body.error is not None:
                    raise body.error from None
                why = str(error)
            now = time.monotonic()
            # Leave time for another try, however long one takes.
            until = until or now + OUTAGE_TIMEOUT_S + (now - began)
            if now > until or self._over.wait(pause_s):
                raise Unavailable(f"the store does not take the part at {part.offset}: {why}")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            # The URL may have expired; some stores then just close the connection.
            self._renew()

    def _renew(self) -> None:
        renewed = RetryBudget().calling(self._start)
        if renewed.create_time != self._upload.create_time:
            raise NotFound(f"{self.name} was aborted meanwhile", metadata={"resource": self.name})
        if renewed.state == resources_pb2.Upload.STATE_COMMITTED:
            raise FailedPrecondition(
                f"{self.name} was committed meanwhile and takes no more parts",
                reason="UPLOAD_NOT_OPEN",
                metadata={"resource": self.name},
                remedy=f"get_upload({self.name!r}) tells its size and SHA-256: import it, or start another upload",
            )
        if _layout(renewed) != _layout(self._upload):
            # For example after an upgrade of the service. The parts sent already would overlap the new ones.
            raise FailedPrecondition(
                f"the parts of {self.name} are cut otherwise than when it was started",
                reason="PARTS_CHANGED",
                metadata={"resource": self.name},
                remedy=f"abort_upload({self.name!r}), and send the file anew",
            )
        self._upload = renewed


def _layout(upload: resources_pb2.Upload) -> list[tuple[int, int]]:
    return [(part.offset, part.size_bytes) for part in upload.presigned_parts]


def _may_pass(error: HTTPError) -> bool:
    if error.code >= FIRST_OF_SERVER or error.code in PASSING:
        return True
    return b"RequestTimeout" in error.read(PIECE_BYTES)  # S3's code for it


class _Over(Exception):
    """The upload has failed or was interrupted."""


class _Part:
    """A range of a file, read in order until `over` is set.

    `error` is a fault of the file, not of the connection.
    """

    def __init__(self, file: int, offset: int, size_bytes: int, over: threading.Event) -> None:
        self._file = file
        self._offset = offset
        self._left = size_bytes
        self._over = over
        self.error: OSError | None = None

    def read(self, most: int = PIECE_BYTES) -> bytes:
        if self._over.is_set():
            raise _Over
        try:
            piece = os.pread(self._file, min(most, self._left), self._offset)
            if not piece and self._left:
                raise OSError(f"the file became shorter: nothing is left at {self._offset}")
        except OSError as error:
            self.error = error
            raise
        self._offset += len(piece)
        self._left -= len(piece)
        return piece
