"""`SignedStore`: objects of an S3 store for a process that holds none of its keys.

Somebody who holds them signs an address for each object that the process asks for, or refuses. The process then talks
to the store by itself, so no bytes go through who signs. It asks by messages, plain values each:

    {"kind": "sign", "method": "GET" | "PUT", "keys": [...]}
        -> {"addresses": {key: url, ...}, "valid_for_s": ...}       maybe with more keys that are soon asked for
    {"kind": "begin_parts", "key": ...}
        -> {"upload_id": ..., "first": 1, "addresses": [...], "valid_for_s": ...}
    {"kind": "sign_parts", "key": ..., "upload_id": ..., "first": ...}
        -> {"first": ..., "addresses": [...], "valid_for_s": ...}   of the parts from `first` on
    {"kind": "complete_parts", "key": ..., "upload_id": ..., "etags": [...], "size_bytes": ...} -> {}
    {"kind": "abort_parts", "key": ..., "upload_id": ...} -> {}

Each answer may be {"error": ...} in place of that, a `MillraceError.as_record`.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import urllib3

from shared.errors import DataLoss, MillraceError, Unavailable, error_from_record
from shared.storage.object_store import (
    UNRESPONSIVE,
    ObjectMissing,
    is_full_sign,
    refused_by_store,
    store_is_full,
    unresponsive_store,
    upload_is_gone,
)
from shared.storage.opening import CONNECT_TIMEOUT, SILENCE_TIMEOUT

# An object of more than this is sent in parts of this many bytes; after each `GROWS_AFTER` parts the parts are twice as
# large, since there may be 10,000: the largest object that S3 takes fits.
PART_BYTES = 16 * 1024 * 1024
GROWS_AFTER = 1000
# Parts that are held in memory at a time, and requests under way.
PARTS_HELD = 4
SENDERS = 8
# What is handed to a socket at once: a slow line takes so much within the connection's time-out.
SLICE_BYTES = 256 * 1024
# How long, and after what pauses, a request is tried again, as `opening` has it for the store's own client. A part
# waits longer: with it the whole upload would begin anew.
RETRY_FOR_S = 10.0
RETRY_PART_FOR_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
# A server may take long to answer once it has all bytes of a write.
WRITTEN_TIMEOUT_S = 30.0
# How long an answer of who signs is waited for: somewhat longer than they wait for the store.
SIGNED_TIMEOUT_S = 15.0
COMPLETED_TIMEOUT_S = 330.0
MAX_ADDRESSES = 50_000
CODE = re.compile(rb"<Code>(\w+)</Code>")


# Sends a message to the signer, and returns its answer within the given number of seconds. Raises `TimeoutError`, and
# `ConnectionError` where the signer has ended.
Ask = Callable[[dict[str, Any], float], dict[str, Any]]


@dataclass(frozen=True)
class _Address:
    url: str
    # By the monotonic clock; somewhat before it expires.
    good_until: float


class SignedStore:
    """Thread-safe. Its methods are those of `ObjectStore` of the same names, and raise as these do. For a key that is
    refused they raise the refusal."""

    def __init__(self, ask: Ask, advanced: Callable[[], None] = lambda: None) -> None:
        """`advanced` is called as bytes are sent or have come."""
        self._ask = ask
        self._advanced = advanced
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
            self._address("GET", key)  # once, and not by each of the senders
            found = self._senders.map(lambda one: self._get_range(key, *one), asked)
        return [memoryview(next(found) if length else b"") for _, length in ranges]

    @contextmanager
    def local_file(self, key: str) -> Iterator[pa.NativeFile | None]:  # noqa: ARG002 - as `ObjectStore`
        yield None

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self._put(key, [data])

    def put_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]]) -> None:
        """At most `PARTS_HELD` parts of all calls together are in memory, and the one that is being put together."""
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
            with suppress(MillraceError):  # then the store has it cleaned up with the folder
                self._asked({"kind": "abort_parts", **upload.named})
            raise

    def close(self) -> None:
        """Ends its threads and connections; requests under way end first."""
        self._senders.shutdown(wait=False, cancel_futures=True)
        self._http.clear()

    # --- requests --------------------------------------------------------------------------------------------------

    def _get(self, key: str, headers: dict[str, str]) -> bytes:
        answer = self._send(key, "GET", lambda anew: self._address("GET", key, anew=anew), headers=headers)
        self._advanced()
        return answer.data

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._get(key, {"Range": f"bytes={start}-{start + length - 1}"})
        if len(data) != length:
            raise DataLoss(f"{key} ends before byte {start + length}", metadata={"object": key})
        return data

    def _put(self, key: str, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        self._send(key, "PUT", lambda anew: self._address("PUT", key, anew=anew), pieces)

    def _send_parts(
        self, upload: _Upload, first: list[bytes], second: list[bytes], rest: Iterator[list[bytes]]
    ) -> list[str]:
        """The parts' etags. Ends only once no part is under way."""
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
        """Asks again where the store does not answer: what was sent is there, and the call may be repeated."""
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
    ) -> urllib3.BaseHTTPResponse:
        """The answer to one request, which is sent again where the store does not answer. `address` is called with
        True for another address where the store does not accept the one before."""
        until = time.monotonic() + (RETRY_FOR_S if retry_for_s is None else retry_for_s)
        pause_s, is_anew = FIRST_PAUSE_S, False
        while True:
            try:
                answer = self._once(method, address(is_anew), pieces, headers)
            except urllib3.exceptions.HTTPError as error:
                problem: Exception = unresponsive_store(key)
                problem.__cause__ = error
            else:
                if answer.status in (200, 206):
                    return answer
                if answer.status in (400, 401, 403) and not is_anew:
                    is_anew = True  # it may have expired, or name what a server that was restarted does not know
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
    ) -> urllib3.BaseHTTPResponse:
        named, read_s = dict(headers or {}), SILENCE_TIMEOUT.total_seconds()
        body: Any = None
        if pieces is not None:
            named["Content-Length"] = str(sum(map(len, pieces)))
            body, read_s = self._slices(pieces), WRITTEN_TIMEOUT_S
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT.total_seconds(), read=read_s)
        return self._http.request(
            method, url, body=body, headers=named, timeout=timeout, retries=False, redirect=False, decode_content=False
        )

    def _slices(self, pieces: Sequence[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            view = memoryview(piece)
            for begin in range(0, len(view), SLICE_BYTES):
                yield view[begin : begin + SLICE_BYTES]
                self._advanced()

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
        """The answer of who signs. Raises what they refuse it for, and `Unavailable` where they do not answer."""
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
    """One upload in parts that was begun, and the addresses of its parts that are known."""

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
    """The pieces, gathered to parts: lists of pieces that are not copied. All but the last have as many bytes as a part
    is to have, or more."""
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
    """What an answer means that is no success."""
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
