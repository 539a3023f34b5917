"""Which row ids the rows of each part get: a split owns one range of them, its rows in the order of the source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from data_service.domain.layout import SplitRange
from data_service.domain.split_rules import SplitRule, split_order
from data_service.transforming.plan import Part
from shared.dataset_version.manifest import Split
from shared.errors import FailedPrecondition


def lay_out(
    rule: SplitRule | None, source: Sequence[Split], parts: Sequence[Part], counts: Sequence[Counter[str]]
) -> tuple[list[SplitRange], list[Part]]:
    """`counts[i]` has the rows of part i, by split. The parts come back with their first row ids.

    Raises `FailedPrecondition` for a split without rows.
    """
    totals: Counter[str] = Counter()
    for count in counts:
        totals.update(count)
    order = [split.name for split in source] if rule is None else split_order(rule, list(totals))
    if not order:
        raise _empty("every split", rule)
    ranges: list[SplitRange] = []
    first_row_id = 0
    for name in order:
        if not totals[name]:
            raise _empty(f"the split {name!r}", rule)
        ranges.append(SplitRange(name, first_row_id, totals[name]))
        first_row_id += totals[name]
    following = {one.name: one.first_row_id for one in ranges}
    placed = []
    for part, count in zip(parts, counts, strict=True):
        placed.append(replace(part, first_row_ids={name: following[name] for name in count}))
        for name, rows in count.items():
            following[name] += rows
    return ranges, placed


def _empty(what: str, rule: SplitRule | None) -> FailedPrecondition:
    causes = "filters and quarantining checks" if rule is None else f"{rule.field}, filters and quarantining checks"
    return FailedPrecondition(
        f"{what} would have no rows: {causes} leave none; change them, or leave the split out",
        reason="EMPTY_SPLIT",
        metadata={"field": "transform" if rule is None else rule.field},
    )
