"""The output of an attempt's processes, copied to the store while it is written.

    {job}/logs/a{attempt:05d}/r{rank:04d}/{seq:08d}.txt

are chunks of whole lines, in order. The newest chunk is rewritten, longer, about once a second, until it is full. So
there are few objects, and a reader only needs to know how far it has read. Rank -1 is the attempt's own process.

Output that C code writes directly to the file descriptors is not included; Ray's own logs have that.

A reader can follow the logs of an attempt while they grow.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TextIO

from shared.errors import STORE_OUTAGES, NotFound, not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectInfo, ObjectStore

# --- Logs ---

logger = logging.getLogger(__name__)

SHIP_EVERY_S = 1.0
# A chunk of this size is not written again.
CHUNK_BYTES = 64 * 1024
# The stacks of a hung rank, written by the attempt. Its number is above that of any other chunk.
STACKS_CHUNK = "99999999.txt"
# Limit on lines that wait for the store.
MAX_WAITING_BYTES = 4 * 1024 * 1024
# Limit on the logs of one rank in the store.
MAX_STORED_BYTES = 64 * 1024 * 1024
# Longer lines are cut, because some programs never end theirs.
MAX_LINE = 16 * 1024
# How long the end of a process waits for a store that does not answer.
END_TIMEOUT_S = 30.0

OWN_PROCESS = -1


def rank_folder(job: str, attempt: int, rank: int) -> str:
    return f"{job}/logs/a{attempt:05d}/r{rank:04d}"


class Puts(Protocol):
    """The store's method that shipping needs, as in `ObjectStore`."""

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None: ...


class LogShipper:
    """Shipper of the root logger's records, stdout and stderr, which are still written as before.

    Use it as a context, after `configure_logging`: leaving it ships the remaining lines. At most `MAX_WAITING_BYTES`
    wait in memory, and the oldest lines are dropped first. The store receives at most `MAX_STORED_BYTES`. A line in the
    log itself reports either limit. The shipper never fails the process or makes it wait.
    """

    def __init__(
        self, store: Puts, job: str, attempt: int, rank: int, *, tees: bool = True, first_chunk: int = 0
    ) -> None:
        """Prepare the shipping.

        Without `tees` stdout and stderr stay untouched, and the caller passes their lines to `add_lines`. `first_chunk`
        follows the chunks of an earlier process of this rank in the same attempt.
        """
        self._takes_streams = tees
        self._store = store
        self._folder = rank_folder(job, attempt, rank)
        self._lock = threading.RLock()  # reentrant: code that holds it may log in the same thread
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._dropped = self._stored_bytes = 0
        self._sequence = first_chunk
        self._chunk = b""
        self._full = False
        self._ended = threading.Event()
        self._handler = _Records(self)
        self._tees: list[tuple[str, Tee]] = []
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def __enter__(self) -> LogShipper:
        logging.getLogger().addHandler(self._handler)
        for name in ("stdout", "stderr") if self._takes_streams else ():
            target = getattr(sys, name)
            tee = Tee(target, self)
            self._tees.append((name, tee))
            setattr(sys, name, tee)
            # Ray Train logs printed text, and also prints it if these two differ, which would ship it twice.
            if getattr(sys, f"__{name}__") is target:
                setattr(sys, f"__{name}__", tee)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self._handler)
        for name, tee in self._tees:
            tee.end()
            for place in (name, f"__{name}__"):
                if getattr(sys, place) is tee:  # otherwise another stream was put in front of it since
                    setattr(sys, place, tee.target)
        self.end()

    def end(self, timeout_s: float | None = None) -> None:
        """Ship all lines and wait until they are in the store.

        A process that ends before its context is left waits for at most `timeout_s`.
        """
        self._ended.set()
        self._thread.join(timeout_s)

    def add(self, text: str) -> None:
        """Add whole lines, e.g. the stacks of a hung rank. It never waits.

        A missing end of line is added.
        """
        self.add_lines(text.encode("utf-8", "backslashreplace"))

    def add_lines(self, line: bytes) -> None:
        """Add lines as `add` does, from encoded text."""
        if not line.endswith(b"\n"):
            line += b"\n"
        with self._lock:
            if self._full:
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            while self._waiting_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1:
                gone = self._waiting.popleft()
                self._waiting_bytes -= len(gone)
                self._dropped += gone.count(b"\n")

    def _run(self) -> None:
        give_up_at = 0.0
        while True:
            # Read before the lines, so that all lines from before the end are included.
            ended = self._ended.wait(SHIP_EVERY_S)
            try:
                self._ship()
            except STORE_OUTAGES:
                give_up_at = give_up_at or time.monotonic() + END_TIMEOUT_S
                if ended:
                    if time.monotonic() > give_up_at:
                        return
                    time.sleep(SHIP_EVERY_S)
                continue
            except Exception:  # an error of shipping logs must not be logged again
                return
            give_up_at = 0.0
            if ended:
                return

    def _ship(self) -> None:
        while (taken := self._take()) is not None:
            chunk = self._chunk + taken
            try:
                self._store.put(f"{self._folder}/{self._sequence:08d}.txt", chunk)
            except STORE_OUTAGES:
                with self._lock:
                    self._waiting.appendleft(taken)
                    self._waiting_bytes += len(taken)
                raise
            self._stored_bytes += len(taken)
            self._chunk = chunk
            if len(chunk) >= CHUNK_BYTES:
                self._chunk, self._sequence = b"", self._sequence + 1

    def _take(self) -> bytes | None:
        """Take about one chunk of waiting lines. None if there are none."""
        with self._lock:
            lines: list[bytes] = []
            size = 0
            if self._dropped:
                lines.append(b"[%d lines were dropped here: the store did not answer]\n" % self._dropped)
                self._dropped = 0
            while self._waiting and size < CHUNK_BYTES:
                line = self._waiting.popleft()
                self._waiting_bytes -= len(line)
                if self._stored_bytes + size + len(line) > MAX_STORED_BYTES:
                    self._full = True
                    self._waiting.clear()
                    lines.append(b"[%d MiB are written: the log of this rank ends here]\n" % (MAX_STORED_BYTES >> 20))
                    break
                lines.append(line)
                size += len(line)
            return b"".join(lines) or None


