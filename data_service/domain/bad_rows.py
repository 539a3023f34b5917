"""Rows that were left out, and the quality report that lists them."""

from __future__ import annotations

import json
import pickle
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from data_service.domain.checks import CheckResult
from data_service.domain.statistics import SplitStatistics
from shared.errors import InvalidArgument
from shared.value_texts import value_shown

# --- Bad rows ---
# Rows that were left out: counted by reason, and listed one a line.

MAX_REASONS, MAX_EXAMPLES, MAX_EXCERPT = 100, 5, 500
MAX_LINES = 100_000
# The bytes of the lines of one part: a large version has many parts, and each may have bad rows.
MAX_PART_BYTES = 8 * 1024 * 1024
OTHER_REASONS = "other reasons"
TOO_MANY_BAD_ROWS = "TOO_MANY_BAD_ROWS"


@dataclass(frozen=True)
class BadRowPolicy:
    """The policy for bad rows: they are left out, or end the job.

    `max_rows` is the number that may be left out; 0 is no limit. `before` of them were left out by the earlier parts of
    a parallel job.
    """

    quarantines: bool = False
    max_rows: int = 0
    before: int = 0


@dataclass(frozen=True)
class Example:
    source: str
    place: str
    excerpt: str

    def to_json(self) -> dict[str, str]:
        return {"source": self.source, "place": self.place, "excerpt": self.excerpt}


@dataclass
class _Reason:
    row_count: int = 0
    examples: list[Example] = field(default_factory=list)

    def add(self, row_count: int, examples: Iterable[Example]) -> None:
        self.row_count += row_count
        self.examples += list(examples)[: MAX_EXAMPLES - len(self.examples)]


@dataclass(frozen=True)
class BadRowPart:
    """The rows that one part of a parallel job left out.

    Parts are merged in the order of the rows. Picklable.
    """

    reasons: dict[str, _Reason]
    lines: list[str]
    # Includes the lines beyond `MAX_LINES` and `MAX_PART_BYTES`, which `lines` lacks.
    line_count: int

    @property
    def fills_log(self) -> bool:
        """Whether a log lists no rows of later parts."""
        return len(self.lines) < self.line_count


