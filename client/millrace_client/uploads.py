"""Uploads bytes to the data service in chunks, resumes after interruptions, and imports them.

A source is a path, an open binary file, bytes, or an iterable of bytes; it is cut into chunks of one size. An
`UploadChunks` call sends requests and receives acknowledgements at the same time. Arrow tables are sent as one LZ4
Arrow stream, and imported into a version while it arrives. A large file goes straight into the store, in parts, by URLs
that the data service has signed.
"""

from __future__ import annotations

import hashlib
import io
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import google_crc32c
import grpc
from google.protobuf import empty_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc, resources_pb2
from millrace_client.calls import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    OUTAGE_TIMEOUT_S,
    Caller,
    Operation,
    RetryBudget,
    new_request_id,
)
from millrace_client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    MillraceError,
    NotFound,
    Unavailable,
    from_rpc_error,
)
from shared.names import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    import pyarrow as pa


# --- Uploads ---

# Arguments: durable bytes, and total bytes if known.
OnProgress = Callable[[int, int | None], None]

CHUNK_BYTES = 4 * 1024 * 1024
# The number of chunks kept until they are acknowledged, to be sent again after an interruption.
WINDOW = 8
# After this time without an answer, the client calls the server again.
SILENCE_S = 30.0
# The limit of one CommitUpload. The server may have to read all bytes again; the next call continues where this one
# ended.
COMMIT_CALL_S = 300.0
# Calls are repeated as long as the server makes progress within this time.
COMMIT_STALLED_S = 900.0
# A call that failed after this time had reached the server.
REACHED_S = 60.0


