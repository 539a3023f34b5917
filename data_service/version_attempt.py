"""The common parts of every attempt at creating a version: its folders, the final commit, and kept results.

The results of finished parts are kept, so that an attempt goes on where a lost one ended.

A worker writes a record of each finished part below its attempt's folder, after the part's data files:

    {folder}/kept/{pass}/{part number}

The next attempt copies records and data files into its own folder, and runs the parts that have no record. Copies keep
the fencing simple: an attempt that was wrongly taken for dead may write to, or delete, nothing but its own folder.

A record begins with a line of JSON, its header; the result follows. The header has a digest of everything that the
result depends on. A record whose digest is another, or that was altered, is ignored, and its part is done again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib
import io
import json
import logging
import os
import pickle
import shutil
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

import numpy as np
import pyarrow as pa

from data_service.domain.splits import SplitRange
from shared.dataset_version.manifest import (
    QUARANTINE,
    REPORT,
    Attachment,
    Column,
    DataFile,
    Manifest,
    Parent,
    Prediction,
    Split,
    sha256_hex,
    shape_of,
)
from shared.dataset_version.pages import manifest_with
from shared.errors import STORE_OUTAGES, Cancelled, DataLoss, MillraceError, ResourceExhausted
from shared.jobs import AttemptContext
from shared.jobs.attempt import TRANSIENT
from shared.resource_log import StaleAttempt
from shared.settings import StoreSettings
from shared.storage import ObjectMissing, ObjectStore, open_store
from shared.storage.object_store import STORE_FULL, key_problem

# --- Attempt ---

logger = logging.getLogger(__name__)

# --- Attempt folder ---
# The folders of an attempt at creating a version: its own folder in the store, and one on the local disk.

# The folder below an attempt's own for the pins of uploads, which its tasks read.
PINS = "pins"
# The delay before a full disk is tried again.
FULL_RETRY_S = 30.0
FULL = (errno.ENOSPC, errno.EDQUOT)


def new_folder(context: AttemptContext) -> str:
    """Return a folder of the attempt's own; later attempts delete it."""
    return f"{context.folder}/data/a{context.attempt:05d}-{uuid.uuid4().hex[:8]}"


@contextmanager
def attempt_folder(context: AttemptContext, *, keeps_parts: bool = False) -> Iterator[tuple[str, Path]]:
    """Provide the attempt's folder in the store, and a local scratch folder that is deleted afterwards.

    First deletes the folders of lost attempts. If the body fails, deletes what it wrote, so that nothing of a failed
    attempt stays readable. Raises `ResourceExhausted` if the local disk is full.

    With `keeps_parts` it first takes over the parts that lost attempts finished, unless the store is too full for the
    copies. If it is lost itself, its folder stays for the next attempt. If none follows, the garbage collector deletes
    the folder once the job has ended.
    """
    folder = new_folder(context)
    try:
        if keeps_parts:
            _take_over_parts(context, folder)
        _collect_lost_attempts(context)
        with scratch_folder() as scratch:
            yield folder, scratch
        if keeps_parts:
            # Later, because this attempt may still be lost before its commit.
            context.afterwards(partial(_forget_parts, context.store, folder))
    except BaseException as error:
        if not (keeps_parts and _may_be_taken_over(context, error)):
            with suppress(MillraceError):
                context.store.delete_folder(folder)
        if isinstance(error, OSError) and error.errno in FULL:
            raise ResourceExhausted(
                "the disk of the node that makes the version is full; free some space in its temporary folder",
                reason="SCRATCH_FULL",
                retry_after_s=FULL_RETRY_S,
            ) from error
        raise


def _take_over_parts(context: AttemptContext, folder: str) -> None:
    own, first = f"a{context.attempt:05d}", f"a{context.job.first_attempt:05d}"
    lost = [name for name in context.store.folders(f"{context.folder}/data") if first <= name < own]
    sources = [f"{context.folder}/data/{name}" for name in reversed(lost)]
    try:
        if count := take_over(context.store, sources, folder, context.raise_if_stopped):
            logger.info("%d finished parts of lost attempts are taken over", count)
    except ResourceExhausted as error:
        if error.specific_reason != STORE_FULL:
            raise
        # The folders of the lost attempts take the room, and are deleted next. If this attempt ended here, they would
        # stay, and each later attempt would end in the same way.
        logger.warning("the object store has no room for copies of finished parts; all parts are done again")
        context.store.delete_folder(folder)