class BadRowLog:
    """Takes bad rows in the order of their sources.

    Writes the first `MAX_LINES` of them as JSON lines to `path`, and none after a part that lacks lines. It keeps the
    first `MAX_REASONS` reasons; all others are counted together as `other reasons`. The result depends on the rows,
    their order and the parts alone. Long texts are truncated, since names of files, archive members and columns have no
    limit.
    """

    def __init__(self, path: Path, policy: BadRowPolicy) -> None:
        self._policy = policy
        self._file = path.open("w", encoding="utf-8", newline="\n")
        self._reasons: dict[str, _Reason] = {}
        self._line_count = self._written = 0
        self._is_full = False
        self.path = path
        self.row_count = 0
        # Of these, the rows that a source cannot read.
        self.bad_count = 0

    def __enter__(self) -> BadRowLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        """Add one row, or several adjacent ones, that a source cannot read.

        `source` is a URI or a version. Raises `InvalidArgument` if the policy allows no bad rows, or not so many.
        """
        source, place, reason = _cut(source), _cut(place), _cut(reason)
        if not self._policy.quarantines:
            raise InvalidArgument(
                f"{source}, {place}: {reason}; mend the source, or let bad rows be quarantined",
                reason="BAD_ROW",
                metadata={"source": source, "place": place},
            )
        self.leave_out(source, place, reason, excerpt, rows)
        self.bad_count += rows
        most = self._policy.max_rows
        if most and self._policy.before + self.bad_count > most:
            raise InvalidArgument(
                f"more than {most:,} bad rows; the last in {source}, {place}: {reason}; mend the sources or allow more",
                reason=TOO_MANY_BAD_ROWS,
                metadata={"source": source, "place": place, "max_rows": str(most)},
            )

    def leave_out(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        """Add rows that a check has quarantined, which the policy does not limit."""
        example, reason = Example(_cut(source), _cut(place), _cut(excerpt)), _cut(reason)
        self._count(reason, rows, [example])
        self._write([json.dumps({**example.to_json(), "reason": reason, "rows": rows}, ensure_ascii=False)])
        self._line_count += 1

    def part(self) -> BadRowPart:
        """Return the contents, to be merged into another log.

        Nothing may be added afterwards.
        """
        self.close()
        kept: list[str] = []
        left_bytes = MAX_PART_BYTES
        with self.path.open(encoding="utf-8", newline="\n") as lines:
            for line in islice(lines, self._written):
                left_bytes -= len(line.encode())
                if left_bytes < 0:
                    break
                kept.append(line.rstrip("\n"))
        return BadRowPart(self._reasons, kept, self._line_count)

    def merge(self, part: BadRowPart) -> None:
        """Add the next part in row order; the policy was applied to its rows already."""
        for reason, found in part.reasons.items():
            self._count(reason, found.row_count, found.examples)
        self._write(part.lines)
        self._line_count += part.line_count
        self._is_full |= part.fills_log

    def close(self) -> None:
        """Close the file; its last line reports missing lines, if any.

        May be called again.
        """
        if self._file.closed:
            return
        missing = self._line_count - self._written
        if missing > 0:
            note = {"truncated": True, "note": f"the first {self._written:,} are listed; {missing:,} more are not"}
            self._file.write(json.dumps(note) + "\n")
        self._file.close()

    def to_json(self) -> list[dict[str, Any]]:
        """Return the QuarantineReasons by descending frequency, then by first occurrence."""
        ordered = sorted(self._reasons.items(), key=lambda item: -item[1].row_count)
        return [
            {
                "reason": reason,
                "rowCount": found.row_count,
                "examples": [example.to_json() for example in found.examples],
            }
            for reason, found in ordered
        ]

    def _count(self, reason: str, rows: int, examples: Iterable[Example]) -> None:
        self.row_count += rows
        if reason not in self._reasons and len(self._reasons) >= MAX_REASONS - 1:
            reason = OTHER_REASONS
        self._reasons.setdefault(reason, _Reason()).add(rows, examples)

    def _write(self, lines: Sequence[str]) -> None:
        for line in () if self._is_full else lines[: MAX_LINES - self._written]:
            self._file.write(line + "\n")
            self._written += 1


class BadRowParts:
    """The rows left out of all parts, on the local disk, so that memory does not grow with them.

    Lines that surely are not listed are not kept, so that the disk does not fill with them either.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: set[int] = set()
        # The parts whose lines may be listed, in row order, with the lines that they take of `MAX_LINES`.
        self._listed: list[tuple[int, int]] = []
        self._lines = 0

    def add(self, number: int, part: BadRowPart) -> None:
        """Add a part by its number in row order; in any order."""
        if not part.reasons:
            return
        self._numbers.add(number)
        if self._lines >= MAX_LINES and number > self._listed[-1][0]:
            self._keep(number, replace(part, lines=[]))
            return
        self._keep(number, part)
        lines = MAX_LINES if part.fills_log else part.line_count
        insort(self._listed, (number, lines))
        self._lines += lines
        while self._lines - self._listed[-1][1] >= MAX_LINES:
            last, lines = self._listed.pop()
            self._lines -= lines
            self._keep(last, replace(self._kept(last), lines=[]))

    def merged(self, path: Path) -> BadRowLog:
        """Return the rows of all parts, in row order; the log's lines are in the file `path`."""
        with BadRowLog(path, BadRowPolicy(quarantines=True)) as bad_rows:
            for number in sorted(self._numbers):
                bad_rows.merge(self._kept(number))
        return bad_rows

    def _keep(self, number: int, part: BadRowPart) -> None:
        self._path(number).write_bytes(pickle.dumps(part))

    def _kept(self, number: int) -> BadRowPart:
        part: BadRowPart = pickle.loads(self._path(number).read_bytes())
        return part

    def _path(self, number: int) -> Path:
        return self._folder / f"bad-rows-{number}"


def excerpt(table: pa.Table, row: int) -> str:
    """Return a row as text, truncated, without tensors and without spelling out bytes."""
    shown = {}
    for field_, column in zip(table.schema, table.columns, strict=True):
        if isinstance(field_.type, pa.FixedShapeTensorType):
            continue
        value = _in_python(column[row])
        if isinstance(value, str):
            shown[field_.name] = _cut(value)
        else:
            shown[field_.name] = f"<{len(value)} bytes>" if isinstance(value, bytes) else value
    return _cut(json.dumps(shown, ensure_ascii=False, default=str))


def _in_python(value: pa.Scalar) -> Any:
    """Return the value as text if Python has no such value."""
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return value_shown(value)


def _cut(text: str) -> str:
    # Lone surrogates, from undecodable bytes, are not valid in UTF-8.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_EXCERPT else text[: MAX_EXCERPT - 1] + "…"


# --- Quality report ---
# The quality report of a version: statistics, checks, and rows that were left out.


def build_report(
    splits: Mapping[str, SplitStatistics], results: Mapping[int, CheckResult], bad_rows: BadRowLog
) -> dict[str, Any]:
    """Return a QualityReport in the shape of its proto JSON.

    `splits` are in the order of the version; `results` are by the index of the check, both for rows and for the gate.
    """
    return {
        "columns": [one.to_json() for split, statistics in splits.items() for one in statistics.result(split)],
        "checks": [results[index].to_json() for index in sorted(results)],
        "quarantine": bad_rows.to_json(),
        "quarantinedRowCount": bad_rows.row_count,
    }