class UploadInterrupted(KeyboardInterrupt):
    """Ctrl-C during an upload. `name` is the upload, which stays open for `resume_upload`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"interrupted; {_how_to_resume(name)}")
        self.name = name


def upload(
    caller: Caller,
    stub: Any,
    dataset: str,
    source: Source,
    *,
    upload_id: str = "",
    on_progress: OnProgress | None = None,
) -> resources_pb2.Upload:
    """Send a file, or bytes as they come, into a new upload of `datasets/{d}`, and commit it.

    It continues by itself after an interruption. If it cannot, the error's `metadata["upload"]` names the upload, which
    stays open for 24 hours; `resume_upload` continues it. Memory: about 50 MB, whatever is sent.
    """
    request = pb.StartUploadRequest(parent=dataset, upload_id=upload_id, request_id=new_request_id())
    # The source is opened first, so that no upload is started for an unreadable path.
    with chunks_of(source, CHUNK_BYTES) as (pieces, total):
        name = caller.unary(stub.StartUpload, request, resources_pb2.Upload).name
        return _send(_Sending(caller, stub, name, _reporting(on_progress, total)), pieces)


def resume_upload(
    caller: Caller, stub: Any, name: str, source: Source, *, on_progress: OnProgress | None = None
) -> resources_pb2.Upload:
    """Continue `datasets/{d}/uploads/{u}`, and commit it.

    `source` has the same bytes from the first on. Bytes that the server has are read for the digest, but not sent
    again.
    """
    with chunks_of(source, CHUNK_BYTES) as (pieces, total):
        return _send(_Sending(caller, stub, name, _reporting(on_progress, total)), pieces)


def _reporting(on_progress: OnProgress | None, total: int | None) -> Callable[[int], None]:
    return (lambda size: on_progress(size, total)) if on_progress else (lambda _: None)


def _send(sending: _Sending, pieces: Iterator[bytes]) -> resources_pb2.Upload:
    with telling_how_to_resume(sending.name):
        try:
            size_bytes, sha256 = sending.run(pieces)
        finally:
            sending.close()
        return commit(sending.caller, sending.stub, sending.name, size_bytes, sha256)


def commit(caller: Caller, stub: Any, name: str, size_bytes: int, sha256: str) -> resources_pb2.Upload:
    """Commit the upload, and repeat the call while `hashed_size` grows.

    Raises what the server refuses, `Unavailable` if it stays unreachable for `OUTAGE_TIMEOUT_S`, and `DeadlineExceeded`
    if it answers but makes no progress for `COMMIT_STALLED_S`.
    """
    request = pb.CommitUploadRequest(name=name, size_bytes=size_bytes, sha256=sha256)
    looking = pb.GetUploadRequest(name=name)
    retry_budget = RetryBudget()
    hashed_size, moved_at = 0, time.monotonic()
    while True:
        called_at = time.monotonic()
        try:
            return caller.unary(
                stub.CommitUpload, request, resources_pb2.Upload, timeout_s=COMMIT_CALL_S, reconnect_for_s=0.0
            )
        except MillraceError as error:
            failed = error
        if time.monotonic() - called_at > REACHED_S:
            retry_budget.progressed()
        retry_budget.pause_after(failed)
        upload = retry_budget.calling(
            lambda: caller.unary(stub.GetUpload, looking, resources_pb2.Upload, reconnect_for_s=0.0)
        )
        retry_budget.progressed()
        if upload.hashed_size > hashed_size:
            moved_at = time.monotonic()
        elif time.monotonic() - moved_at > COMMIT_STALLED_S:
            raise failed
        hashed_size = upload.hashed_size


class _Sending:
    """Sends chunks. Unacknowledged chunks are kept, so that any source can be resumed."""

    def __init__(self, caller: Caller, stub: Any, name: str, on_acknowledged: Callable[[int], None]) -> None:
        self.caller = caller
        self.stub = stub
        self.name = name
        self._on_acknowledged = on_acknowledged
        self._kept: deque[pb.UploadChunksRequest] = deque()
        self._stream: ChunkStream | None = None
        self._acknowledged = 0
        self._retry_budget = RetryBudget()

    def run(self, pieces: Iterator[bytes]) -> tuple[int, str]:
        """Send everything, and return size and SHA-256 once it is durable."""
        self._take(self._get().acknowledged_size)
        offset = 0
        with _Digest() as digest:
            for piece in pieces:
                digest.update(piece)
                skipped = max(0, min(len(piece), self._acknowledged - offset))
                if skipped < len(piece):
                    self._add(offset + skipped, piece[skipped:])
                offset += len(piece)
            self._drain()
            return offset, digest.hexdigest()

    def close(self) -> None:
        if self._stream:
            self._stream.cancel()
            self._stream = None

    def _add(self, offset: int, data: bytes) -> None:
        chunk = pb.UploadChunksRequest(name=self.name, offset=offset, data=data, crc32c=google_crc32c.value(data))
        if self._stream and self._stream.error:  # a slow source must not delay an error until the window is full
            self._reopen(self._stream.error)
        self._kept.append(chunk)
        self._opened().send(chunk)
        while len(self._kept) >= WINDOW:
            self._wait()
        self._take(self._opened().acknowledged)

    def _drain(self) -> None:
        while self._kept:
            self._wait()
        if self._stream:
            self._stream.finish(SILENCE_S)  # every chunk is durable, so the end of the call does not matter
            self._stream = None

    def _wait(self) -> None:
        """Wait until more is acknowledged, or until the call failed and a new one began."""
        stream = self._opened()
        stream.wait_beyond(self._acknowledged, SILENCE_S)
        acknowledged, error = stream.acknowledged, stream.error
        if acknowledged <= self._acknowledged and error is None:
            error = DeadlineExceeded(f"{self.caller.address} was silent for {SILENCE_S:.0f} s")
        self._take(acknowledged)
        if error is not None and self._kept:
            self._reopen(error)

    def _reopen(self, error: MillraceError) -> None:
        """Continue in a new call from what the server has, if another try can help; else raise the error."""
        self.close()
        self._retry_budget.pause_after(error)
        self._take(self._get().acknowledged_size)
        for chunk in self._kept:
            self._opened().send(chunk)

    def _opened(self) -> ChunkStream:
        if self._stream is None:
            self._stream = ChunkStream(self.caller)
        return self._stream

    def _take(self, acknowledged: int) -> None:
        if acknowledged <= self._acknowledged:
            return
        self._acknowledged = acknowledged
        self._retry_budget.progressed()
        while self._kept and self._kept[0].offset + len(self._kept[0].data) <= acknowledged:
            self._kept.popleft()
        self._on_acknowledged(acknowledged)

    def _get(self) -> resources_pb2.Upload:
        request = pb.GetUploadRequest(name=self.name)
        return self._retry_budget.calling(
            lambda: self.caller.unary(self.stub.GetUpload, request, resources_pb2.Upload, reconnect_for_s=0.0)
        )


class _Digest:
    """Computes SHA-256 in a thread while chunks are sent; at most one piece waits."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload-hash")
        self._last: Future[None] | None = None

    def update(self, piece: bytes) -> None:
        if self._last:
            self._last.result()
        self._last = self._thread.submit(self._sha256.update, piece)

    def hexdigest(self) -> str:
        if self._last:
            self._last.result()
        return self._sha256.hexdigest()

    def __enter__(self) -> _Digest:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


