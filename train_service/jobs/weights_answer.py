"""The answer of the child that reads weights: its report, and the weights that it wrote.

The code of a model of the caller's own runs in that child and may have put anything in place of both. So the service
follows no link, waits for no pipe, takes no field that `weights_child` does not write, and compares the tensors of the
weights with those of the report. What the code says of its own weights, it can still make up.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from shared.checkpoint.format import WEIGHTS
from train_service.jobs.weights_child import MAX_LISTED, Report, Unreadable, read_header, short

REPORT = "report.json"
MAX_REPORT_BYTES = 16 * 1024**2
MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1


def take_report(work: Path) -> dict[str, Any]:
    """Return the report in the child's folder. Raises `ValueError` for one that the child does not write."""
    with open_plain(work / REPORT) as file:
        return _parse_report(file.read(MAX_REPORT_BYTES))


def take_weights(work: Path, report: Mapping[str, Any], weights: Path) -> None:
    """Move the child's weights to `weights`. Raises `ValueError` unless they have the tensors that the report names."""
    with open_plain(work / WEIGHTS):
        try:
            names = set(read_header(WEIGHTS, work / WEIGHTS)) - {"__metadata__"}
        except Unreadable as error:
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError(f"{WEIGHTS} has a header that nests too deeply") from None
    # The report names the first tensors alone, and shortens long names. Tied tensors are in the weights by all their
    # names, and in the report by one.
    reported = {*(one["target"] for one in report["fitted"]), *report["missing"]}
    absent = reported - {short(name) for name in names}
    if absent or len(names) < report["fitted_count"] + report["missing_count"]:
        raise ValueError(f"{WEIGHTS} has {len(names):,} tensors, which are not those of the report")
    (work / WEIGHTS).rename(weights)


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file that a caller's code may have made. Never follows a link and never waits for a pipe.

    Raises `ValueError` unless it is a plain file with this one name.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise ValueError(f"{path.name} is no plain file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def _parse_report(encoded: bytes) -> dict[str, Any]:
    try:
        report = json.loads(encoded)
    except RecursionError:
        raise ValueError("the report nests too deeply") from None
    lists = [item.name for item in fields(Report) if item.name not in ("format", "key")]
    if not isinstance(report, dict) or report.keys() != {"format", "key", *lists, *(f"{name}_count" for name in lists)}:
        raise ValueError("the report has other fields than a report")
    if not _is_text(report["format"]) or not _is_text(report["key"]):
        raise ValueError("the report's format or key is no text")
    for name in lists:
        count, entries = report[f"{name}_count"], report[name]
        if not _is_count(count, MAX_INT32) or not isinstance(entries, list) or len(entries) != min(count, MAX_LISTED):
            raise ValueError(f"the report's list {name} is not as long as its count")
        if not all(_is_entry(entry, ENTRIES.get(name)) for entry in entries):
            raise ValueError(f"the report's list {name} has other entries")
    return report


def _is_text(value: Any) -> bool:
    # A message cannot have a half of a surrogate pair.
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def _is_count(value: Any, most: int = MAX_INT64) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_entry(entry: Any, kinds: Mapping[str, Callable[[Any], bool]] | None) -> bool:
    if kinds is None:
        return _is_text(entry)
    return isinstance(entry, dict) and entry.keys() == kinds.keys() and all(kinds[key](entry[key]) for key in kinds)


# Entries of the report's lists, as in `ImportReport`. Those of the other lists are names.
ENTRIES: dict[str, Mapping[str, Callable[[Any], bool]]] = {
    "fitted": {"source": _is_text, "target": _is_text, "widened_from": _is_text},
    "misfits": {"source": _is_text, "target": _is_text, "in_file": _is_text, "in_model": _is_text},
    "non_finite": {"source": _is_text, "count": _is_count},
}
