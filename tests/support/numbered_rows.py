"""Rows that carry their ids in the pixels, and what the witness wrote of them: which went into a run's weights.

A witness is a training step of an installed package that writes down what it is given, a file a process.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.versions import striped_digits
from train_service.loading.preprocessing import Array

ROWS, BATCH = 600, 30
STEPS_PER_EPOCH = ROWS // BATCH
# Even among 1, 2 and 3 ranks.
LANES = 24
# By attempt, and of each of its processes: the ids of its batches, in order.
Processes = dict[int, list[list[list[int]]]]


def numbered_digits(rows: int = ROWS) -> tuple[Array, Array]:
    """Images uint8 (rows, 28, 28) whose first four pixels are the row's id, and their labels."""
    images, labels = striped_digits(rows)
    digits = np.array([[int(digit, 16) for digit in f"{row:04x}"] for row in range(rows)], np.uint8)
    images[:, 0, :4] = digits * 17
    return images, labels


def processes_of(witness: Path, job_name: str) -> Processes:
    """Of the runs named `{job id}-attempt-{number}`, as Ray Train's are."""
    found: Processes = {}
    for path in witness.glob("*.jsonl"):
        entries = _entries(path)
        job_id, _, attempt = entries[0]["run"].rpartition("-attempt-") if entries else ("", "", "")
        if job_id == job_name.rpartition("/")[2]:
            found.setdefault(int(attempt), []).append([entry["ids"] for entry in entries])
    return found


def lone_processes(witness: Path, before: Collection[Path]) -> Processes:
    """Of the files that were not there before: those of one run in local mode, whose attempts are a process each."""
    new = filter(None, map(_entries, set(witness.glob("*.jsonl")) - set(before)))
    runs = sorted(new, key=lambda entries: entries[0]["time"])
    return {attempt: [[entry["ids"] for entry in entries]] for attempt, entries in enumerate(runs, start=1)}


def _entries(path: Path) -> list[dict[str, Any]]:
    # A process that was killed may have left a torn line.
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass(frozen=True)
class Begun:
    """An attempt, the step that it began with and the number of its workers."""

    attempt: int
    step: int
    workers: int


@dataclass(frozen=True)
class Seen:
    """Rows over all epochs that are not in the weights, or more than once, and the steps that all attempts took."""

    missing: int
    repeated: int
    steps_taken: int


def steps_of_an_epoch(rows: int) -> int:
    return -(-rows // BATCH)


def seen_in(begun: Sequence[Begun], processes: Processes, epochs: int, row_count: int = ROWS) -> Seen:
    """Which rows, of `row_count` an epoch, went into the weights: of each attempt the steps up to where the next one
    began."""
    counts, steps_taken, steps_per_epoch = Counter[tuple[int, int]](), 0, steps_of_an_epoch(row_count)
    ends = [one.step for one in begun[1:]] + [epochs * steps_per_epoch]
    for one, end in zip(begun, ends, strict=True):
        even = row_count % BATCH == LANES % one.workers == 0
        ranks = [_by_steps(calls, BATCH // one.workers) if even else calls for calls in processes.get(one.attempt, [])]
        steps_taken += max(map(len, ranks), default=0)
        # One that was lost before its first checkpoint may have lost a rank before that one's first batch.
        message = f"attempt {one.attempt} ran in {len(ranks)} processes"
        assert end == one.step or len(ranks) == one.workers, message
        for steps in ranks:
            for step, ids in zip(range(one.step, end), steps, strict=False):
                counts.update((step // steps_per_epoch, row) for row in ids)
    rows = [(epoch, row) for epoch in range(epochs) for row in range(row_count)]
    assert set(counts) <= set(rows), "ids that no row has"
    missing, repeated = sum(counts[row] == 0 for row in rows), sum(counts[row] > 1 for row in rows)
    return Seen(missing, repeated, steps_taken)


def _by_steps(calls: list[list[int]], rows: int) -> list[list[int]]:
    """The ids of a rank's calls by step, of which each has `rows`. A step may be computed in several calls; one that
    was cut off is left out. Where steps are uneven only the calls tell them apart, of which each must be one."""
    ids = list(itertools.chain.from_iterable(calls))
    ends = set(itertools.accumulate(map(len, calls)))
    whole = range(rows, len(ids) + 1, rows)
    assert ends.issuperset(whole), "calls that are not of one step"
    return [ids[end - rows : end] for end in whole]
