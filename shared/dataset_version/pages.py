"""The files of a version and their row groups, which a large version has in pages.

A small version has its files in its manifest. A larger one has them in pages below its folder, so that what a reader
fetches does not grow with the version:

    manifest.json                       names up to MAX_CHILDREN pages, with the digest of each
    pages/1-00000000.arrow              names up to MAX_CHILDREN pages of level 0; there are such pages only if the
                                        manifest cannot name all of level 0, and pages of level 2 only if it cannot
                                        name all of level 1
    pages/0-00000000.arrow              names files, in the order of row ids, with the rows of each row group

A page is an Arrow stream of one batch. It is found by bisection of the first row ids, or of the numbers of files,
before it; it is fetched on demand, compared with its digest, and kept in a cache of bounded size. Row groups are numpy
arrays; a `RowGroup` is made only for a group that is asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, cast, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.dataset_version.manifest import (
    DataFile,
    DatasetVersion,
    FilesInPages,
    Manifest,
    PageIndex,
    Pages,
    Split,
    sha256_hex,
)
from shared.dataset_version.version import check_not_deleted
from shared.errors import DataLoss
from shared.storage import ObjectMissing, ObjectStore

# A version has its files in its manifest up to these numbers: one request then opens it.
MAX_INLINE_FILES, MAX_INLINE_GROUPS = 256, 4096
# The most that a page of level 0 names: about 170 KiB of digests, and at most 1 MiB of row counts in memory.
MAX_PAGE_FILES, MAX_PAGE_GROUPS = 2048, 256 * 1024
# The most pages that a manifest or a page names: at most 130 KiB of a manifest.
MAX_CHILDREN = 1024
# The limit for the decoded pages of all readers that share a cache.
MAX_CACHED_BYTES = 32 * 1024 * 1024
# The most files of a version that are kept as `DataFile`s.
MAX_CACHED_FILES = 64

Ints = NDArray[np.int64]
# (start, length) pairs, in bytes.
Ranges = Sequence[tuple[int, int]]


class RangeStore(Protocol):
    """The read access to a store that a reader needs, with the methods of `ObjectStore`."""

    def get_ranges(self, key: str, ranges: Ranges) -> list[memoryview]: ...

    def local_file(self, key: str) -> AbstractContextManager[pa.NativeFile | None]: ...


# --- Row groups ---


@dataclass(frozen=True)
class RowGroup:
    """The rows `first_row_id` to `first_row_id + row_count`. `file_index` is the index in the version's files."""

    file_index: int
    group_index: int
    first_row_id: int
    row_count: int


