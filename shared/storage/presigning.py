"""Access to the store's objects by presigned URLs, for processes that hold none of the store's keys.

The holder of the keys signs URLs. Clients upload data with them. The ranks of a user's own code use them for all access
to the store: `SignedStore`. Large objects are uploaded in parts. The holder of the keys begins and ends the upload,
other processes send the parts, and uploads that a killed writer has left are aborted.

A signer, which holds the keys, signs a URL for each object that the process requests, or refuses. The process then
talks to the store directly, so no object's bytes pass through the signer. Requests are messages of plain values:

    {"kind": "sign", "method": "GET" | "PUT", "keys": [...]}
        -> {"addresses": {key: url, ...}, "valid_for_s": ...}       may include more keys that are needed soon
    {"kind": "begin_parts", "key": ...}
        -> {"upload_id": ..., "first": 1, "addresses": [...], "valid_for_s": ...}
    {"kind": "sign_parts", "key": ..., "upload_id": ..., "first": ...}
        -> {"first": ..., "addresses": [...], "valid_for_s": ...}   for the parts from `first` on
    {"kind": "complete_parts", "key": ..., "upload_id": ..., "etags": [...], "size_bytes": ...} -> {}
    {"kind": "abort_parts", "key": ..., "upload_id": ...} -> {}

Each answer may instead be {"error": ...}, a `MillraceError.as_record`.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import urllib3
from minio import Minio
from minio.datatypes import Part
from minio.error import MinioException, S3Error

from shared.errors import DataLoss, MillraceError, Unavailable, error_from_record
from shared.settings import StoreSettings
from shared.storage.object_store import (
    CONNECT_TIMEOUT,
    S3_ENDPOINT,
    SILENCE_TIMEOUT,
    UNRESPONSIVE,
    ObjectMissing,
    ObjectStore,
    is_full_sign,
    minio_client,
    refused_by_store,
    store_is_full,
    unresponsive_store,
    upload_is_gone,
)

# --- Signed URLs ---

VALID_FOR = timedelta(hours=1)


class Presigner:
    """Signs URLs without asking the server. Thread-safe.

    The URLs are valid for an hour. A PUT with such a URL writes or overwrites one object of any size, so the stored
    content must be compared with a digest.
    """

    def __init__(self, settings: StoreSettings, *, for_clients: bool = True) -> None:
        """The URLs name the endpoint, which is part of what is signed: as clients outside of the stack see it or, not
        `for_clients`, as the services and Ray's nodes do."""
        parts = urlsplit(settings.url)
        public = settings.public_s3_endpoint if for_clients else ""
        endpoint = urlsplit(public or settings.s3_endpoint or S3_ENDPOINT)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._client = Minio(
            endpoint=endpoint.netloc,
            access_key=settings.s3_access_key,
            secret_key=settings.s3_secret_key,
            # Given explicitly; otherwise the client would ask the server for it.
            region=settings.s3_region,
            secure=endpoint.scheme == "https",
        )

    def get_url(self, key: str) -> str:
        """Return the URL of a GET. It also serves parts of the object, because a Range header is not signed."""
        return self._sign("GET", key)

    def put_url(self, key: str) -> str:
        """Return the URL of a PUT without headers of its own."""
        return self._sign("PUT", key)

    def part_url(self, key: str, upload_id: str, number: int) -> str:
        """Return the URL of a PUT of one part, counted from 1, of a multipart upload."""
        return self._sign("PUT", key, {"partNumber": str(number), "uploadId": upload_id})

    def _sign(self, method: str, key: str, parameters: dict[str, str] | None = None) -> str:
        path = f"{self._prefix}/{key}" if self._prefix else key
        return self._client.get_presigned_url(
            method,
            self._bucket,
            path,
            expires=VALID_FOR,
            extra_query_params=dict(parameters or {}),
        )


def presigner(settings: StoreSettings) -> Presigner | None:
    """Return a presigner; None if the store is not S3."""
    return Presigner(settings) if urlsplit(settings.url).scheme == "s3" else None


# --- Uploads in parts ---

logger = logging.getLogger(__name__)

