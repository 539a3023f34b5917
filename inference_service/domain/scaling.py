"""How many replicas a version has, and what each of them takes of its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.durable import Durable, fields_of

MAX_REPLICAS = 64
MAX_CPUS = 256.0
MIN_SHARE = 0.01
MAX_UP_S = 600.0
MAX_DOWN_S = 86_400.0
MAX_ROWS = 1_000_000
DEFAULT_UP_S = 5.0
DEFAULT_DOWN_S = 300.0

Problem = tuple[str, object, str]


@dataclass(frozen=True, kw_only=True)
class Autoscaling(Durable):
    """Between `min_replicas` and `max_replicas`: one for each `rows_per_replica` of the rows that wait or are at work.
    There are more, or fewer, once those that there are have been too few, or too many, for so long."""

    min_replicas: int
    max_replicas: int
    rows_per_replica: int
    up_after_s: float = DEFAULT_UP_S
    down_after_s: float = DEFAULT_DOWN_S

    def within(self, replicas: int) -> int:
        return min(max(replicas, self.min_replicas), self.max_replicas)

    @staticmethod
    def from_record(record: Mapping[str, Any] | None) -> Autoscaling | None:
        return Autoscaling(**fields_of(Autoscaling, record)) if record else None


def autoscaling_problems(wanted: Autoscaling) -> list[Problem]:
    """What is out of range: field, value and remedy each."""
    low = wanted.min_replicas
    found: list[Problem] = []
    if not 1 <= low <= MAX_REPLICAS:
        found.append(("spec.autoscaling.min_replicas", low, f"use 1 to {MAX_REPLICAS}; 0 means 1"))
        low = 1
    if not low <= wanted.max_replicas <= MAX_REPLICAS:
        found.append(("spec.autoscaling.max_replicas", wanted.max_replicas, f"use {low} to {MAX_REPLICAS}"))
    if not 1 <= wanted.rows_per_replica <= MAX_ROWS:
        remedy = f"use 1 to {MAX_ROWS}; 0 means max_batch_size"
        found.append(("spec.autoscaling.rows_per_replica", wanted.rows_per_replica, remedy))
    if not 0 <= wanted.up_after_s <= MAX_UP_S:
        found.append(("spec.autoscaling.scale_up_after", wanted.up_after_s, f"use 0 to {MAX_UP_S:g} s"))
    if not 0 <= wanted.down_after_s <= MAX_DOWN_S:
        found.append(("spec.autoscaling.scale_down_after", wanted.down_after_s, f"use 0 to {MAX_DOWN_S:g} s"))
    return found


def share_problems(cpus: float | None, gpus: float) -> list[Problem]:
    """The same of a replica's part of its node."""
    found: list[Problem] = []
    # Not a number is in no range.
    if cpus is not None and not MIN_SHARE <= cpus <= MAX_CPUS:
        remedy = f"use {MIN_SHARE:g} to {MAX_CPUS:g}, or leave it out for threads_per_replica"
        found.append(("spec.cpus_per_replica", cpus, remedy))
    if gpus != 0 and not MIN_SHARE <= gpus <= 1:
        found.append(("spec.gpus_per_replica", gpus, f"use 0 for none, or {MIN_SHARE:g} to 1: a model is on one GPU"))
    return found


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What is asked of Ray Serve for one version: `initial` replicas, so many for ever unless there is `autoscaling`,
    and CPUs and GPUs for each."""

    initial: int
    cpus: float
    gpus: float = 0.0
    autoscaling: Autoscaling | None = None
