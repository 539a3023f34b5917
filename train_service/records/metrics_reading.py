"""Reading the metrics of a run: of each step once, by the attempt whose work is in the weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shared import paging
from shared.errors import Unavailable, invalid_field
from shared.storage import ObjectMissing, ObjectStore
from train_service.records.metrics_log import MetricPoint, decode

DEFAULT_POINTS, MAX_POINTS = 1000, 10_000
# How often a part may vanish between listing and reading, because a longer one has taken its place.
TRIES = 5

_NAME = re.compile(r"a(\d+)-f(\d+)-(\d+)-(\d+)\.parquet")


@dataclass(frozen=True)
class Part:
    """An object with points of the steps up to `last`, by an attempt that began at `first_step`."""

    key: str
    attempt: int
    first_step: int
    begin: int
    last: int


# Of a step, in a token: as many as an int64 has at most.
MAX_DIGITS = 19


def metrics_page(
    store: ObjectStore, job: str, after_step: int, page_size: int, page_token: str
) -> tuple[list[MetricPoint], str]:
    """The points behind `after_step` in the order of steps, and the token of the next page."""
    if after_step < 0:
        raise invalid_field("after_step", after_step, "use 0 or more")
    size = paging.checked_size(page_size, DEFAULT_POINTS, MAX_POINTS)
    last_sent = paging.key_of(page_token)
    if last_sent and not (last_sent.isdecimal() and len(last_sent) <= MAX_DIGITS):
        raise invalid_field("page_token", page_token, "send a next_page_token as it came, or none")
    points = _points(store, job, max(after_step, int(last_sent or 0)), size + 1)
    taken = points[:size]
    return taken, paging.token_of(str(taken[-1].step)) if len(points) > size else ""


def _points(store: ObjectStore, job: str, after_step: int, wanted: int) -> list[MetricPoint]:
    for _ in range(TRIES):
        found: dict[int, MetricPoint] = {}
        try:
            for point in _counting(store, list_parts(store, job), after_step):
                before = found.get(point.step)
                if before is None and len(found) == wanted:
                    break
                # Training and validation tell of the same step.
                found[point.step] = replace(point, values={**before.values, **point.values}) if before else point
        except ObjectMissing:
            continue
        return [found[step] for step in sorted(found)]
    raise Unavailable(f"the metrics of {job} are being written again and again; try again", retry_after_s=1.0)


def list_parts(store: ObjectStore, job: str) -> list[Part]:
    """In the order of their points; of each beginning the longest."""
    longest: dict[tuple[int, int], Part] = {}
    for info in store.list(f"{job}/metrics"):
        matched = _NAME.fullmatch(info.key.rpartition("/")[2])
        if matched is None:
            continue
        attempt, first_step, begin, last = map(int, matched.groups())
        part = Part(info.key, attempt, first_step, begin, last)
        there = longest.get((attempt, begin))
        if there is None or part.last > there.last:
            longest[attempt, begin] = part
    return [longest[place] for place in sorted(longest)]


def _counting(store: ObjectStore, parts: list[Part], after_step: int) -> Iterator[MetricPoint]:
    """Attempts count up to where a later one began, so that their points follow one another."""
    for part in parts:
        end = min((one.first_step for one in parts if one.attempt > part.attempt), default=None)
        if part.last <= after_step or (end is not None and part.begin > end + 1):
            continue
        for point in decode(store.get(part.key), part.attempt):
            if point.step > after_step and (end is None or point.step <= end):
                yield point