def _may_be_taken_over(context: AttemptContext, error: BaseException) -> bool:
    """Return whether another attempt of the job may follow that is to find this one's parts."""
    if isinstance(error, MillraceError):
        # A full store needs the space, if only to record how the attempt ended.
        is_full = error.specific_reason == STORE_FULL
        return isinstance(error, TRANSIENT) and not isinstance(error, Cancelled) and not is_full
    return not isinstance(error, StaleAttempt) or context.is_superseded


def _forget_parts(store: ObjectStore, folder: str) -> None:
    try:
        forget(store, folder)
        store.delete_folder(f"{folder}/{PINS}")
    except STORE_OUTAGES as error:
        logger.warning(
            "records of parts stay in %s until the garbage collector deletes them: %s", folder, error.message
        )


def _collect_lost_attempts(context: AttemptContext) -> None:
    """Delete the folders of earlier attempts.

    The log has fenced them, so they cannot be committed any more.
    """
    own = f"a{context.attempt:05d}"
    for attempt in context.store.folders(f"{context.folder}/data"):
        if attempt < own:
            context.store.delete_folder(f"{context.folder}/data/{attempt}")


# --- Commit ---
# The last step of every job that creates a version: writes the report, the quarantined rows, and then the manifest.


def columns_of(schema: pa.Schema, value_names: Mapping[str, Sequence[str]]) -> list[Column]:
    """Return the manifest's columns for a logical schema without `_row_id`."""
    return [
        Column(
            name=field.name,
            arrow_type=str(field.type),
            shape=shape_of(field.type),
            value_names=list(value_names.get(field.name, [])),
        )
        for field in schema
    ]


def commit_version(
    store: ObjectStore,
    folder: str,
    *,
    columns: Sequence[Column],
    ranges: Sequence[SplitRange],
    files: Sequence[DataFile],
    report: Mapping[str, Any],
    quarantine: Path | None,
    quarantined_row_count: int,
    parents: Sequence[Parent] = (),
    ingested: Sequence[Column] | None = None,
    transforms: Sequence[dict[str, Any]] = (),
    prediction: Prediction | None = None,
) -> dict[str, Any]:
    """Write report, quarantined rows, pages of the files and manifest below `folder`.

    Return the job's result, which names the manifest; only that result creates the version. `report` is a
    QualityReport as JSON, `quarantine` a local file of JSON lines. Raises `DataLoss`, and writes nothing, unless the
    files have each row id of `ranges` once.
    """
    _refuse_gaps(ranges, files)
    attachments = [_attach(store, folder, REPORT, json.dumps(report, sort_keys=True, separators=(",", ":")).encode())]
    if quarantine is not None and quarantine.stat().st_size:
        attachments.append(_attach_file(store, folder, QUARANTINE, quarantine))
    manifest = Manifest(
        columns=list(columns),
        splits=[Split(name=one.name, first_row_id=one.first_row_id, row_count=one.row_count) for one in ranges],
        files=[],
        parents=list(parents),
        ingested=list(columns if ingested is None else ingested),
        transforms=list(transforms),
        attachments=attachments,
        quarantined_row_count=quarantined_row_count,
        prediction=prediction,
    )
    # Pages of the files, if there are many, come first: the manifest names them with their digests.
    data = manifest_with(manifest, store, folder, sorted(files, key=lambda file: file.first_row_id)).to_json()
    key = f"{folder}/manifest.json"
    store.put(key, data)
    return {"manifest": key, "manifest_sha256": sha256_hex(data)}


def _refuse_gaps(ranges: Iterable[SplitRange], files: Iterable[DataFile]) -> None:
    next_row_ids = {one.name: one.first_row_id for one in ranges}
    for file in sorted(files, key=lambda file: (file.first_row_id, file.row_count)):
        expected = next_row_ids.get(file.split)
        if expected is None:
            raise _incomplete(file.split, f"{file.path} is of a split that the version lacks")
        if file.first_row_id != expected:
            raise _incomplete(file.split, f"{file.path} begins at row {file.first_row_id}, and not at {expected}")
        next_row_ids[file.split] = expected + file.row_count
    for one in ranges:
        end = one.first_row_id + one.row_count
        if next_row_ids[one.name] != end:
            raise _incomplete(one.name, f"they end at row {next_row_ids[one.name]}, and the split at {end}")


def _incomplete(split: str, what: str) -> DataLoss:
    """Return the error of files that lack rows. Another attempt would take over the same files."""
    return DataLoss(
        f"the files of split {split!r} do not have each of its rows once: {what}; this is a fault of the service: "
        "start it anew, and report the fault if it comes again",
        reason="FILES_INCOMPLETE",
        metadata={"split": split},
    )


