"""Scans all rows of a source's text files: infers the types of their columns, and finds where they can be divided.

One process scans the files of a small source, one after the other. Tasks scan several files of a large source,
and at several parts of a large file, at the same time. A first pass finds the cuts of large files: it parses no values.
That of an upload runs in the attempt's own process, and verifies its bytes.
What the tasks find is merged in the order of the rows, and is then what one process would find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from data_service.formats import interface
from data_service.formats.interface import TextPart
from data_service.storage.source_files import SourceFile

# A smaller source is read in less time than tasks need to begin.
LARGE_BYTES = 256 * 1024 * 1024


class Found(Protocol):
    """What was found in some rows. Picklable."""

    def merge(self, file: SourceFile, later: Any) -> None:
        """Adds what was found in rows of `file` that follow.

        The result depends on the rows alone, never on where they were divided. Raises `InvalidArgument` for what no
        import may have, and `NotMergeable` where it depends on the rows one by one.
        """


F = TypeVar("F", bound=Found)


class NotMergeable(Exception):
    """One process has to scan all rows."""


class Scanner(Protocol[F]):
    """Scans the rows of files of one format. Picklable.

    Unless it `reads_rows`, nothing is to be found in them, and files are only cut.
    """

    @property
    def reads_rows(self) -> bool: ...

    def nothing(self) -> F:
        """Returns what is found in no rows."""

    def scan(self, file: SourceFile, found: F, part: TextPart | None = None) -> list[TextPart]:
        """Adds what is in the rows of the file, or of a part, to `found`.

        Returns the parts of the file, with the numbers of their well-formed rows, or that part.
        """

    def cut(self, file: SourceFile) -> list[TextPart]:
        """Returns the parts of a large file, as `scan` does; nothing for one that cannot be divided.

        Where rows are looked at afterwards, the parts' own numbers of rows need not be right.
        """


@dataclass(frozen=True)
class ScanUnit:
    """A file, or a part of one, that a task scans."""

    number: int
    file: SourceFile
    part: TextPart | None = None
    row_count: int = 0

    @property
    def where(self) -> str:
        lines = f", from line {self.part.begin.first_line} on" if self.part else ""
        return f"{self.file.field}: {self.file.uri}{lines}"


R = TypeVar("R")


class UnitRunner(Protocol):
    def __call__(self, work: Callable[[ScanUnit], R], units: Sequence[ScanUnit]) -> Iterator[R]:
        """Does the work on each unit in a task; yields the results in the order of the units.

        Raises the error of the first unit that fails, in that order.
        """


def scan_files(
    files: Sequence[SourceFile], scanner: Scanner[F], run_units: UnitRunner | None
) -> tuple[F, list[list[TextPart]]]:
    """Returns what is found in the rows of all files, and the parts of each."""
    if run_units is not None and _are_large(files):
        try:
            return _scan_in_tasks(files, scanner, run_units)
        except NotMergeable:
            pass
    found = scanner.nothing()
    return found, [scanner.scan(file, found) for file in files]


def _are_large(files: Sequence[SourceFile]) -> bool:
    """Returns whether tasks are to scan the files. The size of an upload is known once it is whole."""
    return sum(file.size_bytes or 0 for file in files) >= LARGE_BYTES


def _scan_in_tasks(
    files: Sequence[SourceFile], scanner: Scanner[F], run_units: UnitRunner
) -> tuple[F, list[list[TextPart]]]:
    large = [index for index, file in enumerate(files) if (file.size_bytes or 0) > interface.PART_BYTES]
    to_cut = [ScanUnit(number, files[index]) for number, index in enumerate(large)]
    uploads = [file for file in files if file.is_upload]
    # An upload's bytes are verified as this process reads them. Tasks compare what they read with these bytes.
    run_cuts = _do_here if uploads else run_units
    cuts = dict(zip(large, run_cuts(_Cut(scanner), to_cut), strict=True)) if to_cut else {}
    for upload in uploads:
        upload.wait_until_whole()
    found = scanner.nothing()
    if not scanner.reads_rows:
        return found, [cuts.get(index, []) for index in range(len(files))]
    whole: list[TextPart | None] = [None]
    places = [(index, part) for index in range(len(files)) for part in (cuts.get(index) or whole)]
    units = [ScanUnit(number, files[index], part) for number, (index, part) in enumerate(places)]
    parts: list[list[TextPart]] = [[] for _ in files]
    for (index, _), scanned in zip(places, run_units(_Scan(scanner), units), strict=True):
        found.merge(files[index], scanned.found)
        parts[index] += scanned.parts
    return found, parts


def _do_here(work: Callable[[ScanUnit], R], units: Sequence[ScanUnit]) -> Iterator[R]:
    """Does the work on each unit in this process; a `UnitRunner`."""
    return map(work, units)


@dataclass(frozen=True)
class Scanned(Generic[F]):
    """What a task found in its unit, and the parts of that."""

    found: F
    parts: list[TextPart]


@dataclass(frozen=True)
class _Scan(Generic[F]):
    scanner: Scanner[F]

    def __call__(self, unit: ScanUnit) -> Scanned[F]:
        found = self.scanner.nothing()
        return Scanned(found, self.scanner.scan(unit.file, found, unit.part))


@dataclass(frozen=True)
class _Cut:
    scanner: Scanner[Any]

    def __call__(self, unit: ScanUnit) -> list[TextPart]:
        return self.scanner.cut(unit.file)
