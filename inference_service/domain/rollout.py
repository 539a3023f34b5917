"""A rollout: its plan, its state, its limits, and the difference of its two versions on the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from inference_service.domain.signature import Array, TensorSpec
from shared.durable import Durable, fields_of
from shared.errors import MillraceError, invalid_fields
from shared.names import SPLIT, SPLIT_REMEDY

# --- Rollout ---
# A rollout: its plan, its state, and its limits.

MAX_STEPS = 20
MAX_INTERVAL_S = 86_400.0
MIN_WINDOW_S, MAX_WINDOW_S = 1.0, 600.0
DEFAULT_WINDOW_S = 60.0
MAX_REQUESTS = 1_000_000
DEFAULT_REQUESTS = 50
MAX_LATENCY_S = 3600.0
MAX_RATIO = 1000.0
MAX_ROWS = 10_000
DEFAULT_ROWS = 256


#  LOADING ──▶ COMPARING ──▶ SHIFTING ──▶ SUCCEEDED ──▶ UNDONE
#     ├────────────┼────────────▲ │
#     └────────────┴──────────────┴──▶ ROLLED_BACK       COMPARING only if the plan has a comparison
class RolloutState(StrEnum):
    LOADING = "LOADING"
    COMPARING = "COMPARING"
    SHIFTING = "SHIFTING"
    SUCCEEDED = "SUCCEEDED"
    ROLLED_BACK = "ROLLED_BACK"
    UNDONE = "UNDONE"


UNDER_WAY = frozenset({RolloutState.LOADING, RolloutState.COMPARING, RolloutState.SHIFTING})


@dataclass(frozen=True)
class RolloutStep(Durable):
    """One step: for `interval_s` the new version gets `percent` of the requests that name no version."""

    percent: int
    interval_s: float


DEFAULT_STEPS = tuple(RolloutStep(percent, 60.0) for percent in (5, 25, 50, 100))


@dataclass(frozen=True, kw_only=True)
class RolloutLimits(Durable):
    """The limits of a rollout; None is no limit.

    They apply once there are `min_requests` in the last `window_s`. The ratio is relative to the old version.
    """

    max_error_share: float | None = None
    max_p99_s: float | None = None
    max_p99_ratio: float | None = None
    min_requests: int = DEFAULT_REQUESTS
    window_s: float = DEFAULT_WINDOW_S


@dataclass(frozen=True, kw_only=True)
class Comparison(Durable):
    """A comparison before any traffic moves.

    It uses the first `max_rows` of a split. `min_agreement` is the share of rows whose labels must agree with the old
    version's, `max_difference` the greatest allowed difference of outputs. None is no limit.
    """

    dataset_version: str
    split: str
    max_rows: int = DEFAULT_ROWS
    min_agreement: float | None = None
    max_difference: float | None = None


@dataclass(frozen=True)
class Compared(Durable):
    """The result of a comparison.

    `agreement` is None if the model has no label. `refused` rows, which both versions refuse, are not part of `rows`;
    `refused_by_one` are, and count as entirely different.
    """

    rows: int
    agreement: float | None
    difference: float
    refused: int = 0
    refused_by_one: int = 0


@dataclass(frozen=True, kw_only=True)
class RolloutPlan(Durable):
    """The plan of a rollout, with defaults filled in.

    `checkpoint` is as the client named it, a job or a checkpoint.
    """

    checkpoint: str
    steps: tuple[RolloutStep, ...] = DEFAULT_STEPS
    limits: RolloutLimits = RolloutLimits()
    allow_new_signature: bool = False
    comparison: Comparison | None = None


@dataclass(frozen=True, kw_only=True)
class Rollout(Durable):
    """A rollout.

    `before` has the weights to go back to, by version number; `step` is the index of the present step, or of the last.
    Times are seconds since the epoch, 0 for what has not happened.
    """

    uid: str
    request_id: str
    operation: str
    plan: RolloutPlan
    state: RolloutState
    version: str
    before: Mapping[str, int]
    create_time: float
    step: int = 0
    step_time: float = 0.0
    end_time: float = 0.0
    error: Mapping[str, Any] | None = None
    compared: Compared | None = None

    @property
    def under_way(self) -> bool:
        return self.state in UNDER_WAY

    @property
    def main(self) -> str:
        """The number of the old version with the most traffic."""
        return max(self.before, key=lambda number: self.before[number])

    @property
    def present(self) -> RolloutStep:
        return self.plan.steps[self.step]

    def ended(self, state: RolloutState, now_s: float, error: MillraceError | None = None) -> Rollout:
        return replace(self, state=state, end_time=now_s, error=error.as_record() if error else None)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Rollout:
        plan = dict(record["plan"])
        plan["steps"] = tuple(RolloutStep(**fields_of(RolloutStep, step)) for step in plan["steps"])
        plan["limits"] = RolloutLimits(**fields_of(RolloutLimits, plan["limits"]))
        comparison, compared = plan.get("comparison"), record.get("compared")
        plan["comparison"] = Comparison(**fields_of(Comparison, comparison)) if comparison else None
        return Rollout(
            **{
                **fields_of(Rollout, record),
                "plan": RolloutPlan(**fields_of(RolloutPlan, plan)),
                "state": RolloutState(record["state"]),
                "compared": Compared(**fields_of(Compared, compared)) if compared else None,
            }
        )


@dataclass(frozen=True, kw_only=True)
class RolloutChange:
    """A checked request to roll out.

    `digest` is the digest of the request's body without its `request_id`.
    """

    name: str
    plan: RolloutPlan
    etag: str
    request_id: str
    digest: str
    validate_only: bool


def check_plan(
    *,
    checkpoint: str,
    steps: Sequence[RolloutStep],
    limits: RolloutLimits,
    allow_new_signature: bool = False,
    comparison: Comparison | None = None,
) -> RolloutPlan:
    """Return the plan with its defaults.

    Raises `InvalidArgument` naming every out-of-range field.
    """
    problems: list[tuple[str, object, str]] = []
    if len(steps) > MAX_STEPS:
        problems.append(("spec.steps", f"{len(steps)} steps", f"use at most {MAX_STEPS}"))
    before = -1  # the first step may be 0 %: loaded, for routes by header and for a shadow
    for place, step in enumerate(steps[:MAX_STEPS]):
        if not before < step.percent <= 100:
            problems.append((f"spec.steps[{place}].percent", step.percent, f"use {before + 1} to 100: shares rise"))
        if not 0 <= step.interval_s <= MAX_INTERVAL_S:
            problems.append((f"spec.steps[{place}].interval", step.interval_s, f"use 0 to {MAX_INTERVAL_S:g} s"))
        before = max(before, step.percent)
    if steps and steps[-1].percent != 100 and not problems:
        problems.append((f"spec.steps[{len(steps) - 1}].percent", steps[-1].percent, "end with a step of 100"))
    problems += [
        (f"spec.limits.{field}", value, f"use {low:g} to {high:g}{unit}")
        for field, value, low, high, unit in (
            ("max_error_share", limits.max_error_share, 0, 1, ""),
            ("max_p99_latency", limits.max_p99_s, 0, MAX_LATENCY_S, " s"),
            ("max_p99_ratio", limits.max_p99_ratio, 0, MAX_RATIO, ""),
            ("min_requests", limits.min_requests, 1, MAX_REQUESTS, ""),
            ("window", limits.window_s, MIN_WINDOW_S, MAX_WINDOW_S, " s"),
        )
        if value is not None and not low <= value <= high
    ]
    problems += _problems_of(comparison) if comparison is not None else []
    if comparison is not None and allow_new_signature:
        problems.append(
            ("spec.allow_new_signature", True, "leave it out: versions that differ in it cannot be compared")
        )
    if problems:
        raise invalid_fields(problems)
    return RolloutPlan(
        checkpoint=checkpoint,
        steps=tuple(steps) or DEFAULT_STEPS,
        limits=limits,
        allow_new_signature=allow_new_signature,
        comparison=comparison,
    )


def _problems_of(comparison: Comparison) -> list[tuple[str, object, str]]:
    field = "spec.comparison"
    problems: list[tuple[str, object, str]] = []
    if comparison.min_agreement is None and comparison.max_difference is None:
        problems.append((field, None, "set min_agreement or max_difference: nothing would follow from it"))
    if not SPLIT.fullmatch(comparison.split):
        problems.append((f"{field}.split", comparison.split, SPLIT_REMEDY))
    if not 1 <= comparison.max_rows <= MAX_ROWS:
        problems.append((f"{field}.max_rows", comparison.max_rows, f"use 0 to {MAX_ROWS}; 0 means {DEFAULT_ROWS}"))
    if comparison.min_agreement is not None and not 0 <= comparison.min_agreement <= 1:
        problems.append((f"{field}.min_agreement", comparison.min_agreement, "use 0 to 1"))
    if comparison.max_difference is not None and not comparison.max_difference >= 0:
        problems.append((f"{field}.max_difference", comparison.max_difference, "use 0 or more"))
    return problems


# --- Comparing ---
# The difference of two versions of a model on the same rows.

LABEL = "label"


@dataclass
class Difference:
    """Accumulates the difference, batch by batch.

    `agreeing` counts rows with equal labels, None if the model has no label. `greatest` is the greatest absolute
    difference of float outputs. `refused` and `refused_by_one` are as in `Compared`.
    """

    rows: int = 0
    agreeing: int | None = None
    greatest: float = 0.0
    refused: int = 0
    refused_by_one: int = 0

    def add(self, specs: Sequence[TensorSpec], old: Sequence[Array], new: Sequence[Array]) -> None:
        """Add the outputs of both versions for some rows, in the order of `specs`."""
        self.rows += len(old[0])
        for spec, one, other in zip(specs, old, new, strict=True):
            if spec.name == LABEL:
                self.agreeing = (self.agreeing or 0) + int(np.count_nonzero(one == other))
            elif one.size and np.issubdtype(one.dtype, np.floating):
                greatest = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
                # NaN counts as an infinite difference.
                self.greatest = max(self.greatest, float("inf") if np.isnan(greatest) else float(greatest))

    def add_refused(self, specs: Sequence[TensorSpec], *, by_both: bool) -> None:
        """Add a row that one version, or both, refuse.

        `specs` are the outputs of the model.
        """
        if by_both:
            self.refused += 1
            return
        self.rows += 1
        self.refused_by_one += 1
        self.greatest = float("inf")
        if any(spec.name == LABEL for spec in specs):
            self.agreeing = self.agreeing or 0

    def result(self) -> Compared:
        agreement = None if self.agreeing is None or not self.rows else self.agreeing / self.rows
        return Compared(self.rows, agreement, self.greatest, self.refused, self.refused_by_one)


def falls_short(comparison: Comparison, seen: Compared) -> str:
    """Return which limit of the comparison is not met; empty if all are."""
    if comparison.min_agreement is not None:
        if seen.agreement is None:
            return "its outputs have no label, so that there is no agreement to compare; use max_difference"
        if seen.agreement < comparison.min_agreement:
            return (
                f"{seen.agreement:.2%} of {seen.rows} held rows have the label that the old version gives, at least "
                f"{comparison.min_agreement:.2%} must{_of_them_refused(seen)}"
            )
    if comparison.max_difference is not None and seen.difference > comparison.max_difference:
        return (
            f"its outputs for {seen.rows} held rows differ from the old version's by up to {seen.difference:.4g}, at "
            f"most {comparison.max_difference:.4g} is allowed{_of_them_refused(seen)}"
        )
    return ""


def _of_them_refused(seen: Compared) -> str:
    return f"; {seen.refused_by_one} of them only one of the versions takes" if seen.refused_by_one else ""
