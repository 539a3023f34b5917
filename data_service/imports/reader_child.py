"""The process that decodes files of others, within limits.

The parent, `data_service.imports.reader`, fetches bytes and decides; this process opens sources, divides them, and
decodes their rows. It is given one socket and nothing else: no environment, no credentials, no other file, and no
network if the kernel grants it a namespace of its own. It runs as the parent's user, so it is no wall against code that
a file brings in. Local files come as open descriptors; the bytes of objects and uploads come on request.

What this process sends is JSON, and bytes of Arrow IPC. It sends its own objects as pickles, which the parent keeps and
never reads: only another such process does.

    parent                                         child
    {"op": "open", "parts", "tables" or "scan"} →
                                                   ← {"ask": "open", "file": 3}    any number, each with its answer
    {} or {"error": …} →
                                                   ← {"rows": …}, {"bad": …}       any number
    {"stop": true} →                               (at most once: the parent needs no more tables)
                                                   ← {"end": true}, {"error": …} or {"fault": …}

A frame between this process and its parent is a JSON object, bytes, and open descriptors. A process that runs out of
memory ends with `MEMORY_STATUS`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import select
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import cloudpickle
import pyarrow as pa

from data_service.formats import RowSource, interface, open_sources
from data_service.formats.interface import ScanUnit
from data_service.storage.source_files import SourceFile
from shared.errors import MillraceError, error_from_record
from shared.process_limits import CLONE_NEWIPC, CLONE_NEWNET, die_with_parent, enter_namespaces, memory_of, set_limits

# --- Frames ---

_PREFIX = struct.Struct("<IQ")
MAX_DESCRIPTORS = 32
MAX_HEADER_BYTES = 256 * 1024 * 1024


class FrameError(ValueError):
    """The bytes are no frame, or one beyond the limits."""


def send_frame(to: socket.socket, header: dict[str, Any], payload: Any = b"", descriptors: Sequence[int] = ()) -> None:
    """Send a frame: a JSON object, and bytes. Descriptors are sent along with its first byte."""
    encoded = json.dumps(header).encode()
    view = memoryview(payload).cast("B")
    start = _PREFIX.pack(len(encoded), len(view)) + encoded
    sent = socket.send_fds(to, [start], descriptors) if descriptors else 0
    to.sendall(start[sent:])
    if len(view):
        to.sendall(view)


class FrameReader:
    """Reads frames. `receive_into` fills a whole buffer; `allocate` returns one of a size."""

    def __init__(self, receive_into: Callable[[memoryview], None], allocate: Callable[[int], Any], most: int) -> None:
        self._receive_into, self._allocate, self._most = receive_into, allocate, most

    def frame(self) -> tuple[dict[str, Any], Any]:
        """Return the next frame. Raises `FrameError`."""
        prefix = bytearray(_PREFIX.size)
        self._receive_into(memoryview(prefix))
        header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > self._most:
            raise FrameError(f"a frame has {header_bytes} and {payload_bytes} bytes")
        encoded = bytearray(header_bytes)
        self._receive_into(memoryview(encoded))
        try:
            header = json.loads(encoded)
        except ValueError:
            raise FrameError("a frame's header is no JSON") from None
        if not isinstance(header, dict):
            raise FrameError("a frame's header is no object")
        payload = self._allocate(payload_bytes)
        if payload_bytes:
            self._receive_into(memoryview(payload).cast("B"))
        return header, payload


# --- The parent, as the child sees it ---

# A call that reads without asking for anything sends a sign of life this often.
ALIVE_INTERVAL_S = 0.5
# An idle process of a Ray worker gives its memory back. The parent calls none that has been idle for a third as long.
IDLE_END_S = 300.0
# The most bytes that the parent reads at once; more are asked for piece by piece.
MAX_READ_BYTES = 64 * 1024 * 1024


class Parent:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._descriptors: list[int] = []
        # Those of files that are not open yet, by the files' numbers.
        self._ahead: dict[int, int] = {}
        self._frames = FrameReader(self._receive_into, bytearray, sys.maxsize)
        self._spoke_at = 0.0
        self._stopped = self._had_a_call = False
        # The files of the call, by the numbers by which the parent knows them.
        self.files: dict[int, ParentFile] = {}

    def next_call(self) -> tuple[dict[str, Any], bytearray]:
        """Wait for the next call. Ends the process once the parent has closed its end, or needs no call for long."""
        # Before its first call the process waits as long as its parent does.
        self._forget_descriptors()
        wait_s = IDLE_END_S if self._had_a_call else None
        self._had_a_call = True
        while True:
            if not select.select([self._connection], [], [], wait_s)[0]:
                os._exit(0)
            header, payload = self._frames.frame()
            if "op" in header:
                self._stopped = False
                return header, payload

    def send(self, header: dict[str, Any], payload: Any = b"") -> None:
        send_frame(self._connection, header, payload)
        self._spoke_at = time.monotonic()

    def ask(self, what: str, **arguments: Any) -> tuple[dict[str, Any], bytearray]:
        """Return the parent's answer; raise the error that it met."""
        self.send({"ask": what, **arguments})
        while True:
            header, payload = self._frames.frame()
            if "stop" not in header:
                break
            self._stopped = True
        if "error" in header:
            raise error_from_record(header["error"])
        if "os_error" in header:
            number, text = header["os_error"]
            raise OSError(number, text) if number else OSError(text)
        return header, payload

    def say_alive(self) -> None:
        if time.monotonic() - self._spoke_at > ALIVE_INTERVAL_S:
            self.send({"alive": True})

    def has_stopped(self) -> bool:
        """Return whether the parent needs no more tables."""
        if not self._stopped and select.select([self._connection], [], [], 0)[0]:
            header, _ = self._frames.frame()
            self._stopped = "stop" in header
        return self._stopped

    def open(self, number: int) -> Any:
        """Open a file: a local one by its descriptor, others by their bytes on request."""
        if (descriptor := self._ahead.pop(number, None)) is not None:
            self.send({"alive": True, "file": number})  # an error of the file's bytes has to name it
            return os.fdopen(descriptor, "rb")
        answer, _ = self.ask("open", file=number)
        if answer["local"]:
            # The files that will probably follow come along.
            self._forget_descriptors()
            self._ahead = dict(zip(answer["files"], self._descriptors, strict=True))
            self._descriptors = []
            return os.fdopen(self._ahead.pop(number), "rb")
        return _RemoteFile(self, int(answer["opened"]))

    def _forget_descriptors(self) -> None:
        for descriptor in self._ahead.values():
            os.close(descriptor)
        self._ahead = {}

    def _receive_into(self, view: memoryview) -> None:
        while len(view):
            data, descriptors, _, _ = socket.recv_fds(self._connection, min(len(view), 1 << 20), MAX_DESCRIPTORS)
            if not data:
                os._exit(0)  # the parent is gone, or needs this process no more
            self._descriptors += descriptors
            view[: len(data)] = data
            view = view[len(data) :]


