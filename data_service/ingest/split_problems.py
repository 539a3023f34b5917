"""What is to blame for splits that cannot be cut as asked: the request, or the rows that were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from data_service.domain.bad_rows import BadRowLog
from data_service.domain.layout import EmptySplit, LayoutError
from shared.errors import FailedPrecondition, InvalidArgument


class SplitProblems:
    def __init__(self) -> None:
        # By split: how many rows were left out in the last pass, by their reason.
        self._left_out: dict[str, Counter[str]] = {}

    @contextmanager
    def counting(self, split: str, bad_rows: BadRowLog) -> Iterator[None]:
        """What the body leaves out is of that split."""
        before = _counts(bad_rows)
        try:
            yield
        finally:
            self._left_out[split] = _counts(bad_rows) - before

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raises `FailedPrecondition` for a split of which every row was left out, and for others `InvalidArgument`
        naming the field to blame."""
        try:
            yield
        except EmptySplit as error:
            if left_out := self._left_out.get(error.split):
                raise _all_left_out(error, left_out) from None
            raise _refused("sources", error) from None
        except LayoutError as error:
            raise _refused(f"hold_outs[{error.hold_out}].fraction", error) from None


def _counts(bad_rows: BadRowLog) -> Counter[str]:
    return Counter({str(one["reason"]): int(one["rowCount"]) for one in bad_rows.to_json()})


def _refused(field: str, error: LayoutError) -> InvalidArgument:
    return InvalidArgument(
        f"{field}: {error}", reason="EMPTY_SPLIT", metadata={"field": field}, fields=[(field, str(error))]
    )


def _all_left_out(error: EmptySplit, left_out: Counter[str]) -> FailedPrecondition:
    rows, (reason, _) = left_out.total(), left_out.most_common(1)[0]
    return FailedPrecondition(
        f"{error}: {rows:,} rows were left out, most of them for this reason: {reason}; mend its sources or change the "
        "checks, or leave the split out",
        reason="EMPTY_SPLIT",
        metadata={"field": "sources", "split": error.split, "rows_left_out": str(rows)},
    )
