"""Quality checks, which gate the publication of a version.

With `quarantine` a row that does not pass is left out and kept in quarantine. Otherwise it fails the version.
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace.data.v1 import quality_pb2 as pb
from millrace_client.steps import Value, scalar

Check = pb.QualityCheck


def not_null(column: str, *, quarantine: bool = False) -> Check:
    return Check(column=column, action=_action(quarantine), not_null=pb.NotNull())


def unique(column: str, *, quarantine: bool = False) -> Check:
    """Require that no value occurs twice. Of equal values the first row stays."""
    return Check(column=column, action=_action(quarantine), unique=pb.Unique())


def in_range(column: str, *, least: float | None = None, most: float | None = None, quarantine: bool = False) -> Check:
    """Require values in an inclusive range. Nulls pass; NaN does not."""
    return Check(column=column, action=_action(quarantine), range=pb.Range(min=least, max=most))


def one_of(column: str, values: Iterable[Value], *, quarantine: bool = False) -> Check:
    return Check(column=column, action=_action(quarantine), one_of=pb.OneOf(values=[scalar(value) for value in values]))


def matches(column: str, regex: str, *, quarantine: bool = False) -> Check:
    """Require that the whole string matches an RE2 expression."""
    return Check(column=column, action=_action(quarantine), pattern=pb.Pattern(regex=regex))


def row_count(*, split: str = "", least: int = 0, most: int = 0) -> Check:
    """Bound the rows of one split, or of all if `split` is empty. `most` 0: no limit."""
    return Check(row_count=pb.RowCount(split=split, min=least, max=most))


def class_balance(column: str, *, min_share: float = 0.0, max_share: float = 0.0) -> Check:
    """Bound the shares, 0 to 1, of the rarest and the most frequent value. `max_share` 0: no limit."""
    return Check(column=column, class_balance=pb.ClassBalance(min_share=min_share, max_share=max_share))


def drift(column: str, most: float) -> Check:
    """Bound the drift from the parent version.

    `most` is the population stability index; by convention 0.1 is slight and 0.25 strong.
    """
    return Check(column=column, drift=pb.Drift(max_population_stability_index=most))


def _action(quarantine: bool) -> pb.QualityCheck.Action:
    return pb.QualityCheck.ACTION_QUARANTINE if quarantine else pb.QualityCheck.ACTION_FAIL