# Some servers copy the parts together, and send nothing meanwhile.
COMPLETED_WITHIN = timedelta(seconds=300)
# The upload was completed, or aborted by another process.
GONE = "NoSuchUpload"


class MultipartUploads:
    """Begins and ends multipart uploads whose parts other processes send (`Presigner.part_url`).

    Thread-safe. All methods raise `Unavailable` if the store does not answer, and `ResourceExhausted` if it is full.
    """

    def __init__(self, store: ObjectStore) -> None:
        parts = urlsplit(store.settings.url)
        self._store = store
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._client = minio_client(store.settings)
        self._completing = minio_client(store.settings, COMPLETED_WITHIN)

    def begin(self, key: str) -> str:
        """Begin an upload and return its id."""
        with self._errors(key):
            headers = {"Content-Type": "application/octet-stream"}
            return self._client._create_multipart_upload(self._bucket, self._path(key), headers)  # type: ignore[arg-type]

    def complete(self, key: str, upload_id: str, etags: Sequence[str], size_bytes: int) -> None:
        """Make the object of the parts, in their order.

        The call may be repeated if its answer was lost.
        """
        parts = [Part(number, etag) for number, etag in enumerate(etags, 1)]
        with self._errors(key):
            try:
                self._completing._complete_multipart_upload(self._bucket, self._path(key), upload_id, parts)
            except S3Error as error:
                # If the whole object exists, an earlier call whose answer was lost has made it.
                if error.code != GONE or self._store.size(key) != size_bytes:
                    raise

    def abort(self, key: str, upload_id: str) -> None:
        """Free the storage of the parts. A missing upload is no error."""
        with self._errors(key):
            _abort(self._client, self._bucket, self._path(key), upload_id)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except S3Error as error:
            if error.code == GONE:
                raise upload_is_gone(key) from None
            if is_full_sign(f"<Code>{error.code}"):
                raise store_is_full(key) from error
            if error.code in ("InternalError", "SlowDown", "ServiceUnavailable"):
                raise unresponsive_store(key) from error
            raise refused_by_store(f"{error.code} for {key}: {error.message}") from error
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise unresponsive_store(key) from error


def abort_uploads(settings: StoreSettings, prefix: str, before: float) -> None:
    """Abort uploads below the folder `prefix` that began before `before`.

    A server that refuses is skipped, because it may clean up by itself. Raises `Unavailable` if no server answers.
    """
    parts = urlsplit(settings.url)
    folder = "/".join(filter(None, (parts.path.strip("/"), prefix.strip("/")))) + "/"
    client, marker, more = minio_client(settings), None, True
    try:
        while more:
            # The client has no public method for listing or aborting uploads.
            page = client._list_multipart_uploads(parts.netloc, prefix=folder, key_marker=marker)
            for upload in page.uploads:
                begun = upload.initiated_time
                if begun and upload.upload_id and begun.timestamp() < before and upload.object_name.startswith(folder):
                    _abort(client, parts.netloc, upload.object_name, upload.upload_id)
            marker, more = page.next_key_marker, page.is_truncated and bool(page.next_key_marker)
    except MinioException as error:
        logger.info("what killed writers left below %s/%s stays: %s", parts.netloc, folder, error)
    except urllib3.exceptions.HTTPError as error:
        raise unresponsive_store(prefix) from error


def _abort(client: Minio, bucket: str, key: str, upload_id: str) -> None:
    try:
        client._abort_multipart_upload(bucket, key, upload_id)
    except S3Error as error:
        if error.code != GONE:
            logger.info("what a killed writer left of %s/%s stays: %s", bucket, key, error)


# --- Store behind signed URLs ---

# Objects larger than PART_BYTES are sent in parts of this size. The part size doubles after each `GROWS_AFTER` parts,
# because S3 allows 10,000 parts; the largest object that S3 accepts fits.
PART_BYTES = 16 * 1024 * 1024
GROWS_AFTER = 1000
# The most parts held in memory at a time, and the most concurrent requests.
PARTS_HELD = 4
SENDERS = 8
# Bytes handed to a socket at once. A slow connection can send this much within its time-out.
SLICE_BYTES = 256 * 1024
# How long, and with what pauses, a request is repeated; as in `object_store` for the store's own client. A part is
# repeated for longer, because its failure would restart the whole upload.
RETRY_FOR_S = 10.0
RETRY_PART_FOR_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
# A server may take long to answer once it has all bytes of a write.
WRITTEN_TIMEOUT_S = 30.0
# How long to wait for the signer, which itself waits somewhat less for the store.
SIGNED_TIMEOUT_S = 15.0
COMPLETED_TIMEOUT_S = 330.0
MAX_ADDRESSES = 50_000
CODE = re.compile(rb"<Code>(\w+)</Code>")


