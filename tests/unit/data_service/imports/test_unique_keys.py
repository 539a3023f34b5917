"""Keys that went to the disk have the repeats that keys in memory have."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service.domain.checks_rows import Repeats, UniqueKeys, keys_of, repeats_among
from data_service.imports import job
from data_service.imports.job import SpilledKeys

QUARANTINES = {1: True, 3: False, 4: True}


def parts_of(count: int, rows: int) -> list[UniqueKeys]:
    """Parts with keys of three checks; of each check some values occur several times."""
    values = random.Random(5)
    parts = []
    for number in range(count):
        part = UniqueKeys(QUARANTINES)
        ordinals = (number << 40) + np.arange(rows)
        for check in QUARANTINES:
            texts = [f"{check} {values.randrange(count * rows)}" for _ in range(rows)]
            part.add(check, pa.array(texts), ordinals)
        parts.append(part)
    return parts


def repeats_of(keys: UniqueKeys | SpilledKeys, parts: list[UniqueKeys]) -> Repeats:
    for part in parts:
        keys.merge(part)
    return keys.repeats() if isinstance(keys, UniqueKeys) else keys.repeats(lambda: None)


def same(one: Repeats, other: Repeats) -> bool:
    return one.ordinals.keys() == other.ordinals.keys() and all(
        np.array_equal(one.ordinals[check], other.ordinals[check]) for check in one.ordinals
    )


@pytest.mark.parametrize("spill_bytes", [1, 3000, 10**9])
def test_repeats_are_those_of_all_keys_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill_bytes: int
) -> None:
    monkeypatch.setattr(job, "SPILL_BYTES", spill_bytes)
    expected = repeats_of(UniqueKeys({}), parts_of(9, 50))
    assert all(len(ordinals) > 20 for ordinals in expected.ordinals.values())
    spilled = repeats_of(SpilledKeys(UniqueKeys({}), tmp_path), random.Random(1).sample(parts_of(9, 50), 9))
    assert same(spilled, expected)
    assert bool(list(tmp_path.iterdir())) == (spill_bytes < 10**9)


def test_a_part_without_rows_and_no_parts_have_no_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SPILL_BYTES", 0)
    empty = UniqueKeys(QUARANTINES)
    assert same(SpilledKeys(empty, tmp_path).repeats(lambda: None), empty.repeats())
    spilled = SpilledKeys(UniqueKeys(QUARANTINES), tmp_path)
    spilled.merge(UniqueKeys({}))
    assert same(spilled.repeats(lambda: None), UniqueKeys(QUARANTINES).repeats())


def test_memory_does_not_grow_with_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SPILL_BYTES", 100_000)
    keys = SpilledKeys(UniqueKeys({}), tmp_path)
    peaks = []
    tracemalloc.start()
    try:
        for number in range(40):
            part = UniqueKeys({0: True})
            part.add(0, pa.array(np.arange(2000) + 2000 * number), (number << 40) + np.arange(2000))
            keys.merge(part)
            if number in (9, 39):
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.reset_peak()
        assert not len(keys.repeats(lambda: None).ordinals[0])
        peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert max(peaks) < 40 * 2000 * 24 / 2


class Watched(np.ndarray[Any, np.dtype[np.int64]]):
    """Notes which functions of NumPy get it as a whole."""

    functions: list[str]

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        self.functions.append(func.__name__)
        return super().__array_function__(func, types, args, kwargs)


def test_the_rows_of_a_bucket_are_looked_up_among_those_left_out_which_are_not_sorted_again() -> None:
    """There are hundreds of buckets for each check, and the rows left out may be most of all rows."""
    left_out = np.arange(0, 3000, 3).view(Watched)
    left_out.functions = []
    ordinals = np.array([2, 3, 5, 7, 8, 3000])
    repeats = repeats_among(keys_of(pa.array(["a", "a", "a", "b", "b", "b"])), ordinals, left_out)
    assert sorted(repeats.tolist()) == [5, 8, 3000]
    assert left_out.functions == ["searchsorted"]


def test_a_job_that_is_to_stop_stops_between_two_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SPILL_BYTES", 1)
    keys = SpilledKeys(UniqueKeys({}), tmp_path)
    for part in parts_of(2, 50):
        keys.merge(part)
    read: list[Path] = []
    fromfile = np.fromfile

    def counted(path: Path, kind: np.dtype[Any]) -> Any:
        read.append(path)
        return fromfile(path, kind)

    monkeypatch.setattr(np, "fromfile", counted)

    def stop() -> None:
        if len(read) >= 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        keys.repeats(stop)
    assert len(read) == 3