class _RemoteFile(io.RawIOBase):
    """An open file whose bytes the parent has."""

    def __init__(self, parent: Parent, opened: int) -> None:
        self._parent, self._opened, self._position = parent, opened, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 2:
            answer, _ = self._parent.ask("size", opened=self._opened)
            self._position = int(answer["size"]) + offset
        else:
            self._position = offset + (self._position if whence == 1 else 0)
        return self._position

    def read(self, size: int = -1) -> bytes:
        pieces: list[bytes] = []
        left = sys.maxsize if size is None or size < 0 else size
        while left:
            wanted = min(left, MAX_READ_BYTES)
            _, data = self._parent.ask("read", opened=self._opened, position=self._position, size=wanted)
            self._position += len(data)
            left -= len(data)
            pieces.append(bytes(data))
            # To ask once more where the file has ended would be another request.
            if len(data) < wanted and (size >= 0 or not data):
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._parent.send({"close": self._opened})


@dataclass(frozen=True)
class ParentFile(SourceFile):
    """A file that the parent opens, and knows by `number`."""

    parent: Parent | None = None
    number: int = -1

    def wait_until_whole(self) -> None:
        if self.is_upload:
            assert self.parent is not None
            self.parent.ask("wait_until_whole", file=self.number)


def note_files(parent: Parent, described: Iterable[tuple[int, tuple[Any, ...]]]) -> list[SourceFile]:
    """Return the files that the parent describes, (number, members) each."""
    found: list[SourceFile] = []
    for number, (field, uri, size_bytes, relative, upload_uid, modified_ns) in described:
        if number not in parent.files:
            opener = partial(parent.open, number)
            parent.files[number] = ParentFile(
                field, uri, size_bytes, opener, relative, upload_uid, modified_ns, parent.say_alive, parent, number
            )
        found.append(parent.files[number])
    return found