def _attach(store: ObjectStore, folder: str, path: str, data: bytes) -> Attachment:
    store.put(f"{folder}/{path}", data)
    return Attachment(path=path, size_bytes=len(data), sha256=sha256_hex(data))


def _attach_file(store: ObjectStore, folder: str, path: str, local: Path) -> Attachment:
    with local.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    store.upload_file(local, f"{folder}/{path}")
    return Attachment(path=path, size_bytes=local.stat().st_size, sha256=digest)


# --- Scratch ---
# Folders on the local disk for data that is not yet in the store. They are deleted after the work, or before the next
# work begins.

PREFIX = "millrace-scratch-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Provide a new folder that is deleted afterwards.

    First deletes the folders of killed processes. The owner holds a lock on the folder itself, which the kernel
    releases when the owner dies. Process numbers would not do, since containers that share a temporary folder do not
    see each other's processes.
    """
    _collect_unowned()
    folder, lock = _owned_folder()
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        finally:
            os.close(lock)


def _owned_folder() -> tuple[Path, int]:
    """Return a new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Another process may remove the folder before it is locked; then it no longer exists once we have the lock.
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _collect_unowned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # deleted just now, owned by another user, or not a folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed stays for a later collection
        except BlockingIOError:
            continue  # its owner is alive
        finally:
            os.close(lock)


# --- Kept parts ---

# The folder of the records below an attempt's folder.
KEPT = "kept"
# The most requests to the store at once.
REQUESTS = 16
# A larger result is not kept: reading it again would take as much memory as all else that an attempt does.
MAX_RECORD_BYTES = 256 * 1024 * 1024
# The header is read without the result. One that would be longer, because of many data files, is not written.
MAX_HEADER_BYTES = 64 * 1024


# --- The pass ---
# What the parts of one pass over the input have in common.


