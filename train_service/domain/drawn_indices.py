"""Which indices of a program's own dataset its prepared DataLoaders gave it.

A program that reads its own data prepares its DataLoaders (`ray.train.torch.prepare_data_loader`). The indices that
their samplers draw are known, and a rank counts them once it has got the batch of them. They are indices of the
program's dataset, [0, N), and no row ids of a dataset version.

The record of a loader, by its name `loader-0`, `loader-1`, … in the order of preparing:

    {"row_count": N, "done": passes that all ranks have ended, "passes": {"0": [seen, again], …}}

`seen` and `again` are sets of the indices that were given once or more, and twice or more, in that pass by all ranks.
A set is text: empty for none, `*` for all, else the bitmap (index i is bit i mod 8 of byte i div 8, the lowest first),
compressed, in base64. So a pass that gave each index once takes a few bytes.

A program's process keeps its rank's record and may report anything, so each report is checked.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidArgument, shown
from train_service.domain.coverage import MAX_LISTED, CoverageCounts

Flags = NDArray[np.bool_]
Record = dict[str, Any]

# A report and a manifest hold the sets of a cut pass, at most N / 8 bytes each.
MAX_ROWS = 1 << 24
MAX_LOADERS = 16
MAX_PASSES = 1 << 31
# Passes of a loader that one report may touch.
MAX_PASSES_A_REPORT = 10_000
NONE, ALL = "", "*"
PREFIX = "loader-"
WRONG_INDICES = "WRONG_INDICES"


def encode(flags: Flags) -> str:
    if not flags.any():
        return NONE
    if flags.all():
        return ALL
    return base64.b64encode(zlib.compress(np.packbits(flags, bitorder="little").tobytes(), 6)).decode()


def decode(text: str, row_count: int) -> Flags:
    """Return the set as flags (N,). Raises `ValueError` for a text that no set of N indices has."""
    if text in (NONE, ALL):
        return np.full(row_count, text == ALL)
    size = -(-row_count // 8)
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"it is no compressed bitmap: {error}") from None
    if len(packed) != size:
        raise ValueError(f"it has not the {size} bytes of {row_count} indices")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    if bits[row_count:].any():
        raise ValueError(f"it has indices beyond {row_count - 1}")
    return bits[:row_count].astype(bool)


def check_drawn(rank: int, said: object, before: Mapping[str, Record]) -> None:
    """Raise `InvalidArgument`, which names the rank and the value, for a report that no rank can make.

    `said` is the rank's report by loader. `before` is the result of `merge_drawn` for the last report.
    """
    if not isinstance(said, Mapping) or len(said) > MAX_LOADERS:
        raise _wrong(rank, "loaders", said, f"must be at most {MAX_LOADERS} loaders by name")
    known = {f"{PREFIX}{number}" for number in range(MAX_LOADERS)}
    for name, record in said.items():
        if name not in known or not isinstance(record, Mapping):
            raise _wrong(rank, "loader", name, f"must be {PREFIX}0 to {PREFIX}{MAX_LOADERS - 1}, with its record")
        rows, done, passes = (record.get(key) for key in ("row_count", "done", "passes"))
        if type(rows) is not int or not 1 <= rows <= MAX_ROWS or rows != before.get(name, {}).get("row_count", rows):
            raise _wrong(rank, f"{name}.row_count", rows, f"must be 1 to {MAX_ROWS}, and the same in each report")
        if type(done) is not int or not 0 <= done <= MAX_PASSES:
            raise _wrong(rank, f"{name}.done", done, f"must be 0 to {MAX_PASSES}")
        if not isinstance(passes, Mapping) or len(passes) > MAX_PASSES_A_REPORT:
            raise _wrong(rank, f"{name}.passes", passes, f"must be at most {MAX_PASSES_A_REPORT} passes")
        for number, sets in passes.items():
            if not _is_pass(number) or not _is_pair(sets):
                raise _wrong(rank, f"{name}.passes", number, "must be numbers of passes from 0, each with two sets")
            try:
                for text in sets:
                    decode(text, rows)
            except ValueError as error:
                raise _wrong(rank, f"{name}.passes[{number}]", sets, str(error)) from None


def merge_drawn(before: Mapping[str, Record], parts: Sequence[Mapping[str, Record]]) -> dict[str, Record]:
    """Return the record for a checkpoint: `before`, that of the previous report, with the checked reports of all ranks.

    Raises `InvalidArgument` if ranks say different numbers of rows of one loader.
    """
    merged = {name: dict(one) for name, one in before.items()}
    for name in sorted({name for part in parts for name in part}):
        mine = [part[name] for part in parts if name in part]
        rows = mine[0]["row_count"]
        if any(one["row_count"] != rows for one in mine):
            counts = ", ".join(str(one["row_count"]) for one in mine)
            raise InvalidArgument(f"ranks have datasets of {counts} rows behind {name}; give all ranks the same one")
        passes = dict(merged.get(name, {}).get("passes", {}))
        for number in sorted({number for one in mine for number in one["passes"]}, key=int):
            sets = [one["passes"][number] for one in mine if number in one["passes"]]
            passes[number] = _joined([*([passes[number]] if number in passes else []), *sets], rows)
        merged[name] = {"row_count": rows, "done": min(one["done"] for one in mine), "passes": passes}
    return merged


def last_pass(record: Record) -> int:
    """Return the last pass with a given index. It is 0 before the first."""
    return max(map(int, record["passes"]), default=0)


def count_drawn(record: Record, number: int) -> CoverageCounts:
    """Return how often each index was given in a pass."""
    rows = record["row_count"]
    seen_text, again_text = record["passes"].get(str(number), [NONE, NONE])
    seen, again = decode(seen_text, rows), decode(again_text, rows)
    missing, repeated = np.flatnonzero(~seen), np.flatnonzero(again)
    return CoverageCounts(
        row_count=rows,
        seen_once=rows - len(missing) - len(repeated),
        missing=len(missing),
        repeated=len(repeated),
        missing_row_ids=missing[:MAX_LISTED].tolist(),
        repeated_row_ids=repeated[:MAX_LISTED].tolist(),
    )


def _joined(sets: Sequence[Sequence[str]], rows: int) -> list[str]:
    if len(sets) == 1:
        return list(sets[0])
    seen, again = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
    for one, more in sets:
        given = decode(one, rows)
        again |= (seen & given) | decode(more, rows)
        seen |= given
    return [encode(seen), encode(again)]


def _is_pass(number: object) -> bool:
    return isinstance(number, str) and number.isascii() and number.isdigit() and len(number) <= 10


def _is_pair(sets: object) -> bool:
    return isinstance(sets, Sequence) and len(sets) == 2 and all(isinstance(one, str) for one in sets)


def _wrong(rank: int, what: str, value: object, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        f"rank {rank} reports {what} {shown(str(value))} of its DataLoaders: {remedy}",
        reason=WRONG_INDICES,
        metadata={"ranks": str(rank)},
    )