@contextmanager
def telling_how_to_resume(name: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise UploadInterrupted(name) from None
    except MillraceError as error:
        error.metadata["upload"] = name
        if not isinstance(error, (NotFound, FailedPrecondition)):
            error.remedy = "; ".join(filter(None, (error.remedy, _how_to_resume(name))))
        raise
    except Exception as error:  # an error of the source
        error.add_note(_how_to_resume(name))
        raise


def _how_to_resume(name: str) -> str:
    return f"the upload {name} stays open for 24 hours: go on with resume_upload({name!r}, the same source)"


# --- Sources of bytes ---

Source = str | os.PathLike[str] | BinaryIO | bytes | Iterable[bytes]


@contextmanager
def chunks_of(source: Source, chunk_bytes: int) -> Iterator[tuple[Iterator[bytes], int | None]]:
    """Yield the chunks, all of `chunk_bytes` but the last, and the total bytes if known.

    An open file is read from its present position, and left open. Raises `OSError` for an unreadable path.
    """
    if isinstance(source, (str, os.PathLike)):
        with Path(source).open("rb", buffering=0) as opened:
            yield _from_file(cast(BinaryIO, opened), chunk_bytes), os.fstat(opened.fileno()).st_size
    elif hasattr(source, "read"):
        file = cast(BinaryIO, source)
        yield _from_file(file, chunk_bytes), _rest_of(file)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        yield _from_pieces([memoryview(source)], chunk_bytes), memoryview(source).nbytes
    else:
        yield _from_pieces(source, chunk_bytes), None


def _from_file(file: BinaryIO, chunk_bytes: int) -> Iterator[bytes]:
    def pieces() -> Iterator[bytes]:
        while piece := file.read(chunk_bytes):
            yield piece

    return _from_pieces(pieces(), chunk_bytes)


def _from_pieces(pieces: Iterable[bytes | memoryview], chunk_bytes: int) -> Iterator[bytes]:
    gathered = bytearray()
    for piece in pieces:
        if not gathered and type(piece) is bytes and len(piece) == chunk_bytes:
            yield piece  # file-like pieces need no copy
            continue
        left = memoryview(piece).cast("B")
        while left:
            space = chunk_bytes - len(gathered)
            gathered += left[:space]
            left = left[space:]
            if len(gathered) == chunk_bytes:
                yield bytes(gathered)
                gathered.clear()
    if gathered:
        yield bytes(gathered)


def _rest_of(file: BinaryIO) -> int | None:
    if not (hasattr(file, "seekable") and file.seekable()):
        return None
    position = file.tell()
    end = file.seek(0, io.SEEK_END)
    file.seek(position)
    return end - position


# --- One call of UploadChunks ---

CANCEL_TIMEOUT_S = 5.0
# A separate channel without gRPC's retries: when gRPC replays a broken stream, it sometimes omits a message or hangs.
# The sender knows better what to send again.
CHANNEL_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


class ChunkStream:
    """One call that streams chunks. It has no limit of its own, so the sender must wait for acknowledgements."""

    def __init__(self, caller: Caller) -> None:
        self.acknowledged = 0
        self.error: MillraceError | None = None
        self._address = caller.address
        self._request_id = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._ended = False
        self._requests: queue.SimpleQueue[pb.UploadChunksRequest | None] = queue.SimpleQueue()
        # gRPC uses http_proxy even for loopback addresses.
        is_here = caller.address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
        proxy_options = [("grpc.enable_http_proxy", 0)] if is_here else []
        self._channel = grpc.insecure_channel(caller.address, options=[*CHANNEL_OPTIONS, *proxy_options])
        stub: Any = data_service_pb2_grpc.DataServiceStub(self._channel)
        metadata = caller.headers(self._request_id)
        self._call = stub.UploadChunks(iter(self._requests.get, None), metadata=metadata)
        self._thread = threading.Thread(target=self._read, name="upload-acknowledgements", daemon=True)
        self._thread.start()

    def send(self, chunk: pb.UploadChunksRequest) -> None:
        self._requests.put(chunk)

    def wait_beyond(self, size_bytes: int, timeout_s: float) -> None:
        """Wait until more than `size_bytes` are acknowledged, the call has ended, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.acknowledged > size_bytes or self._ended, timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Finish sending, and wait for the server to end the call."""
        self._requests.put(None)
        self._thread.join(timeout_s)
        self.cancel()

    def cancel(self) -> None:
        self._call.cancel()
        self._requests.put(None)  # ends grpc's thread, which waits for the next request
        self._thread.join(CANCEL_TIMEOUT_S)
        self._channel.close()

    def _read(self) -> None:
        error: MillraceError = Unavailable(f"{self._address} ended the call early", request_id=self._request_id)
        try:
            for response in self._call:
                with self._changed:
                    self.acknowledged = response.acknowledged_size
                    self._changed.notify_all()
        except grpc.RpcError as raised:
            error = from_rpc_error(raised, address=self._address, request_id=self._request_id)
        with self._changed:
            self.error = error
            self._ended = True
            self._changed.notify_all()


# --- Arrow tables ---

# A batch is encoded, sent and decoded as a whole.
BATCH_BYTES = 4 * 1024 * 1024


def import_while_sent(
    caller: Caller,
    stub: Any,
    dataset: str,
    rows: pa.Table | pa.RecordBatchReader | Iterable[pa.RecordBatch],
    import_upload: Callable[[str], Operation[resources_pb2.DatasetVersion]],
) -> Operation[resources_pb2.DatasetVersion]:
    """Send the rows into a new upload of `datasets/{d}`, and start its import meanwhile with `import_upload`.

    If sending fails, the import is cancelled and nothing is left.
    """
    request = pb.StartUploadRequest(parent=dataset, request_id=new_request_id())
    upload = caller.unary(stub.StartUpload, request, resources_pb2.Upload).name
    operation = None
    try:
        operation = import_upload(upload)
        resume_upload(caller, stub, upload, stream_of(rows))
    except BaseException:
        with suppress(MillraceError):  # the server's sweep removes what is left then
            if operation is not None:
                operation.cancel()
                operation.wait()
        with suppress(MillraceError):
            caller.unary(stub.AbortUpload, pb.AbortUploadRequest(name=upload), empty_pb2.Empty)
        raise
    return operation


def stream_of(
    rows: pa.Table | pa.RecordBatchReader | Iterable[pa.RecordBatch], compression: str | None = "lz4"
) -> Iterator[bytes]:
    """Yield the rows as a compressed Arrow IPC stream, with one batch in memory at a time.

    Raises `ValueError` if `rows` are batches and there is none, because the columns are unknown then.
    """
    import pyarrow as pa

    schema, batches = _batches(rows)
    sink = _Pieces()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        for batch in batches:
            stream.write_batch(batch)
            yield from sink.taken()
    yield from sink.taken()


def _batches(rows: Any) -> tuple[Any, Iterator[Any]]:
    import pyarrow as pa

    if isinstance(rows, pa.Table):
        most = max(1, rows.num_rows * BATCH_BYTES // max(rows.nbytes, 1))
        return rows.schema, iter(rows.to_batches(max_chunksize=most))
    if isinstance(rows, pa.RecordBatchReader):
        return rows.schema, iter(rows)
    batches = iter(rows)
    first = next(batches, None)
    if first is None:
        raise ValueError("there is no batch, so the columns are unknown; give a table or a RecordBatchReader")
    return first.schema, _chained(first, batches)


def _chained(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from others


class _Pieces:
    """A sink for Arrow that returns what was written."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(data)
        return len(data)

    def taken(self) -> list[bytes]:
        taken, self._pieces = self._pieces, []
        return taken

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""

    def close(self) -> None:
        """Do nothing, so that the pieces stay."""


# --- Uploads into the store ---

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
        sending = _SendingParts(file.fileno(), lambda: caller.unary(stub.StartUpload, request, resources_pb2.Upload))
        with telling_how_to_resume(sending.name):
            sha256 = sending.run(on_progress)
            return commit(caller, stub, sending.name, size_bytes, sha256)


class _SendingParts:
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
                remedy=f"get_upload({self.name!r}) returns its size and SHA-256: import it, or start another upload",
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