class Part(Protocol):
    @property
    def number(self) -> int: ...


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class KeptPass:
    """Which results of a pass are taken over, and how they are stored.

    `name` is unlike that of any other pass of the job. `depends_on` are JSON-able values: everything besides a part
    that its result depends on. `format` is that of the results. `files_of` returns the paths of a result's data files,
    relative to the attempt's folder.
    """

    name: str
    depends_on: Mapping[str, Any]
    format: ResultFormat
    files_of: Callable[[Any], Sequence[str]]

    def digest(self, part: object) -> str:
        """Return the digest of the part and all else that its result depends on.

        A part's `repr` must be the same in each process, and name all that distinguishes the part.
        """
        return hashlib.sha256(f"{self._digest}\n{part!r}".encode()).hexdigest()

    @cached_property
    def _digest(self) -> str:
        text = json.dumps([self.name, self.depends_on, _library_versions()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@cache
def _library_versions() -> dict[str, str]:
    """Each part's task asks for them, and reading them from files takes milliseconds."""
    return {name: metadata.version(name) for name in ("millrace", "numpy", "pyarrow")}


def no_files(_: object) -> Sequence[str]:
    """The `files_of` of a pass that writes no data files."""
    return ()


# --- Records ---


@dataclass(frozen=True, kw_only=True)
class Header:
    """`depends_on` is the digest of `KeptPass`; `execution` differs whenever a part is worked on."""

    depends_on: str
    execution: str
    files: Sequence[str]
    result_sha256: str


class Unusable(Exception):
    """A record that was damaged, altered, or written for other work."""


def header_of(data: bytes) -> Header:
    """Return the header at the beginning of a record. Raises `Unusable`."""
    line, end, _ = data.partition(b"\n")
    try:
        values = json.loads(line) if end else None
        header = Header(**values)  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError) as error:
        raise Unusable("it has no header") from error
    texts = (header.depends_on, header.execution, header.result_sha256)
    if not isinstance(header.files, list) or not all(isinstance(text, str) for text in (*texts, *header.files)):
        raise Unusable("its header has values of other types")
    if any(key_problem(path) for path in header.files):
        raise Unusable("it names a file outside of its folder")
    return header


class KeptWork(Generic[P]):
    """The work on a part, whose result is kept: a `Work` around another one.

    Ray calls it once more for all parts of a lost task, so it looks for the part's record first.
    """

    def __init__(self, work: Callable[[P], Any], kept: KeptPass, folder: str, settings: StoreSettings) -> None:
        self._work = work
        self._kept = kept
        self._folder = folder
        self._settings = settings

    def __call__(self, part: P) -> Any:
        store = open_store(self._settings)
        key = _record_key(self._folder, self._kept, part)
        with suppress(ObjectMissing, Unusable):
            return _result(store.get(key), self._kept, part)
        result = self._work(part)
        self._keep(store, key, part, result)
        return result

    def _keep(self, store: ObjectStore, key: str, part: P, result: object) -> None:
        try:
            data = self._kept.format.dumps(result)
        except pickle.PicklingError:
            logger.exception("the result of part %d is not kept", part.number)
            return
        header = Header(
            depends_on=self._kept.digest(part),
            execution=uuid4().hex,
            files=list(self._kept.files_of(result)),
            result_sha256=hashlib.sha256(data).hexdigest(),
        )
        line = json.dumps(asdict(header)).encode() + b"\n"
        if len(line) > MAX_HEADER_BYTES or len(line) + len(data) > MAX_RECORD_BYTES:
            logger.info("the result of part %d is too large to be kept: %d bytes", part.number, len(data))
            return
        try:
            store.put(key, line + data)
        except STORE_OUTAGES as error:
            # The part is done all the same. Only a later attempt would have to do it again.
            logger.warning("the result of part %d is not kept: %s", part.number, error.message)


def kept_results(
    store: ObjectStore, folder: str, kept: KeptPass, parts: Sequence[P]
) -> Generator[tuple[P, Any], None, None]:
    """Yield the parts that have a record below `folder`, with their results.

    A record that is unusable is as good as missing.
    """
    prefix = f"{folder}/{KEPT}/{kept.name}"
    there = {info.key for info in store.list(prefix) if info.size_bytes <= MAX_RECORD_BYTES}

    def read(part: P) -> tuple[P, Any, bool]:
        try:
            return part, _result(store.get(_record_key(folder, kept, part)), kept, part), True
        except (ObjectMissing, Unusable) as error:
            logger.warning("part %d is done again, as its record cannot be used: %s", part.number, error)
            return part, None, False

    for part, result, is_usable in at_once(read, [part for part in parts if _record_key(folder, kept, part) in there]):
        if is_usable:
            yield part, result


def _record_key(folder: str, kept: KeptPass, part: Part) -> str:
    return f"{folder}/{KEPT}/{kept.name}/{part.number:07d}"


def _result(data: bytes, kept: KeptPass, part: Part) -> Any:
    header = header_of(data)
    if header.depends_on != kept.digest(part):
        raise Unusable("it was written for other work")
    result = data[data.index(b"\n") + 1 :]
    if hashlib.sha256(result).hexdigest() != header.result_sha256:
        raise Unusable("its result was altered")
    return kept.format.loads(result)


# --- The next attempt ---


def take_over(store: ObjectStore, earlier: Iterable[str], folder: str, raise_if_stopped: Callable[[], None]) -> int:
    """Copies the records and data files of earlier attempts' folders into `folder`, and returns how many parts.

    Where several have a record of a part, that of the first in `earlier` counts. A record whose data files are gone is
    left out. Each record is copied after its files: if this attempt is lost, too, what it has copied is whole.
    """
    taken: set[str] = set()
    for source in earlier:
        found = [info for info in store.list(f"{source}/{KEPT}") if info.size_bytes <= MAX_RECORD_BYTES]
        sizes = {info.key.removeprefix(f"{source}/"): info.size_bytes for info in found}

        def copy(path: str, source: str = source, sizes: Mapping[str, int] = sizes) -> str:
            raise_if_stopped()
            key = f"{source}/{path}"
            try:
                for file in header_of(store.get_range(key, 0, min(sizes[path], MAX_HEADER_BYTES))).files:
                    store.copy(f"{source}/{file}", f"{folder}/{file}")
                store.copy(key, f"{folder}/{path}")
            except (ObjectMissing, Unusable) as error:
                logger.warning("%s is not taken over, and its part is done again: %s", key, error)
                return ""
            return path

        taken.update(path for path in at_once(copy, sorted(sizes.keys() - taken)) if path)
    return len(taken)


def forget(store: ObjectStore, folder: str) -> None:
    """Delete the records of an attempt that was committed."""
    keys = [info.key for info in store.list(f"{folder}/{KEPT}")]
    for _ in at_once(store.delete, keys):
        pass


A = TypeVar("A")
B = TypeVar("B")


def at_once(do: Callable[[A], B], arguments: Collection[A]) -> Generator[B, None, None]:
    """Yield the results of `do` in order, a bounded number of them ahead of the caller."""
    if not arguments:
        return
    waiting = iter(arguments)
    with ThreadPoolExecutor(min(REQUESTS, len(arguments)), thread_name_prefix="kept-parts") as pool:
        try:
            running = deque(pool.submit(do, argument) for argument in islice(waiting, REQUESTS))
            while running:
                result = running.popleft().result()
                running.extend(pool.submit(do, argument) for argument in islice(waiting, 1))
                yield result
        finally:
            pool.shutdown(cancel_futures=True)


# --- Results ---
# Results are pickled, because they are the accumulators of statistics, checks and fits: dozens of classes. A record
# comes from the store, where others may write, too. So the unpickler finds only the classes that a format names, which
# are pure values, and calls nothing else. Values of numpy and Arrow are stored in these libraries' own formats, whose
# readers check them.


@dataclass(frozen=True)
class ResultFormat:
    """The classes of results.

    `classes` are qualified names such as "data_service.domain.checks.Check", or those of modules with ".*" for all
    classes that the module or those below it define. Objects of `left_out` are read back as None: who reads the result
    has them.
    """

    classes: frozenset[str]
    left_out: tuple[type, ...] = ()

    def dumps(self, result: object) -> bytes:
        """Raise `PicklingError` for an object that `loads` would refuse."""
        file = io.BytesIO()
        _Pickler(file, self).dump(result)
        return file.getvalue()

    def loads(self, data: bytes) -> Any:
        """Raise `Unusable` for anything but what `dumps` returns."""
        try:
            return _Unpickler(io.BytesIO(data), self).load()
        except Unusable:
            raise
        except Exception as error:  # bytes that are no pickle raise errors of any kind
            raise Unusable(f"its result cannot be read: {error!r}") from error

    def allows(self, module: str, name: str) -> bool:
        if not name.isidentifier():  # no attribute of a class, such as its functions
            return False
        if (module, name) == ("collections", "Counter") or f"{module}.{name}" in self.classes:
            return True
        folders = module.split(".")
        return any(f"{'.'.join(folders[:end])}.*" in self.classes for end in range(1, len(folders) + 1))


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, result_format: ResultFormat) -> None:
        super().__init__(file, protocol=5)
        self._format = result_format

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, self._format.left_out):
            return restore, ("", b"")
        if isinstance(obj, type):
            if not self._format.allows(obj.__module__, obj.__qualname__):
                raise pickle.PicklingError(f"{obj.__module__}.{obj.__qualname__} is no class of a kept result")
            return NotImplemented
        for kind, one in _FOREIGN.items():
            if isinstance(obj, one.type):
                return restore, (kind, one.dump(obj))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, result_format: ResultFormat) -> None:
        super().__init__(file)
        self._format = result_format

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, restore.__name__):
            return restore
        if not self._format.allows(module, name):
            raise Unusable(f"its result has a {module}.{name}")
        found = getattr(importlib.import_module(module), name, None)
        if not isinstance(found, type) or found.__module__ != module:
            raise Unusable(f"its result has a {module}.{name}, which is no class of that module")
        return found