class _Files:
    """What `open_sources` needs of `SourceFiles`: the parent finds the files."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent

    def find(self, field: str, uri: str) -> SourceFile:
        return self._found("find", field=field, uri=uri)[0]

    def find_all(self, field: str, uri: str, most: int | None = None) -> list[SourceFile]:
        return self._found("find_all", field=field, uri=uri, most=most)

    def _found(self, what: str, **arguments: Any) -> list[SourceFile]:
        answer, described = self._parent.ask(what, **arguments)
        found = note_files(self._parent, pickle.loads(described))
        for _ in range(int(answer["pages"]) - 1):
            found += note_files(self._parent, pickle.loads(self._parent.ask("more_files")[1]))
        return found


# --- Objects that travel ---

# The most objects that are pickled together: those of a group share their columns and casts, and each travels with all.
GROUP = 64
# The most files and bytes that the objects of a group have together, unless one object has more. Of bytes, those that
# its objects do not share.
GROUP_FILES, GROUP_BYTES = 2000, 256 * 1024


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes a file as its place in `numbers`, by which the parent knows the files."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        return self.numbers.setdefault(obj.number, len(self.numbers)) if isinstance(obj, ParentFile) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes | bytearray, files: Sequence[SourceFile]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def persistent_load(self, pid: Any) -> SourceFile:
        file: SourceFile = self._files[pid]
        return file


def dump(value: object) -> tuple[bytes, list[int]]:
    """Pickle a value; return the numbers of its files, too, in the order by which the pickle names them."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), list(pickler.numbers)


def grouped(items: Sequence[Any]) -> Iterator[tuple[Sequence[Any], bytes, list[int]]]:
    """Yield (items, their pickle, the numbers of their files): few enough items that each may travel with all."""
    waiting = [items[begin : begin + GROUP] for begin in range(0, len(items), GROUP)][::-1]
    while waiting:
        group = waiting.pop()
        data, numbers = dump(group)
        fitting = _fitting(group, data, numbers)
        if fitting < len(group):
            waiting += [group[begin : begin + fitting] for begin in range(0, len(group), fitting)][::-1]
        else:
            yield group, data, numbers


