"""Rows that were left out, and the quality report that says so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from data_service.domain.checks import CheckResult
from data_service.domain.statistics import SplitStatistics
from shared.errors import InvalidArgument
from shared.value_texts import value_shown

# --- Bad rows ---
# Rows that were left out: counted by their reason, and written down one a line.

MAX_REASONS, MAX_EXAMPLES, MAX_EXCERPT = 100, 5, 500
MAX_LINES = 100_000
OTHER_REASONS = "other reasons"


@dataclass(frozen=True)
class BadRowPolicy:
    """Whether bad rows are left out, or end everything; `max_rows`: how many may be left out, 0 is no limit."""

    quarantines: bool = False
    max_rows: int = 0


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
    """What one part of a parallel job left out. Parts are merged in the order of the rows. Picklable."""

    reasons: dict[str, _Reason]
    lines: list[str]
    # With those beyond `MAX_LINES`, which `lines` does not have.
    line_count: int


class BadRowLog:
    """Takes bad rows in the order of their sources; writes the first `MAX_LINES` of them as JSON lines to `path`.

    It keeps `MAX_REASONS` reasons, those that came first; all more are counted together as `other reasons`. What it
    finds depends on the rows and their order alone. Every text is cut where it is long: sources name files, members of
    archives and columns as they like.
    """

    def __init__(self, path: Path, policy: BadRowPolicy) -> None:
        self._policy = policy
        self._file = path.open("w", encoding="utf-8", newline="\n")
        self._reasons: dict[str, _Reason] = {}
        self._line_count = self._bad_count = 0
        self.path = path
        self.row_count = 0

    def __enter__(self) -> BadRowLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        """A row, or several that stand together, that a source cannot give. `source`: a URI or a version.

        Raises `InvalidArgument` where the policy has none of it, or not so many.
        """
        source, place, reason = _cut(source), _cut(place), _cut(reason)
        if not self._policy.quarantines:
            raise InvalidArgument(
                f"{source}, {place}: {reason}; mend the source, or let bad rows be quarantined",
                reason="BAD_ROW",
                metadata={"source": source, "place": place},
            )
        self.leave_out(source, place, reason, excerpt, rows)
        self._bad_count += rows
        most = self._policy.max_rows
        if most and self._bad_count > most:
            raise InvalidArgument(
                f"more than {most:,} bad rows; the last in {source}, {place}: {reason}; mend the sources or allow more",
                reason="TOO_MANY_BAD_ROWS",
                metadata={"source": source, "place": place, "max_rows": str(most)},
            )

    def leave_out(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        """The same for rows that a check has quarantined, whatever the policy says of bad ones."""
        example, reason = Example(_cut(source), _cut(place), _cut(excerpt)), _cut(reason)
        self._count(reason, rows, [example])
        self._write([json.dumps({**example.to_json(), "reason": reason, "rows": rows}, ensure_ascii=False)], 1)

    def part(self) -> BadRowPart:
        """All of it, to be merged into another log. Nothing may be added afterwards."""
        self.close()
        with self.path.open(encoding="utf-8", newline="\n") as lines:
            kept = [line.rstrip("\n") for line in lines]
        return BadRowPart(self._reasons, kept[:MAX_LINES], self._line_count)

    def merge(self, part: BadRowPart) -> None:
        """Takes in the next part in the order of rows; the policy has judged its rows already."""
        for reason, found in part.reasons.items():
            self._count(reason, found.row_count, found.examples)
        self._write(part.lines, part.line_count)

    def close(self) -> None:
        """Ends the file; says in its last line where lines are missing. May be called again."""
        if self._file.closed:
            return
        missing = self._line_count - MAX_LINES
        if missing > 0:
            note = {"truncated": True, "note": f"the first {MAX_LINES:,} are listed; {missing:,} more are not"}
            self._file.write(json.dumps(note) + "\n")
        self._file.close()

    def to_json(self) -> list[dict[str, Any]]:
        """QuarantineReasons, the most frequent first, of equally frequent ones the first that came."""
        ordered = sorted(self._reasons.items(), key=lambda item: -item[1].row_count)
        return [
            {"reason": reason, "rowCount": found.row_count, "examples": [one.to_json() for one in found.examples]}
            for reason, found in ordered
        ]

    def _count(self, reason: str, rows: int, examples: Iterable[Example]) -> None:
        self.row_count += rows
        if reason not in self._reasons and len(self._reasons) >= MAX_REASONS - 1:
            reason = OTHER_REASONS
        self._reasons.setdefault(reason, _Reason()).add(rows, examples)

    def _write(self, lines: Sequence[str], line_count: int) -> None:
        """`line_count`: with those that `lines` no longer has."""
        for line in lines[: max(0, MAX_LINES - self._line_count)]:
            self._file.write(line + "\n")
        self._line_count += line_count


def excerpt(table: pa.Table, row: int) -> str:
    """A row as text, cut where it is long: without tensors, and bytes are not spelt out."""
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
    """As text where Python has no such value."""
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return value_shown(value)


def _cut(text: str) -> str:
    # Half a surrogate, as undecodable bytes leave it, has no place in UTF-8.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_EXCERPT else text[: MAX_EXCERPT - 1] + "…"


# --- Quality report ---
# The quality report of a version: statistics, checks, and what was left out.


def build_report(
    splits: Mapping[str, SplitStatistics], results: Mapping[int, CheckResult], bad_rows: BadRowLog
) -> dict[str, Any]:
    """A QualityReport in the shape of its proto JSON.

    `splits` in the order of the version; `results` by the index of the check: those of rows and those of the gate.
    """
    return {
        "columns": [one.to_json() for split, statistics in splits.items() for one in statistics.result(split)],
        "checks": [results[index].to_json() for index in sorted(results)],
        "quarantine": bad_rows.to_json(),
        "quarantinedRowCount": bad_rows.row_count,
    }
