"""Reads files of others in a child process within limits: the parent's side.

`open_in_child` opens sources as `data_service.formats.open_sources` does, and yields row sources whose work is done in
a child: the libraries that decode foreign bytes never run in this process. A child serves one call after the other, and
its process keeps it for the next part or file, so that the start is paid once. `reader_child` has the other side, and
the table of frames.

Two limits hold. The child's memory is limited by RLIMIT_DATA, which counts private writable mappings: the allocation
that exceeds it fails at once. This process also watches the child's resident memory, for what that limit does not
count, and how long it makes no progress. A child that exceeds a limit, or that a signal ends, is replaced.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa

from data_service.domain.import_spec import Source
from data_service.formats import BadRowSink, OpenSource, RowSource, interface
from data_service.formats.interface import UnitRunner
from data_service.imports.reader_child import (
    MAX_DESCRIPTORS,
    MAX_READ_BYTES,
    MEMORY_STATUS,
    FrameError,
    FrameReader,
    send_frame,
)
from data_service.settings import READER_MEMORY, READER_TIMEOUT, ReaderLimits, reader_limits
from data_service.storage.source_files import SourceFile, SourceFiles
from shared.errors import InvalidArgument, MillraceError, Unavailable, error_from_record
from shared.process_limits import cpu_seconds_of, memory_of

# --- Row sources in a child ---


class Group:
    """Objects of a child that belong together, as a pickle that only a child reads.

    `files` are those that the pickle names by their places. `schema` is that of all row sources; `class_names` are the
    names of the import's classes.
    """

    def __init__(self, data: bytes, files: Sequence[SourceFile], schema: pa.Schema | None = None) -> None:
        self.data, self.files, self.schema = data, tuple(files), schema
        self.key = hashlib.sha256(data).hexdigest()
        self.class_names: list[str] | None = None
        self._parts: list[list[ChildRows]] | None = None

    def parts(self, place: int) -> list[ChildRows]:
        """Return the parts of a row source; those of all the group are found at once."""
        if self._parts is None:
            with leased_reader() as reader:
                self._parts = reader.parts(self)
        return self._parts[place]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parts": None}


@dataclass(frozen=True, eq=False)
class ChildRows:
    """A `RowSource` that a child reads.

    `identity` is the digest of the rows that `identity_of` returns in the child; only parts have one.
    """

    group: Group
    place: int
    row_count: int | None
    size_bytes: int
    has_classes: bool
    identity: str = ""

    @property
    def schema(self) -> pa.Schema:
        return self.group.schema

    @property
    def class_names(self) -> list[str] | None:
        return self.group.class_names if self.has_classes else None

    def parts(self) -> Sequence[RowSource]:
        # A part has been divided before.
        return [self] if self.identity else self.group.parts(self.place)

    def tables(self, bad: BadRowSink) -> Generator[pa.Table, None, None]:
        with leased_reader() as reader, closing(reader.tables(self, bad)) as tables:
            yield from tables


@dataclass(frozen=True, eq=False)
class ChildUnit:
    """A `ScanUnit` that a child scans."""

    group: Group
    place: int
    number: int
    where: str
    row_count: int


@dataclass(frozen=True)
class ScanInChild:
    """Scans a unit in a child of the task; `name` says what for. Returns what only a child reads."""

    name: str

    def __call__(self, unit: ChildUnit) -> tuple[bytes, list[int]]:
        with leased_reader() as reader:
            return reader.scan(unit)


def open_in_child(
    sources: Sequence[Source],
    files: SourceFiles,
    column_types: Mapping[str, str],
    partitioning: str = "hive",
    run_units: UnitRunner | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> list[OpenSource]:
    """Open sources as `open_sources` does, in a child.

    `on_wait` is called several times a second while the child works, and ends the call by what it raises.
    """
    with leased_reader() as reader:
        return reader.open(sources, files, column_types, partitioning, run_units, on_wait)


# --- The child, as the parent sees it ---

POLL_S = 0.1
# A child that is to stop after its table has this time before it is replaced.
STOP_S = 5.0
# A child that makes no progress and computes for less of the time than this share is not slow itself.
COMPUTING_SHARE = 0.25
# A child that was idle for longer is replaced. It ends by itself later, after `reader_child.IDLE_END_S`.
IDLE_S = 100.0
# The environment of a child. Arrow's other allocators reserve gigabytes that RLIMIT_DATA would count.
ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
PASSED_ON = ("LANG", "LC_ALL", "LD_LIBRARY_PATH")
# pyarrow imports pandas where it is installed, which takes longer than all else that a child imports, and needs it for
# nothing here.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from shared.process_limits import hide_module; hide_module('pandas'); "
    "from data_service.imports.reader_child import main; main()"
)
# The sizes by which sources are read and divided are this process's.
_SIZES = (
    "CHUNK_BYTES",
    "MAX_CHUNK_ROWS",
    "PART_BYTES",
    "MAX_DECODED_BYTES",
    "BLOCK_BYTES",
    "MAX_LINE_BYTES",
    "LARGE_BYTES",
)
# Local files up to this size are opened ahead.
SMALL_FILE_BYTES = 1024 * 1024
# Files are described to the child some at a time.
FILES_OF_PAGE = 10_000


# A frame's object, and its bytes.
Answers = Generator[tuple[dict[str, Any], Any], None, None]


class ReaderProcess:
    """One child, and the calls on it."""

    def __init__(self, limits: ReaderLimits) -> None:
        self.limits = limits
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(POLL_S)
        arguments = [str(theirs.fileno()), str(os.getpid()), str(limits.memory_bytes), json.dumps(_path())]
        with theirs:
            started = _STARTER.submit(
                subprocess.Popen,
                [sys.executable, "-I", "-S", "-B", "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT | {name: os.environ[name] for name in PASSED_ON if name in os.environ},
                cwd="/",
                start_new_session=True,
            )
            try:
                self._process = started.result()
            except OSError as error:
                self._connection.close()
                raise _not_started(str(error)) from None
        self._frames = FrameReader(self._receive_into, pa.allocate_buffer, limits.memory_bytes)
        self._own_bytes = 0
        self.has_network = True
        self._key = ""
        self._call = _Call(())
        self._progress_at = self._checked_at = time.monotonic()
        # The child's processor time at the first check after its last progress, and when that progress was.
        self._cpu_s, self._cpu_since = 0.0, self._progress_at
        self._is_usable = True
        self._is_ready = False
        # When the last call ended; None before the first one.
        self._used_at: float | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Return whether the child can take a call. One that has been idle for long may be ending by itself."""
        has_time = self._used_at is None or time.monotonic() - self._used_at < IDLE_S
        return self._is_usable and has_time and self._process.poll() is None

    def end(self) -> None:
        """End the child at once."""
        self._is_usable = False
        self._connection.close()
        self._process.kill()
        self._process.wait()

    # Calls

    def open(
        self,
        sources: Sequence[Source],
        files: SourceFiles,
        column_types: Mapping[str, str],
        partitioning: str,
        run_units: UnitRunner | None,
        on_wait: Callable[[], None],
    ) -> list[OpenSource]:
        asked = {
            "sources": list(sources),
            "column_types": dict(column_types),
            "partitioning": partitioning,
            "in_tasks": run_units is not None,
        }
        call = _Call((), found_by=files, run_units=run_units, on_wait=on_wait)
        self._key = ""
        opened: list[OpenSource] = []
        groups: list[Group] = []
        with closing(self._answers({"op": "open"}, pickle.dumps(asked), call)) as answers:
            for header, payload in answers:
                group, facts = _group_of(header, payload, call.files)
                groups.append(group)
                opened += [OpenSource(int(one["index"]), str(one["split"]), rows) for one, rows in facts]
        for group in groups:
            group.class_names = call.class_names
        return opened

    def parts(self, group: Group) -> list[list[ChildRows]]:
        found: dict[int, list[ChildRows]] = {}
        with closing(self._on_group("parts", group)) as answers:
            for header, payload in answers:
                parts, facts = _group_of(header, payload, group.files)
                parts.class_names = group.class_names
                for one, rows in facts:
                    found.setdefault(int(one["of"]), []).append(rows)
        return [found[place] for place in range(len(found))]

    def tables(self, rows: ChildRows, bad: BadRowSink) -> Generator[pa.Table, None, None]:
        schema, batches = rows.schema, []
        with closing(self._on_group("tables", rows.group, rows.place)) as answers:
            for header, payload in answers:
                if "bad" in header:
                    for source, place, reason, excerpt, count in header["bad"]:
                        bad.add(source, place, reason, excerpt, count)
                elif "schema" in header:
                    schema = pa.ipc.read_schema(payload)
                else:
                    batch = pa.ipc.read_record_batch(payload, schema)
                    batch.validate(full=True)
                    batches.append(batch)
                    if header["is_last"]:
                        table, batches = pa.Table.from_batches(batches, schema), []
                        yield table

    def scan(self, unit: ChildUnit) -> tuple[bytes, list[int]]:
        found: list[tuple[bytes, list[int]]] = []
        with closing(self._on_group("scan", unit.group, unit.place)) as answers:
            for header, payload in answers:
                found.append((payload.to_pybytes(), [int(number) for number in header["files"]]))
        return found[0]

    def _on_group(self, op: str, group: Group, place: int = 0) -> Answers:
        payload = b""
        if self._key != group.key:
            payload = pickle.dumps(([_described(file) for file in group.files], group.data))
        self._key = group.key
        call = _Call(group.files, on_wait=group.files[0].on_read if group.files else _nothing)
        return self._answers({"op": op, "key": group.key, "index": place}, payload, call)

    def _answers(self, header: dict[str, Any], payload: bytes, call: _Call) -> Answers:
        """Make a call, give the child what it asks for, and yield its answers up to the last one.

        Raises the child's error. Closed early, it has the child stop after its table. Any other error ends the child.
        """
        self._call = call
        has_ended = False
        sizes = {name: getattr(interface, name) for name in _SIZES}
        try:
            self._send(header | {"sizes": sizes}, payload)
            while (answer := self._answer(call)) is not None:
                yield answer
            has_ended = True
        except FrameError as error:
            raise self._refused(f"the process that read it sent what it should not: {error}") from None
        except GeneratorExit:
            has_ended = self._stop(call)
            raise
        except _ChildError as error:
            has_ended = True
            raise error.error from None
        finally:
            self._used_at = time.monotonic()
            try:
                call.close()
            finally:
                if not has_ended:
                    self.end()

    def _stop(self, call: _Call) -> bool:
        """Have the child stop, and return whether it did in time."""
        until = time.monotonic() + STOP_S

        def give_up() -> None:
            if time.monotonic() > until:
                raise TimeoutError

        call.on_wait = give_up
        call.is_stopping = True
        try:
            self._send({"stop": True})
            while self._answer(call) is not None:
                pass
        except _ChildError:
            return True
        except Exception:
            return False
        return True

    def _answer(self, call: _Call) -> tuple[dict[str, Any], pa.Buffer] | None:
        """Return the next answer; None for the last one. Raises `_ChildError` for an error."""
        while True:
            self._progress_at = time.monotonic()
            header, payload = self._frames.frame()
            if "ask" in header:
                if call.is_stopping and call.may_wait:
                    raise TimeoutError  # the bytes that it asks for may come in minutes
                reply, data, opened = call.answer(header)
                try:
                    self._send(reply, data, [file.fileno() for file in opened])
                finally:
                    for file in opened:
                        file.close()
            elif "units" in header:
                call.add_units(header, payload)
            elif "close" in header:
                call.close_file(header["close"])
            elif "end" in header:
                classes = header.get("classes")
                call.class_names = None if classes is None else [str(name) for name in classes]
                return None
            elif "error" in header:
                raise _ChildError(call.original(header["error"]))
            elif "fault" in header:
                raise RuntimeError(f"the reader failed:\n{header['fault']}")
            elif "ready" in header:
                self._is_ready = True
                self._own_bytes = memory_of(self.pid, "RssAnon", "RssShmem")
                self.has_network = bool(header["has_network"])
            elif "alive" not in header:
                return header, payload
            elif "file" in header:
                call.note_file(header["file"])

    # The socket

    def _send(self, header: dict[str, Any], payload: Any = b"", descriptors: Sequence[int] = ()) -> None:
        self._connection.settimeout(self.limits.timeout_s)
        try:
            send_frame(self._connection, header, payload, descriptors)
        except TimeoutError:
            raise self._no_progress() from None
        except OSError:
            raise self._death() from None
        finally:
            self._connection.settimeout(POLL_S)

    def _receive_into(self, view: memoryview) -> None:
        while len(view):
            try:
                count = self._connection.recv_into(view)
            except TimeoutError:
                self._check()
                continue
            except OSError:
                count = 0
            if not count:
                raise self._death()
            view = view[count:]
            self._progress_at = time.monotonic()
            if self._progress_at - self._checked_at > POLL_S:
                self._check()

    def _check(self) -> None:
        """Check the limits, and have the caller check whether to go on."""
        self._checked_at = time.monotonic()
        self._call.on_wait()
        if memory_of(self.pid, "RssAnon", "RssShmem") - self._own_bytes > self.limits.memory_bytes:
            raise self._over_memory()
        if self._cpu_since != self._progress_at:
            self._cpu_s, self._cpu_since = cpu_seconds_of(self.pid), self._progress_at
        if self._checked_at - self._progress_at > self.limits.timeout_s:
            raise self._no_progress()

    # Errors

    def _over_memory(self) -> InvalidArgument:
        return self._refused(
            f"to read it takes more than {self.limits.memory_bytes >> 20} MiB of memory; write smaller row groups, "
            f"record batches or rows, or raise {READER_MEMORY} where Ray runs"
        )

    def _no_progress(self) -> MillraceError:
        if not self._is_ready:
            return _not_started(f"within {self.limits.timeout_s:g} s")
        if cpu_seconds_of(self.pid) - self._cpu_s < self.limits.timeout_s * COMPUTING_SHARE:
            # Nothing of the file's: its file system does not answer, or the machine does something else.
            field, uri = self._call.file_facts()
            why = f"{field}: the process that reads {uri} has waited for its bytes or a processor for too long"
            return Unavailable(why, reason="READER_STALLED")
        return self._refused(
            f"for {self.limits.timeout_s:g} s nothing was read from the file; write smaller row groups, record batches "
            f"or rows, or raise {READER_TIMEOUT} where Ray runs"
        )

    def _death(self) -> MillraceError:
        """Return the error for a child that has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        status = self._process.poll()
        if not self._is_ready:
            return _not_started(f"it ended with status {status}")
        if status == MEMORY_STATUS:
            return self._over_memory()
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            if -status in (signal.SIGKILL, signal.SIGTERM):
                # Nothing of the file's: the node is short of memory, or is being stopped.
                field, uri = self._call.file_facts()
                return Unavailable(f"{field}: {name} ended the process that read {uri}", reason="READER_KILLED")
            return self._refused(
                f"its bytes ended the process that read it, by {name}; write it anew, without encryption"
            )
        return self._refused(f"its bytes ended the process that read it, with status {status}; write it anew")

    def _refused(self, why: str) -> InvalidArgument:
        field, uri = self._call.file_facts()
        return InvalidArgument(
            f"{field}: {uri} cannot be imported: {why}",
            reason="SOURCE_OVER_LIMIT",
            metadata={"field": field, "uri": uri},
            fields=[(field, why)],
        )


def _not_started(why: str) -> Unavailable:
    return Unavailable(f"the process that reads files could not be started: {why}", reason="READER_NOT_STARTED")


class _ChildError(Exception):
    """An error that a call ended with, after which the child goes on."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _group_of(
    header: dict[str, Any], payload: pa.Buffer, files: Sequence[SourceFile]
) -> tuple[Group, list[tuple[dict[str, Any], ChildRows]]]:
    """Return a group of row sources, and what was sent about each with the row source."""
    schema_bytes = int(header["schema_bytes"])
    schema = pa.ipc.read_schema(payload.slice(0, schema_bytes))
    group = Group(payload.slice(schema_bytes).to_pybytes(), [files[number] for number in header["files"]], schema)
    facts = []
    for place, one in enumerate(header["rows"]):
        row_count = None if one["row_count"] is None else int(one["row_count"])
        identity = str(one.get("identity", ""))
        rows = ChildRows(group, place, row_count, int(one["size_bytes"]), bool(one["has_classes"]), identity)
        facts.append((one, rows))
    return group, facts