@dataclass(frozen=True, eq=False)
class RowGroups(Sequence[RowGroup]):
    """Row groups of consecutive files, as arrays. G = groups, F = files that have some of them."""

    row_counts: Ints
    """The rows of each group: (G,)."""
    file_indices: Ints
    """The index of each file in the version: (F,)."""
    file_starts: Ints
    """Where each file's first group is or would be in `row_counts`, negative if it lies before them: (F,)."""
    file_first_row_ids: Ints
    """The first row id of the groups here of each file: (F,)."""

    @classmethod
    def joined(cls, parts: Sequence[RowGroups]) -> RowGroups:
        """Return the groups of all parts, which follow each other."""
        return parts[0] if len(parts) == 1 else cls.gathered(parts, sum(map(len, parts)))

    @classmethod
    def gathered(cls, parts: Iterable[RowGroups], max_groups: int) -> RowGroups:
        """Return the groups of all parts, which follow each other and have no more groups than `max_groups`.

        Each part is copied as it comes: the parts of a version with 10^8 groups would take twice the memory.
        """
        # Memory that no group is written to is never touched.
        row_counts = np.empty(max_groups, np.int64)
        indices, starts, first_row_ids = [NO_INTS], [NO_INTS], [NO_INTS]
        count = 0
        for part in parts:
            row_counts[count : count + len(part)] = part.row_counts
            indices.append(part.file_indices)
            starts.append(part.file_starts + count)
            first_row_ids.append(part.file_first_row_ids)
            count += len(part)
        file_indices = np.concatenate(indices)
        # Of a file whose groups are in two parts, the first entry counts for both.
        is_first = np.diff(file_indices, prepend=-1) != 0
        return cls(
            row_counts[:count] if 2 * count >= max_groups else row_counts[:count].copy(),
            file_indices[is_first],
            np.concatenate(starts)[is_first],
            np.concatenate(first_row_ids)[is_first],
        )

    def __repr__(self) -> str:  # the same for equal groups in each process, as that of their list is
        digest = hashlib.sha256(b"".join(self._bytes())).hexdigest()
        return f"RowGroups({len(self)} groups, {self.row_count} rows, sha256 {digest})"

    def __reduce__(self) -> tuple[Any, ...]:  # the same bytes for equal groups in each process
        return _row_groups_of, self._bytes()

    @cached_property
    def ends(self) -> Ints:
        """The rows up to the end of each group: (G,)."""
        return np.cumsum(self.row_counts)

    @cached_property
    def row_count(self) -> int:
        return int(self.row_counts.sum())

    def __len__(self) -> int:
        return len(self.row_counts)

    @overload
    def __getitem__(self, place: int) -> RowGroup: ...

    @overload
    def __getitem__(self, place: slice) -> RowGroups: ...

    def __getitem__(self, place: int | slice) -> RowGroup | RowGroups:
        if isinstance(place, slice):
            return self._sliced(*place.indices(len(self)))
        if not -len(self) <= place < len(self):
            raise IndexError(f"row group {place} of {len(self)}")
        place %= len(self)
        file = int(np.searchsorted(self.file_starts, place, side="right")) - 1
        return RowGroup(
            file_index=int(self.file_indices[file]),
            group_index=place - int(self.file_starts[file]),
            first_row_id=int(self.file_first_row_ids[file]) + self._rows_within(file, place),
            row_count=int(self.row_counts[place]),
        )

    def __iter__(self) -> Iterator[RowGroup]:
        starts, ends = self.file_starts, np.append(self.file_starts[1:], len(self))
        files = np.stack([self.file_indices, starts, ends[: len(starts)], self.file_first_row_ids], axis=1)
        for file_index, start, end, first_row_id in files.tolist():
            first = first_row_id
            for place, row_count in enumerate(self.row_counts[max(start, 0) : end].tolist(), max(start, 0)):
                yield RowGroup(file_index, place - start, first, row_count)
                first += row_count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(RowGroup.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def _bytes(self) -> tuple[bytes, ...]:
        arrays = (self.row_counts, self.file_indices, self.file_starts, self.file_first_row_ids)
        return tuple(np.asarray(array, "<i8").tobytes() for array in arrays)

    def _sliced(self, begin: int, end: int, step: int) -> RowGroups:
        if step != 1:
            raise ValueError("row groups are sliced in their order; use a step of 1")
        end = max(begin, end)
        first = max(int(np.searchsorted(self.file_starts, begin, side="right")) - 1, 0)
        last = int(np.searchsorted(self.file_starts, end, side="left")) if end > begin else first
        first_row_ids = self.file_first_row_ids[first:last].copy()
        if len(first_row_ids):
            first_row_ids[0] += self._rows_within(first, begin)
        # Copies, since a view would keep the whole array in memory.
        return RowGroups(
            self.row_counts[begin:end].copy(),
            self.file_indices[first:last].copy(),
            self.file_starts[first:last] - begin,
            first_row_ids,
        )

    def _rows_within(self, file: int, place: int) -> int:
        """Return the rows of the file's groups here before the group at `place`."""
        start = max(int(self.file_starts[file]), 0)
        return int(self.ends[place - 1] if place else 0) - int(self.ends[start - 1] if start else 0)


NO_INTS: Ints = np.zeros(0, np.int64)
NO_GROUPS = RowGroups(NO_INTS, NO_INTS, NO_INTS, NO_INTS)


def _row_groups_of(*arrays: bytes) -> RowGroups:
    return RowGroups(*(np.frombuffer(array, "<i8").astype(np.int64) for array in arrays))


# --- A page of files ---

_DIGEST = pa.binary(32)
_FILES = pa.schema(
    [
        ("path", pa.string()),
        ("split", pa.string()),
        ("first_row_id", pa.int64()),
        ("row_count", pa.int64()),
        ("row_groups", pa.list_(pa.int32())),
        ("size_bytes", pa.int64()),
        ("sha256", _DIGEST),
        ("footer_bytes", pa.int64()),
        ("footer_sha256", _DIGEST),
        ("raw_bytes", pa.int64()),
    ]
)


class FilePage:
    """Consecutive files of a version, in columns. F = files, G = their row groups."""

    def __init__(self, first_file: int, batch: pa.RecordBatch) -> None:
        self.first_file = first_file
        self._batch = batch
        self.nbytes = batch.nbytes
        # (F,)
        self.first_row_ids: Ints = batch.column("first_row_id").to_numpy()
        self.row_counts: Ints = batch.column("row_count").to_numpy()
        self.size_bytes: Ints = batch.column("size_bytes").to_numpy()
        groups = batch.column("row_groups")
        # (F + 1,) and (G,)
        self._group_starts = groups.offsets.to_numpy().astype(np.int64)
        self._group_rows: NDArray[np.int32] = groups.values.to_numpy()

    def __len__(self) -> int:
        return len(self.first_row_ids)

    def file(self, place: int) -> DataFile:
        """Return the file at this index of the page."""
        (record,) = self._batch.slice(place, 1).to_pylist()
        return DataFile(**{**record, "sha256": record["sha256"].hex(), "footer_sha256": record["footer_sha256"].hex()})

    def paths(self) -> list[str]:
        paths: list[str] = self._batch.column("path").to_pylist()
        return paths

    def row_groups(self, first_row_id: int, end_row_id: int) -> RowGroups:
        """Return the groups that have rows with these ids."""
        first = int(np.searchsorted(self.first_row_ids + self.row_counts, first_row_id, side="right"))
        end = int(np.searchsorted(self.first_row_ids, end_row_id, side="left"))
        if first >= end:
            return NO_GROUPS
        starts = self._group_starts[first : end + 1]
        groups = RowGroups(
            self._group_rows[starts[0] : starts[-1]].astype(np.int64),
            np.arange(self.first_file + first, self.first_file + end),
            starts[:-1] - starts[0],
            self.first_row_ids[first:end],
        )
        if (
            first_row_id <= self.first_row_ids[first]
            and self.first_row_ids[end - 1] + self.row_counts[end - 1] <= end_row_id
        ):
            return groups
        # Whole groups of the first file may lie before the rows, and of the last one after them.
        begin = int(np.searchsorted(groups.ends, first_row_id - self.first_row_ids[first], side="right"))
        last_start = int(groups.file_starts[-1])
        rows_before_last = int(groups.ends[last_start - 1]) if last_start else 0
        left = end_row_id - int(self.first_row_ids[end - 1])
        stop = int(np.searchsorted(groups.ends, rows_before_last + left, side="left")) + 1
        return groups[begin:stop] if begin or stop < len(groups) else groups


def _batch_of(files: Sequence[DataFile], schema: pa.Schema = _FILES) -> pa.RecordBatch:
    counts = np.cumsum([0, *(len(file.row_groups) for file in files)])
    rows = np.fromiter(itertools.chain.from_iterable(file.row_groups for file in files), np.int64, int(counts[-1]))
    arrays = []
    for field in schema:
        if field.name == "row_groups":
            arrays.append(pa.ListArray.from_arrays(pa.array(counts, pa.int32()), pa.array(rows).cast(pa.int32())))
        elif field.type == _DIGEST:
            arrays.append(_digests(getattr(file, field.name) for file in files))
        else:
            arrays.append(pa.array([getattr(file, field.name) for file in files], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _digests(in_hex: Iterable[str]) -> pa.Array:
    return pa.array([bytes.fromhex(one) for one in in_hex], _DIGEST)


# --- A page of pages ---

_CHILDREN = pa.schema(
    [
        ("page", pa.int64()),
        ("first_row_id", pa.int64()),
        ("file_count", pa.int64()),
        ("group_count", pa.int64()),
        ("page_bytes", pa.int64()),
        ("sha256", _DIGEST),
    ]
)


class _Node:
    """The pages that the manifest or a page names, and the number of files before each of them."""

    def __init__(self, index: PageIndex, first_file: int) -> None:
        self.index = index
        self.first_files = [first_file, *(first_file + np.cumsum(index.file_counts)).tolist()][:-1]
        self.nbytes = 512 * len(index.sha256)

    def __len__(self) -> int:
        return len(self.index.sha256)

    def path(self, child: int) -> str:
        return page_path(self.index.level, self.index.first_page + child)

    def child_of_row(self, row_id: int) -> int:
        return max(bisect_right(self.index.first_row_ids, row_id) - 1, 0)

    def child_of_file(self, index: int) -> int:
        return bisect_right(self.first_files, index) - 1


def page_path(level: int, number: int) -> str:
    """Return a page's path, relative to the version's folder."""
    return f"pages/{level}-{number:08d}.arrow"


def _index_of(level: int, batch: pa.RecordBatch) -> PageIndex:
    columns = batch.to_pydict()
    return PageIndex(
        level=level,
        first_page=columns["page"][0],
        first_row_ids=columns["first_row_id"],
        file_counts=columns["file_count"],
        group_counts=columns["group_count"],
        page_bytes=columns["page_bytes"],
        sha256=[one.hex() for one in columns["sha256"]],
    )


def _batch_of_index(index: PageIndex) -> pa.RecordBatch:
    pages = range(index.first_page, index.first_page + len(index.sha256))
    numbers = (pages, index.first_row_ids, index.file_counts, index.group_counts, index.page_bytes)
    arrays = [*(pa.array(one, pa.int64()) for one in numbers), _digests(index.sha256)]
    return pa.RecordBatch.from_arrays(arrays, schema=_CHILDREN)


# --- Writing ---


def fits_manifest(files: Sequence[DataFile]) -> bool:
    """Return whether a version with these files has them in its manifest."""
    return len(files) <= MAX_INLINE_FILES and sum(len(file.row_groups) for file in files) <= MAX_INLINE_GROUPS


def manifest_with(manifest: Manifest, store: ObjectStore, folder: str, files: Sequence[DataFile]) -> Manifest:
    """Return the manifest with these files, in the order of row ids. Write pages of them below `folder` if needed."""
    if fits_manifest(files):
        return replace(manifest, files=list(files))
    return replace(manifest, files=FilesInPages(), pages=write_pages(store, folder, files, manifest.splits))


def write_pages(store: ObjectStore, folder: str, files: Iterable[DataFile], splits: Sequence[Split]) -> Pages:
    """Write pages of the files, which come in the order of row ids, and return what the manifest says of them.

    The files of one page are in memory at a time.
    """
    split_bytes = {split.name: 0 for split in splits}
    writer = _LevelWriter(store, folder, 0)
    page: list[DataFile] = []
    group_count = 0
    for file in files:
        full = len(page) == MAX_PAGE_FILES or group_count + len(file.row_groups) > MAX_PAGE_GROUPS
        if page and full:
            writer.add(page[0].first_row_id, len(page), group_count, _batch_of(page))
            page, group_count = [], 0
        page.append(file)
        group_count += len(file.row_groups)
        split_bytes[file.split] += file.size_bytes
    if page:
        writer.add(page[0].first_row_id, len(page), group_count, _batch_of(page))
    index, page_count = writer.close()
    return Pages(index=index, page_count=page_count, split_bytes=list(split_bytes.values()))


class _LevelWriter:
    """Writes the pages of one level, and those of the levels above once they are full."""

    def __init__(self, store: ObjectStore, folder: str, level: int) -> None:
        self._store = store
        self._folder = folder
        self._level = level
        self._written = 0
        self._open = self._empty()
        self._above: _LevelWriter | None = None

    def add(self, first_row_id: int, file_count: int, group_count: int, batch: pa.RecordBatch) -> None:
        """Write a page."""
        if len(self._open.sha256) == MAX_CHILDREN:
            self._close_open()
        data = _encoded(batch)
        self._store.put(f"{self._folder}/{page_path(self._level, self._written)}", data)
        self._written += 1
        self._open.first_row_ids.append(first_row_id)
        self._open.file_counts.append(file_count)
        self._open.group_counts.append(group_count)
        self._open.page_bytes.append(len(data))
        self._open.sha256.append(sha256_hex(data))

    def close(self) -> tuple[PageIndex, int]:
        """Return the pages that the manifest names, and the number of all pages."""
        if self._above is None:
            return self._open, self._written
        self._close_open()
        index, above = self._above.close()
        return index, above + self._written

    def _close_open(self) -> None:
        if self._above is None:
            self._above = _LevelWriter(self._store, self._folder, self._level + 1)
        index = self._open
        self._above.add(index.first_row_ids[0], sum(index.file_counts), sum(index.group_counts), _batch_of_index(index))
        self._open = self._empty()

    def _empty(self) -> PageIndex:
        return PageIndex(
            level=self._level,
            first_page=self._written,
            first_row_ids=[],
            file_counts=[],
            group_counts=[],
            page_bytes=[],
            sha256=[],
        )


def _encoded(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(batch)
    return cast(bytes, sink.getvalue().to_pybytes())


def _decoded(data: memoryview) -> pa.RecordBatch:
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        return stream.read_next_batch()


# --- Reading ---


class PageCache:
    """A cache of decoded pages that several readers may share. Thread-safe.

    The least recently used pages are evicted first; the newest one always stays.
    """

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, FilePage | _Node] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> FilePage | _Node | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: Hashable, page: FilePage | _Node) -> None:
        with self._lock:
            if key in self._kept:  # two threads read it at the same time
                return
            self._kept[key] = page
            self._kept_bytes += page.nbytes
            while self._kept_bytes > self._max_bytes and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes


@dataclass(frozen=True)
class PageEntry:
    """A page as the manifest or another page names it. `path` is relative to the version's folder."""

    path: str
    size_bytes: int
    sha256: str
    level: int
    node: _Node
    child: int


class VersionFiles(Sequence[DataFile]):
    """The files of one version, in the order of row ids. Thread-safe.

    Its methods raise `DataLoss` for a page that is gone or is not what was committed, naming version and page, and
    `NotFound` if the version was deleted meanwhile.
    """

    def __init__(
        self,
        store: RangeStore,
        version: DatasetVersion,
        cache: PageCache | None = None,
        *,
        check_there: Callable[[DatasetVersion], None] | None = None,
    ) -> None:
        """`check_there` is called when a page is missing, see `VersionReader`."""
        self._store = store
        self._version = version
        self._cache = PageCache() if cache is None else cache
        self._check_there = check_there or (lambda found: check_not_deleted(cast(ObjectStore, store), found))
        pages = version.manifest.pages
        self._root = None if pages is None else _Node(pages.index, 0)
        self._file = lru_cache(maxsize=MAX_CACHED_FILES)(self._read_file)

    def __len__(self) -> int:
        return self._version.manifest.file_count

    @overload
    def __getitem__(self, place: int) -> DataFile: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[DataFile]: ...

    def __getitem__(self, place: int | slice) -> DataFile | Sequence[DataFile]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if self._root is None:
            return self._version.manifest.files[place]
        if not -len(self) <= place < len(self):
            raise IndexError(f"file {place} of {len(self)}")
        return self._file(place % len(self))

    def __iter__(self) -> Iterator[DataFile]:
        if self._root is None:
            yield from self._version.manifest.files
            return
        for page in self.pages():
            yield from map(page.file, range(len(page)))

    def pages(self, first_row_id: int = 0) -> Iterator[FilePage]:
        """Yield the pages of files from the one with the row on, each when it is asked for."""
        if self._root is None:
            yield self._inline_page
            return
        yield from self._pages_below(self._root, first_row_id)

    def row_groups(self, first_row_id: int, end_row_id: int) -> RowGroups:
        """Return all row groups that have rows with these ids."""
        found = (groups for _, groups in self.row_groups_by_page(first_row_id, end_row_id))
        if self._root is None:
            return RowGroups.joined([*found])
        index = self._root.index
        children = slice(self._root.child_of_row(first_row_id), self._root.child_of_row(end_row_id - 1) + 1)
        return RowGroups.gathered(found, sum(index.group_counts[children]))

    def row_groups_by_page(self, first_row_id: int, end_row_id: int) -> Iterator[tuple[FilePage, RowGroups]]:
        """Yield the row groups that have rows with these ids, page by page, each page when it is asked for."""
        if first_row_id >= end_row_id:
            return
        for page in self.pages(first_row_id):
            if len(page) and page.first_row_ids[0] >= end_row_id:
                return
            groups = page.row_groups(first_row_id, end_row_id)
            if len(groups):
                yield page, groups
            if len(page) and page.first_row_ids[-1] + page.row_counts[-1] >= end_row_id:
                return

    def entries(self, above: PageEntry | None = None) -> list[PageEntry]:
        """Return the pages that the page `above`, of level 1 or more, names; None: that the manifest names."""
        node = self._root if above is None else self._node(above.node, above.child)
        if node is None:
            return []
        level, index = node.index.level, node.index
        return [
            PageEntry(node.path(child), index.page_bytes[child], index.sha256[child], level, node, child)
            for child in range(len(node))
        ]

    def page(self, entry: PageEntry) -> FilePage:
        """Return a page of level 0."""
        return self._page(entry.node, entry.child)

    def page_paths(self, above: PageEntry | None = None) -> Iterator[str]:
        """Yield the paths of all pages, of all levels, that `above` names; None: that the version has."""
        entries = self.entries(above)
        yield from (entry.path for entry in entries)
        for entry in entries:
            if entry.level:
                yield from self.page_paths(entry)

    @cached_property
    def _inline_page(self) -> FilePage:
        schema = pa.schema([field for field in _FILES if field.type != _DIGEST])
        return FilePage(0, _batch_of(self._version.manifest.files, schema))

    def _read_file(self, index: int) -> DataFile:
        node = self._root
        assert node is not None
        while node.index.level:
            node = self._node(node, node.child_of_file(index))
        page = self._page(node, node.child_of_file(index))
        return page.file(index - page.first_file)

    def _pages_below(self, node: _Node, first_row_id: int) -> Iterator[FilePage]:
        for child in range(node.child_of_row(first_row_id), len(node)):
            if node.index.level:
                yield from self._pages_below(self._node(node, child), first_row_id)
            else:
                yield self._page(node, child)

    def _page(self, node: _Node, child: int) -> FilePage:
        return cast(FilePage, self._cached(node, child, lambda batch: FilePage(node.first_files[child], batch)))

    def _node(self, node: _Node, child: int) -> _Node:
        def decode(batch: pa.RecordBatch) -> _Node:
            return _Node(_index_of(node.index.level - 1, batch), node.first_files[child])

        return cast(_Node, self._cached(node, child, decode))

    def _cached(
        self, node: _Node, child: int, decode: Callable[[pa.RecordBatch], FilePage | _Node]
    ) -> FilePage | _Node:
        key = self._version.folder, node.path(child)
        known = self._cache.get(key)
        if known is None:
            known = decode(_decoded(self._fetched(node, child)))
            self._cache.keep(key, known)
        return known

    def _fetched(self, node: _Node, child: int) -> memoryview:
        path, size_bytes = node.path(child), node.index.page_bytes[child]
        try:
            (data,) = self._store.get_ranges(f"{self._version.folder}/{path}", [(0, size_bytes)])
        except ObjectMissing:
            self._check_there(self._version)
            raise self._lost(path, "is gone") from None
        except DataLoss:
            raise self._lost(path, "is shorter than its manifest says") from None
        if sha256_hex(data) != node.index.sha256[child]:
            raise self._lost(path, "is not what was committed")
        return data

    def _lost(self, path: str, why: str) -> DataLoss:
        name = self._version.name
        return DataLoss(
            f"the page {path} of the manifest of {name} {why}; make the version anew",
            reason="DAMAGED_FILE",
            metadata={"resource": name, "file": path},
        )


def open_files(store: ObjectStore, version: DatasetVersion) -> VersionFiles:
    """Return the files of a version."""
    return VersionFiles(store, version)