# Sends a message to the signer, and returns its answer within the given number of seconds. Raises `TimeoutError`, and
# `ConnectionError` if the signer has ended.
Ask = Callable[[dict[str, Any], float], dict[str, Any]]


@dataclass(frozen=True)
class _Address:
    url: str
    # Monotonic clock; somewhat before the URL expires.
    good_until: float


class SignedStore:
    """The methods of `ObjectStore` by signed URLs. Thread-safe.

    They raise the same errors. For a refused key they raise the refusal.
    """

    def __init__(self, ask: Ask, note_progress: Callable[[], None] = lambda: None) -> None:
        """`note_progress` is called as bytes are sent or received."""
        self._ask = ask
        self._note_progress = note_progress
        self._lock = threading.Lock()
        self._addresses: OrderedDict[tuple[str, str], _Address] = OrderedDict()
        self._http = urllib3.PoolManager(num_pools=4, maxsize=2 * SENDERS)
        self._senders = ThreadPoolExecutor(SENDERS, thread_name_prefix="signed store")
        self._capacity = threading.Semaphore(PARTS_HELD)

    def get(self, key: str) -> bytes:
        return self._get(key, {})

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self.get_ranges(key, [(start, length)])[0])

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        asked = [one for one in ranges if one[1]]
        if len(asked) < 2:
            found = iter([self._get_range(key, *one) for one in asked])
        else:
            self._address("GET", key)  # signed once, before the senders start
            found = self._senders.map(lambda one: self._get_range(key, *one), asked)
        return [memoryview(next(found) if length else b"") for _, length in ranges]

    @contextmanager
    def local_file(self, key: str) -> Iterator[pa.NativeFile | None]:  # noqa: ARG002 - as `ObjectStore`
        yield None

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self._put(key, [data])

    def put_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]]) -> None:
        """Write an object from its pieces.

        All calls together hold at most `PARTS_HELD` parts in memory, besides the part that is being assembled.
        """
        parts = _parts_of(pieces())
        first, second = next(parts, []), next(parts, None)
        if second is None:
            self._put(key, first)
            return
        upload = _Upload(key, self._asked({"kind": "begin_parts", "key": key}))
        try:
            etags = self._send_parts(upload, first, second, parts)
            self._complete(upload, etags)
        except BaseException:
            with suppress(MillraceError):  # then the store's clean-up removes it with the folder
                self._asked({"kind": "abort_parts", **upload.named})
            raise

    def close(self) -> None:
        """End the threads and connections. Requests in flight end first."""
        self._senders.shutdown(wait=False, cancel_futures=True)
        self._http.clear()

    # --- requests --------------------------------------------------------------------------------------------------

    def _get(self, key: str, headers: dict[str, str]) -> bytes:
        answer = self._send(key, "GET", lambda anew: self._address("GET", key, anew=anew), headers=headers)
        self._note_progress()
        return answer.data

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a range. A read that is cut off goes on with the byte after the last one that came."""
        data = bytearray()
        failing_since: float | None = None
        while len(data) < length:
            before = len(data)
            answer = self._send(
                key,
                "GET",
                lambda anew: self._address("GET", key, anew=anew),
                headers={"Range": f"bytes={start + before}-{start + length - 1}"},
                is_streamed=True,
            )
            try:
                for piece in answer.stream(SLICE_BYTES):
                    data += piece
                    failing_since = None
                    self._note_progress()
            except urllib3.exceptions.HTTPError as error:
                now = time.monotonic()
                if failing_since is None:
                    failing_since = now  # an answer that fell silent is noticed only after the time-out of a read
                if now - failing_since > RETRY_FOR_S:
                    raise unresponsive_store(key) from error
                time.sleep(FIRST_PAUSE_S)
            else:
                if len(data) < length:
                    raise DataLoss(f"{key} ends before byte {start + length}", metadata={"object": key})
            finally:
                answer.close()
        return bytes(data)

    def _put(self, key: str, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        self._send(key, "PUT", lambda anew: self._address("PUT", key, anew=anew), pieces)

    def _send_parts(
        self, upload: _Upload, first: list[bytes], second: list[bytes], rest: Iterator[list[bytes]]
    ) -> list[str]:
        """Send all parts and return their etags. It returns or raises only once no part is in flight."""
        sent: list[Future[str]] = []

        def begin(part: list[bytes]) -> None:
            self._capacity.acquire()
            if failed := next((one for one in sent if one.done() and one.exception()), None):
                self._capacity.release()
                failed.result()
            upload.size_bytes += sum(map(len, part))
            sent.append(self._senders.submit(self._send_part, upload, len(sent) + 1, part))

        try:
            begin(first)
            begin(second)
            for part in rest:
                begin(part)
            return [one.result() for one in sent]
        finally:
            for one in sent:
                one.exception()

    def _complete(self, upload: _Upload, etags: Sequence[str]) -> None:
        """Complete the upload, and repeat the call while the store does not answer.

        The parts are stored, and the call may be repeated.
        """
        body = {"kind": "complete_parts", **upload.named, "etags": etags, "size_bytes": upload.size_bytes}
        until = time.monotonic() + RETRY_PART_FOR_S
        while True:
            try:
                self._asked(body, COMPLETED_TIMEOUT_S)
                return
            except Unavailable as error:
                if error.specific_reason != UNRESPONSIVE or time.monotonic() > until:
                    raise
            time.sleep(LONGEST_PAUSE_S)

    def _send_part(self, upload: _Upload, number: int, part: list[bytes]) -> str:
        def address(anew: bool) -> str:
            with upload.lock:
                url = None if anew else upload.url_of(number)
                if url is None:
                    upload.note(self._asked({"kind": "sign_parts", **upload.named, "first": number}))
                    url = upload.url_of(number)
                if url is None:
                    raise unresponsive_store(upload.key)
                return url

        try:
            answer = self._send(upload.key, "PUT", address, part, retry_for_s=RETRY_PART_FOR_S)
            return answer.headers["ETag"]
        finally:
            self._capacity.release()

    def _send(
        self,
        key: str,
        method: str,
        address: Callable[[bool], str],
        pieces: Sequence[bytes | bytearray | memoryview] | None = None,
        *,
        headers: dict[str, str] | None = None,
        retry_for_s: float | None = None,
        is_streamed: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        """Send one request, repeat it while the store does not answer, and return the answer.

        `address` is called with True for a new URL if the store refuses the old one. With `is_streamed` the caller
        reads the body of a good answer, and closes it.
        """
        until = time.monotonic() + (RETRY_FOR_S if retry_for_s is None else retry_for_s)
        pause_s, is_anew = FIRST_PAUSE_S, False
        while True:
            try:
                answer = self._once(method, address(is_anew), pieces, headers, is_streamed=is_streamed)
                is_good = answer.status in (200, 206)
                if is_streamed and not is_good:
                    answer.read(cache_content=True)  # the error's text
                    answer.release_conn()
            except urllib3.exceptions.HTTPError as error:
                problem: Exception = unresponsive_store(key)
                problem.__cause__ = error
            else:
                if is_good:
                    return answer
                if answer.status in (400, 401, 403) and not is_anew:
                    is_anew = True  # the URL may have expired, or name an upload that a restarted server does not know
                    continue
                problem = _problem(key, method, answer)
            is_outage = isinstance(problem, Unavailable) and problem.specific_reason == UNRESPONSIVE
            if not is_outage or time.monotonic() + pause_s > until:
                raise problem
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _once(
        self,
        method: str,
        url: str,
        pieces: Sequence[bytes | bytearray | memoryview] | None,
        headers: dict[str, str] | None,
        *,
        is_streamed: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        named, read_s = dict(headers or {}), SILENCE_TIMEOUT.total_seconds()
        body: Any = None
        if pieces is not None:
            named["Content-Length"] = str(sum(map(len, pieces)))
            body, read_s = self._slices(pieces), WRITTEN_TIMEOUT_S
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT.total_seconds(), read=read_s)
        return self._http.request(
            method,
            url,
            body=body,
            headers=named,
            timeout=timeout,
            retries=False,
            redirect=False,
            decode_content=False,
            preload_content=not is_streamed,
        )

    def _slices(self, pieces: Sequence[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            view = memoryview(piece)
            for begin in range(0, len(view), SLICE_BYTES):
                yield view[begin : begin + SLICE_BYTES]
                self._note_progress()

    # --- addresses -------------------------------------------------------------------------------------------------

    def _address(self, method: str, key: str, *, anew: bool = False) -> str:
        asked_at = time.monotonic()
        with self._lock:
            known = self._addresses.get((method, key))
            if known is not None and not anew and known.good_until > asked_at:
                return known.url
        answer = self._asked({"kind": "sign", "method": method, "keys": [key]})
        good_until = asked_at + answer["valid_for_s"]
        with self._lock:
            for other, url in answer["addresses"].items():
                self._addresses[method, other] = _Address(url, good_until)
            while len(self._addresses) > MAX_ADDRESSES:
                self._addresses.popitem(last=False)
        return str(answer["addresses"][key])

    def _asked(self, body: dict[str, Any], timeout_s: float = SIGNED_TIMEOUT_S) -> dict[str, Any]:
        """Ask the signer and return its answer.

        Raises its refusal, or `Unavailable` if it does not answer.
        """
        try:
            answer = self._ask(body, timeout_s)
        except (TimeoutError, ConnectionError) as error:
            raise Unavailable(
                f"no signer answers requests to the store: {error}", reason=UNRESPONSIVE, retry_after_s=1.0
            ) from error
        if "error" in answer:
            raise error_from_record(answer["error"])
        return answer


@dataclass
class _Upload:
    """A multipart upload, and the known URLs of its parts."""

    key: str
    answer: dict[str, Any]
    size_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._id = str(self.answer["upload_id"])
        self._urls: dict[int, _Address] = {}
        self.note(self.answer)

    @property
    def named(self) -> dict[str, str]:
        return {"key": self.key, "upload_id": self._id}

    def note(self, answer: dict[str, Any]) -> None:
        good_until = time.monotonic() + answer["valid_for_s"]
        for number, url in enumerate(answer["addresses"], answer["first"]):
            self._urls[number] = _Address(url, good_until)

    def url_of(self, number: int) -> str | None:
        known = self._urls.get(number)
        return known.url if known is not None and known.good_until > time.monotonic() else None


def _parts_of(pieces: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Group the pieces into parts: lists of pieces, which are not copied.

    All parts but the last have at least the size of a part.
    """
    part: list[bytes] = []
    size, number = 0, 0
    for piece in pieces:
        part.append(piece)
        size += len(piece)
        if size >= PART_BYTES << (number // GROWS_AFTER):
            yield part
            part, size, number = [], 0, number + 1
    if part:
        yield part


def _problem(key: str, method: str, answer: urllib3.BaseHTTPResponse) -> Exception:
    """Make the exception for an unsuccessful answer."""
    text, status = answer.data[:4096], answer.status
    found = CODE.search(text)
    code = found[1].decode() if found else f"status {status}"
    if is_full_sign(f"{status} {answer.reason} {text.decode(errors='replace')}"):
        return store_is_full(key)
    if status == 404 and code in ("NoSuchKey", "status 404", "NotFound"):
        return ObjectMissing(key)
    if status == 404 and code == "NoSuchBucket":
        return refused_by_store("its bucket is not there")
    if status == 416:
        return DataLoss(f"{key} ends before the bytes that were asked for", metadata={"object": key})
    if code == "NoSuchUpload":
        return upload_is_gone(key)
    if status >= 500 or status in (409, 429):
        return unresponsive_store(key)
    return refused_by_store(
        f"it refuses {method} of {key} by a signed address ({code}); see that the clocks of the store and of Ray's "
        "nodes agree, that nothing between them changes Host or the query, and that the services' keys may do that"
    )