def _described(file: SourceFile) -> tuple[Any, ...]:
    """Return what the child knows of a file: all but how it is opened."""
    return file.field, file.uri, file.size_bytes, file.relative, file.upload_uid, file.modified_ns


def _is_local(opened: BinaryIO) -> bool:
    return isinstance(opened, io.BufferedReader) and isinstance(opened.raw, io.FileIO)


def _nothing() -> None:
    """Do nothing: the callback of a call that is never interrupted."""


# A header, bytes, and local files that the child gets.
Answer = tuple[dict[str, Any], Any, list[BinaryIO]]


@dataclass
class _Call:
    """A call, and what the child asks for meanwhile: files, their bytes, and tasks.

    The child knows a file by its place in `files`.
    """

    given: Sequence[SourceFile]
    found_by: SourceFiles | None = None
    run_units: UnitRunner | None = None
    on_wait: Callable[[], None] = _nothing
    class_names: list[str] | None = None
    is_stopping: bool = False
    files: list[SourceFile] = field(init=False)

    def __post_init__(self) -> None:
        self.files = list(self.given)
        self._opened: dict[int, BinaryIO] = {}
        self._positions: dict[int, int] = {}
        self._file_of: dict[int, SourceFile] = {}
        self._file: SourceFile | None = self.files[0] if self.files else None
        self._pages: list[bytes] = []
        self._units: list[ChildUnit] = []
        # For each unit, the places in `files` of the group's files.
        self._numbers: list[list[int]] = []
        self._results: Iterator[tuple[bytes, list[int]]] = iter(())
        self._next_result = self._next_opened = 0
        # Of the last file that was opened, for the child or ahead.
        self._last_number = -1
        self._error: MillraceError | None = None

    def file_facts(self) -> tuple[str, str]:
        """Return (field, URI) of the file that is being read."""
        return ("sources", "a source") if self._file is None else (self._file.field, self._file.uri)

    @property
    def may_wait(self) -> bool:
        """Return whether an answer may take long: the bytes of an upload that still grows."""
        return self._file is not None and self._file.is_upload

    def original(self, record: dict[str, Any]) -> MillraceError:
        """Return the error that the child reports: this process's own object if the child only passes it back."""
        if self._error is not None and json.loads(json.dumps(self._error.as_record())) == record:
            return self._error
        return error_from_record(record)

    def answer(self, header: dict[str, Any]) -> Answer:
        """Return (header, bytes, open files) for what the child asks; errors that its reader handles are sent, too."""
        answer = getattr(self, f"_answer_{header.pop('ask')}", None)
        if answer is None:
            raise FrameError("it asks for what there is not")
        try:
            return answer(**header)  # type: ignore[no-any-return]
        except MillraceError as error:
            self._error = error
            return {"error": error.as_record()}, b"", []
        except (OSError, pa.ArrowException) as error:
            return {"os_error": [getattr(error, "errno", None), str(error)]}, b"", []

    def note_file(self, number: object) -> None:
        """Note that the child reads a file that was opened ahead."""
        if not isinstance(number, int) or not 0 <= number < len(self.files):
            raise FrameError(f"it reads file {number}")
        self._file = self.files[number]

    def close_file(self, opened: object) -> None:
        if isinstance(opened, int) and (file := self._opened.pop(opened, None)) is not None:
            file.close()

    def close(self) -> None:
        for opened in list(self._opened):
            self.close_file(opened)
        self._answer_close_units()

    # What the child asks for

    def _answer_find(self, field: str, uri: str) -> Answer:
        assert self.found_by is not None
        return self._found([self.found_by.find(field, uri)])

    def _answer_find_all(self, field: str, uri: str, most: int | None) -> Answer:
        assert self.found_by is not None
        limits = {} if most is None else {"most": most}
        return self._found(self.found_by.find_all(field, uri, **limits))

    def _found(self, files: Sequence[SourceFile]) -> Answer:
        self._file = files[0]
        described = [(len(self.files) + place, _described(file)) for place, file in enumerate(files)]
        self.files += files
        pages = [described[begin : begin + FILES_OF_PAGE] for begin in range(0, len(described), FILES_OF_PAGE)]
        self._pages = [pickle.dumps(page) for page in reversed(pages)]
        return {"pages": len(pages)}, self._pages.pop(), []

    def _answer_more_files(self) -> Answer:
        return {}, self._pages.pop(), []

    def _answer_open(self, file: int) -> Answer:
        self._file = self.files[file]
        opened = self._file.open()
        if _is_local(opened):
            ahead = self._opened_ahead(file) if file == self._last_number + 1 else []
            self._last_number = file + len(ahead)
            numbers = list(range(file, file + 1 + len(ahead)))
            return {"local": True, "files": numbers}, b"", [opened, *ahead]
        self._next_opened += 1
        self._opened[self._next_opened] = opened
        self._positions[self._next_opened] = 0
        self._file_of[self._next_opened] = self._file
        return {"local": False, "opened": self._next_opened}, b"", []

    def _opened_ahead(self, number: int) -> list[BinaryIO]:
        """Open the small local files that follow, as those of a folder of images are read, each after the last."""
        found: list[BinaryIO] = []
        for file in self.files[number + 1 : number + MAX_DESCRIPTORS]:
            if file.is_upload or not 0 < (file.size_bytes or 0) <= SMALL_FILE_BYTES:
                break
            try:
                opened = file.open()
            except MillraceError:
                break  # it is raised where the file's turn comes
            if not _is_local(opened):
                opened.close()
                break
            found.append(opened)
        return found

    def _answer_read(self, opened: int, position: int, size: int) -> Answer:
        if opened not in self._opened or not 0 <= size <= MAX_READ_BYTES:
            raise FrameError(f"it asks for {size} bytes of file {opened}")
        self._file = self._file_of[opened]
        stream = self._opened[opened]
        if self._positions[opened] != position:
            stream.seek(position)
        data = stream.read(size)
        self._positions[opened] = position + len(data)
        return {}, data, []

    def _answer_size(self, opened: int) -> Answer:
        stream = self._opened[opened]
        stream.seek(0, 2)
        self._positions[opened] = stream.tell()
        return {"size": self._positions[opened]}, b"", []

    def _answer_wait_until_whole(self, file: int) -> Answer:
        self._file = self.files[file]
        self._file.wait_until_whole()
        return {}, b"", []

    def add_units(self, header: dict[str, Any], payload: pa.Buffer) -> None:
        numbers = [int(number) for number in header["files"]]
        group = Group(payload.to_pybytes(), [self.files[number] for number in numbers])
        for place, one in enumerate(header["units"]):
            self._units.append(ChildUnit(group, place, int(one["number"]), str(one["where"]), int(one["row_count"])))
            self._numbers.append(numbers)

    def _answer_run_units(self, name: str) -> Answer:
        assert self.run_units is not None
        work: Any = ScanInChild(name)
        units: Any = self._units
        self._results = self.run_units(work, units)
        self._next_result = 0
        return {}, b"", []

    def _answer_next_found(self) -> Answer:
        found = next(self._results, None)
        if found is None:
            return {}, b"", []
        data, places = found
        numbers = self._numbers[self._next_result]
        self._next_result += 1
        return {"files": [numbers[place] for place in places]}, data, []

    def _answer_close_units(self) -> Answer:
        results, self._results = self._results, iter(())
        if hasattr(results, "close"):
            results.close()
        self._units, self._numbers = [], []
        return {}, b"", []


# --- The children of this process ---


class _Idle:
    """The child that waits for the next call. Others that were needed at the same time end with their calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: ReaderProcess | None = None

    def take(self) -> ReaderProcess | None:
        with self._lock:
            reader, self._reader = self._reader, None
        return reader

    def put(self, reader: ReaderProcess) -> None:
        with self._lock:
            reader, self._reader = self._reader or reader, reader
        if reader is not self._reader:
            reader.end()


_IDLE = _Idle()


@contextmanager
def leased_reader() -> Iterator[ReaderProcess]:
    """Provide a child for one call. Later calls of this process have the same one, unless it has ended."""
    limits = reader_limits(os.environ)
    reader = _IDLE.take()
    if reader is not None and not (reader.is_usable and reader.limits == limits):
        reader.end()
        reader = None
    reader = reader or ReaderProcess(limits)
    try:
        yield reader
    finally:
        if reader.is_usable:
            _IDLE.put(reader)
        else:
            reader.end()


def start_reader() -> None:
    """Start the child of this process, so that it is ready when it is needed."""
    with leased_reader():
        pass


# The thread that starts children: the kernel ends a child with the thread that started it.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="starts-readers")


def _path() -> list[str]:
    return [one for one in sys.path if one]