def _fitting(group: Sequence[Any], data: bytes, numbers: Sequence[int]) -> int:
    """Return how many of its items a group may have, at least one.

    What all of them share does not count: each item alone has it, too.
    """
    others = len(group) - 1
    fitting = len(group) if len(numbers) <= GROUP_FILES else max(1, len(group) // 2)
    if others and len(data) > GROUP_BYTES:
        bytes_of_one = (len(data) - len(dump(group[:1])[0])) / others
        if bytes_of_one * others > GROUP_BYTES:
            fitting = min(fitting, max(1, int(GROUP_BYTES / bytes_of_one)))
    return fitting


# --- Calls ---

# The most bad rows that are sent together.
BAD_ROWS = 256


class Reader:
    """Answers the calls of the parent, one after the other."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        # The objects of the last group, for the next call on one of them.
        self._loaded: tuple[str, list[Any]] = ("", [])

    def answer(self, call: dict[str, Any], payload: bytearray) -> None:
        for name, value in call["sizes"].items():
            setattr(interface, name, value)
        if call["op"] == "open":
            self._loaded = ("", [])
            self._parent.files = {}
            self._open(**pickle.loads(payload))
            return
        objects = self._objects(call["key"], payload)  # the pickle of a group, unless it is the last call's
        if call["op"] == "parts":
            self._divide(objects)
        elif call["op"] == "tables":
            self._read(objects[call["index"]])
        else:
            self._scan(objects[call["index"]])

    def _objects(self, key: str, payload: bytearray) -> list[Any]:
        if payload:
            self._parent.files = {}
            described, data = pickle.loads(payload)
            self._loaded = key, _Unpickler(data, note_files(self._parent, enumerate(described))).load()
        assert self._loaded[0] == key
        return self._loaded[1]

    def _open(self, sources: Any, column_types: Any, partitioning: str, *, in_tasks: bool) -> None:
        files: Any = _Files(self._parent)
        run_units = _UnitsOfParent(self._parent) if in_tasks else None
        opened = open_sources(sources, files, column_types, partitioning, run_units)
        facts = [{"index": one.index, "split": one.split} for one in opened]
        self._send_rows([one.rows for one in opened], facts)
        classes = next((names for one in opened if (names := one.rows.class_names) is not None), None)
        self._parent.send({"end": True, "classes": classes})

    def _divide(self, objects: Sequence[RowSource]) -> None:
        from data_service.imports.plan import identity_of

        for place, whole in enumerate(objects):
            parts = whole.parts()
            self._send_rows(parts, [{"of": place, "identity": identity_of(part)} for part in parts])
        self._parent.send({"end": True})

    def _send_rows(self, rows: Sequence[RowSource], facts: Sequence[dict[str, Any]]) -> None:
        """Send row sources, in groups with one schema each, and what the parent knows of each."""
        begin = 0
        while begin < len(rows):
            schema = rows[begin].schema
            end = begin + 1
            while end < len(rows) and rows[end].schema.equals(schema, check_metadata=True):
                end += 1
            columns = schema.serialize().to_pybytes()
            at = begin
            for group, data, numbers in grouped(rows[begin:end]):
                items = [
                    {
                        **facts[at + place],
                        "row_count": one.row_count,
                        "size_bytes": one.size_bytes,
                        "has_classes": one.class_names is not None,
                    }
                    for place, one in enumerate(group)
                ]
                at += len(group)
                header = {"rows": items, "files": numbers, "schema_bytes": len(columns)}
                self._parent.send(header, columns + data)
            begin = end

    def _read(self, rows: RowSource) -> None:
        sink = _BadRows(self._parent)
        schema = rows.schema
        try:
            for table in rows.tables(sink):
                sink.send()
                if not table.schema.equals(schema, check_metadata=True):
                    schema = table.schema
                    self._parent.send({"schema": True}, schema.serialize())
                batches = [batch for batch in table.to_batches() if batch.num_rows]
                for place, batch in enumerate(batches):
                    self._parent.send({"batch": True, "is_last": place == len(batches) - 1}, batch.serialize())
                if self._parent.has_stopped():
                    break
        finally:
            sink.send()
        self._parent.send({"end": True})

    def _scan(self, work_and_unit: tuple[Any, ScanUnit]) -> None:
        work, unit = work_and_unit
        data, numbers = dump(work(unit))
        self._parent.send({"found": True, "files": numbers}, data)
        self._parent.send({"end": True})


class _BadRows:
    """A `BadRowSink` that sends the rows to the parent, some at a time, before the table that follows them."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._rows: list[tuple[str, str, str, str, int]] = []

    def add(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        self._rows.append((source, place, reason, excerpt, rows))
        if len(self._rows) >= BAD_ROWS:
            self.send()

    def send(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._parent.send({"bad": rows})


@dataclass(frozen=True)
class _UnitsOfParent:
    """A `UnitRunner`: the parent has tasks scan the units, each in a process like this one."""

    parent: Parent

    def __call__(self, work: Any, units: Sequence[ScanUnit]) -> Iterator[Any]:
        for group, data, numbers in grouped([(work, unit) for unit in units]):
            items = [{"number": unit.number, "where": unit.where, "row_count": unit.row_count} for _, unit in group]
            self.parent.send({"units": items, "files": numbers}, data)
        self.parent.ask("run_units", name=type(work).__name__.strip("_").lower())
        try:
            while True:
                answer, found = self.parent.ask("next_found")
                if "files" not in answer:
                    return
                files = [self.parent.files[number] for number in answer["files"]]
                yield _Unpickler(found, files).load()
        finally:
            self.parent.ask("close_units")


# --- The process ---

# The most files that are open at the same time.
OPEN_FILES = 256
# The status of a process that ran out of memory.
MEMORY_STATUS = 77


def main() -> None:
    """Serve the parent until it closes the socket. Arguments: the socket, the parent's id, and the limit in bytes."""
    descriptor, parent_id, memory_bytes = map(int, sys.argv[1:4])
    has_network = not enter_namespaces(CLONE_NEWNET | CLONE_NEWIPC)
    die_with_parent()  # behind the namespaces: a user namespace would undo it
    if os.getppid() != parent_id:
        return
    connection = socket.socket(fileno=descriptor)
    # The limit is for what reading takes, so what the interpreter and the libraries have so far comes on top.
    data_bytes = memory_of("self", "VmData") + memory_bytes
    set_limits(
        [
            (resource.RLIMIT_DATA, data_bytes),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ]
    )
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    parent = Parent(connection)
    parent.send({"ready": True, "has_network": has_network})
    try:
        _serve(parent)
    except MemoryError:
        # At once: an answer would take memory, too, and half a frame of the parent may be left in the socket.
        os._exit(MEMORY_STATUS)


def _serve(parent: Parent) -> NoReturn:
    reader = Reader(parent)
    while True:
        call, payload = parent.next_call()
        try:
            reader.answer(call, payload)
        except MillraceError as error:
            parent.send({"error": error.as_record()})
        except MemoryError:
            raise
        except Exception:
            parent.send({"fault": traceback.format_exc()})
        del payload