def restore(kind: str, data: bytes) -> Any:
    """Return a value of numpy or Arrow, None for an object that was left out.

    The unpickler calls it with whatever a record has.
    """
    return _FOREIGN[kind].load(data) if kind else None


@dataclass(frozen=True)
class _Foreign:
    """How values of a class of numpy or Arrow are stored."""

    type: type
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]


def _array_bytes(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _table_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _table(data: bytes) -> pa.Table:
    table = pa.ipc.open_stream(data).read_all()
    table.validate(full=True)
    return table


def _column_bytes(column: pa.Array | pa.ChunkedArray) -> bytes:
    return _table_bytes(pa.table({"": column}))


def _arrow_array(data: bytes) -> pa.Array:
    column = _table(data).column(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _schema(data: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(data))


_FOREIGN: Mapping[str, _Foreign] = {
    "dtype": _Foreign(np.dtype, lambda dtype: str(dtype.str).encode(), lambda data: np.dtype(data.decode())),
    "scalar": _Foreign(np.generic, _array_bytes, lambda data: _array(data)[()]),
    "array": _Foreign(np.ndarray, _array_bytes, _array),
    "type": _Foreign(
        pa.DataType,
        lambda kind: bytes(pa.schema([pa.field("", kind)]).serialize()),
        lambda data: _schema(data).field(0).type,
    ),
    "schema": _Foreign(pa.Schema, lambda schema: bytes(schema.serialize()), _schema),
    "table": _Foreign(pa.Table, _table_bytes, _table),
    "column": _Foreign(pa.ChunkedArray, _column_bytes, lambda data: _table(data).column(0)),
    "arrow array": _Foreign(pa.Array, _column_bytes, _arrow_array),
}
