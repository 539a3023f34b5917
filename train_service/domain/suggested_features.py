"""What becomes of the columns of a table on their way into one vector: a table of rules, the first that holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import invalid_field
from train_service.domain.suggestion import Suggestion
from train_service.domain.version_facts import (
    BOOLEAN,
    BYTES,
    INTEGER,
    OTHER,
    TENSOR,
    TEXT,
    TIME,
    ColumnFacts,
    VersionFacts,
    names_shown,
)

ID_NAMES = ("id", "uuid", "guid", "index", "key", "row", "rowid", "row_id")
MAX_CATEGORIES = 50
# Of one transform; as shared.transforms counts them.
MAX_STEPS = 256
# A learnt median counts every different value.
MAX_DISTINCT_OF_MEDIAN = 4_000_000


@dataclass(frozen=True)
class _Feature:
    """What becomes of a column: steps that make numbers of it, or `left_out` says why it is none."""

    steps: Sequence[Mapping[str, Any]] = ()
    treatment: str = ""
    left_out: str = ""


def feature_steps(
    made: Suggestion, version: VersionFacts, label: ColumnFacts, most: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The steps, at most so many, and the columns that they make numbers of."""
    steps: list[dict[str, Any]] = []
    used: dict[str, list[str]] = {}
    left_out: dict[str, list[str]] = {}
    for one in version.columns:
        if one.name == label.name:
            continue
        feature = _feature(one)
        if not feature.left_out and len(steps) + len(feature.steps) > most:
            feature = _Feature(left_out=f"a transform has at most {MAX_STEPS} steps; prepare more of them by hand")
        if feature.left_out:
            left_out.setdefault(feature.left_out, []).append(one.name)
        else:
            steps += [dict(step) for step in feature.steps]
            used.setdefault(feature.treatment, []).append(one.name)
    kept = {name for names in used.values() for name in names}
    if not kept:
        reasons = (
            "; ".join(f"{names_shown(names)}: {why}" for why, names in left_out.items()) or "it has no other column"
        )
        raise invalid_field("spec.dataset_version", version.name, f"no column is left to learn from: {reasons}")
    for treatment, names in used.items():
        made.note("preparation.transform", names_shown(names), treatment)
    for why, names in left_out.items():
        made.note("preparation.transform", f"without {names_shown(names)}", f"Left out: {why}.")
    return steps, [one.name for one in version.columns if one.name in kept]


def _feature(one: ColumnFacts) -> _Feature:
    """The table of rules for a column of a table, the first that holds."""
    column = one.name
    there = one.rows - one.nulls
    unique = one.distinct >= 0.95 * there and there >= 20
    sequence = one.least is not None and one.most is not None and one.most - one.least + 1 == one.distinct
    an_id = column.lower() in ID_NAMES or column.lower().endswith(("_id", "-id"))
    if not one.known:
        return _Feature(left_out="the version has no statistics of it")
    if one.empty:
        return _Feature(left_out="it has no value in any row")
    if one.kind == TIME:
        return _Feature(left_out="it is a date or a time; cast it to int64 first where it carries a trend")
    if one.kind in (BYTES, OTHER):
        return _Feature(left_out="its type has no place in a vector; cast it to double first where it is a number")
    if one.kind == TENSOR and (one.nans or one.infinite):
        return _Feature(left_out="it has NaN or infinite values")
    if one.kind == TENSOR:
        return _Feature((), "They are vectors already, and are taken as they are.")
    if one.distinct < 2:
        return _Feature(left_out="it has the same value in all rows")
    if one.kind == TEXT and unique:
        return _Feature(left_out="nearly each row has its own value, as identifiers and free texts do")
    if one.kind == INTEGER and there >= 20 and one.distinct == there and (sequence or an_id):
        return _Feature(left_out="nearly each row has its own value, as identifiers and free texts do")
    if one.kind == TEXT and one.distinct > MAX_CATEGORIES:
        return _Feature(left_out=f"it has more than {MAX_CATEGORIES} categories")
    if one.kind == TEXT or (one.kind == BOOLEAN and one.nulls):
        encoded = {"column": column, "one_hot_encode": {"unknown": "UNKNOWN_VALUE_ENCODE"}}
        return _Feature((encoded,), "Categories become one-hot vectors; a null or an unseen one is all zeros.")
    if one.kind == BOOLEAN:
        return _Feature((), "Booleans are 0 and 1.")
    if one.nans or one.infinite:
        return _Feature(left_out="it has NaN or infinite values; import it with nan_as_null, or filter them out")
    return _scaled(one)


def _scaled(one: ColumnFacts) -> _Feature:
    scale = {"column": one.name, "standardize": {}}
    if one.nulls and one.distinct > MAX_DISTINCT_OF_MEDIAN:
        if one.kind == INTEGER:
            return _Feature(left_out="it has nulls, and too many different integers to learn a median of")
        fill: dict[str, Any] = {"column": one.name, "fill_nulls": {"statistic": "STATISTIC_MEAN"}}
        return _Feature((fill, scale), "Nulls become the mean; numbers are standardised.")
    if one.nulls:
        fill = {"column": one.name, "fill_nulls": {"statistic": "STATISTIC_MEDIAN"}}
        return _Feature((fill, scale), "Nulls become the median; numbers are standardised.")
    on_scale = one.mean is not None and one.deviation is not None and abs(one.mean) <= 0.5 and 0.5 <= one.deviation <= 2
    if on_scale:
        return _Feature((), "Their mean and deviation are near 0 and 1 already.")
    return _Feature((scale,), "Numbers are standardised, so that none outweighs the others.")