class _Records(logging.Handler):
    """Handler that formats the root logger's records as readable lines."""

    def __init__(self, shipper: LogShipper) -> None:
        super().__init__()
        self._shipper = shipper
        formatter = logging.Formatter(
            "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._shipper.add(self.format(record))
        except Exception:
            self.handleError(record)


class Tee:
    """A text stream that also passes each line to the shipper. It delegates everything else to the stream."""

    def __init__(self, target: TextIO, shipper: LogShipper) -> None:
        self.target = target
        self._shipper = shipper
        self._lock = threading.RLock()
        self._line = ""

    def write(self, text: str) -> int:
        written = self.target.write(text)
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            if len(self._line) > MAX_LINE:
                lines, self._line = [*lines, self._line], ""
        if lines:
            self._shipper.add("\n".join(lines))
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def end(self) -> None:
        """Ship the unfinished line."""
        with self._lock:
            rest, self._line = self._line, ""
        if rest:
            self._shipper.add(rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


# --- Reading logs ---

# Approximate size of a message of the stream.
TEXT_BYTES = 256 * 1024
TEXTS_AT_ONCE = 64

_KEY = re.compile(r".*/r(-?\d+)/(\d+)\.txt")


@dataclass(frozen=True)
class LogText:
    """Whole lines of one rank, with their line ends."""

    attempt: int
    rank: int
    text: str


class LogReader:
    """Reader that continues where it stopped. Not shared between threads."""

    def __init__(
        self, store: ObjectStore, jobs: Jobs, job: str, attempt: int, rank: int | None, follow: bool = False
    ) -> None:
        """Prepare the reader. `attempt` 0 is the next one that begins.

        With `follow` the stacks of a rank, which are its last chunk, are kept back until `over`.
        """
        self._store = store
        self._log = jobs.open_log(job)
        self._job = job
        self._attempt = attempt
        self._rank = rank
        self._stacks_too = not follow
        # Bytes read of each chunk.
        self._read: dict[str, int] = {}
        self._closed: set[str] = set()

    def over(self) -> bool:
        """Return whether the attempt has ended. Costs one request while nothing changes. Raises `NotFound`.

        Call it before `read`: the `read` after the first True returns the last lines.
        """
        record = self._log.head()
        job = JobRecord.from_state(record.state) if record else None
        if job is None or job.state is JobState.DELETED:
            raise not_found(self._job)
        if not self._attempt and _has_attempt(job):
            self._attempt = job.attempt
        over = job.state.final or (self._attempt > 0 and job.attempt != self._attempt)
        self._stacks_too = self._stacks_too or over
        return over

    def read(self) -> list[LogText]:
        """Return the lines added since the last call, rank by rank. At most some MiB."""
        if not self._attempt:
            return []
        found: list[tuple[int, int, ObjectInfo]] = []
        stacks: list[tuple[int, int, ObjectInfo]] = []
        for info in self._store.list(f"{self._job}/logs/a{self._attempt:05d}"):
            matched = _KEY.fullmatch(info.key)
            if matched and self._rank in (None, int(matched[1])):
                # Stacks do not close the rank's own last chunk, which may still grow.
                of = stacks if info.key.endswith(f"/{STACKS_CHUNK}") else found
                of.append((int(matched[1]), int(matched[2]), info))
        newest = {rank: number for rank, number, _ in sorted(found, key=lambda one: one[:2])}
        if self._stacks_too:
            found += stacks
        texts: list[LogText] = []
        for rank, number, info in sorted(found, key=lambda one: one[:2]):
            if len(texts) >= TEXTS_AT_ONCE:
                break
            texts += [LogText(self._attempt, rank, text) for text in self._new_of(info, number < newest.get(rank, 0))]
        return texts

    def _new_of(self, info: ObjectInfo, closed: bool) -> list[str]:
        """Return the new text of a chunk.

        A chunk is `closed` once there is a later one. An older listing may not know its final length.
        """
        begin = self._read.get(info.key, 0)
        if info.key in self._closed or (not closed and info.size_bytes <= begin):
            return []
        if closed:
            self._closed.add(info.key)
            data = self._store.get(info.key)[begin:]
        else:
            data = self._store.get_range(info.key, begin, info.size_bytes - begin)
        self._read[info.key] = begin + len(data)
        return _pieces(data)


def find_logs(store: ObjectStore, jobs: Jobs, name: str, attempt: int, rank: int | None, follow: bool) -> LogReader:
    """Return a reader of the logs.

    Raises `NotFound` if there are no logs. With `follow` it raises only if none will come.
    """
    job = jobs.get(name, name)
    chosen = attempt or (job.attempt if _has_attempt(job) else 0)
    if follow and not job.state.final and chosen in (0, job.attempt):
        return LogReader(store, jobs, name, chosen, rank, follow)
    if not LogReader(store, jobs, name, chosen, rank).read():
        whose = "" if rank is None else f" of rank {rank}"
        raise NotFound(
            f"{name} has no logs{whose} of attempt {chosen}; it is at attempt {job.attempt}, {job.state}",
            reason="NO_LOGS",
            metadata={"resource": name, "attempt": str(chosen)},
        )
    return LogReader(store, jobs, name, chosen, rank)


def _has_attempt(job: JobRecord) -> bool:
    return job.attempts_made > 0


def _pieces(data: bytes) -> list[str]:
    """Split into whole lines again, of about `TEXT_BYTES` each. A single line may be longer."""
    pieces, begin = [], 0
    while begin < len(data):
        end = data.rfind(b"\n", begin, begin + TEXT_BYTES) + 1
        if end <= begin:
            end = data.find(b"\n", begin) + 1 or len(data)
        pieces.append(data[begin:end].decode("utf-8", "replace"))
        begin = end
    return pieces
