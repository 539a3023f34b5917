"""Rows on their way to a model, gathered from several requests into batches, and what comes back for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from inference_service.domain.tensors import Array
from shared.errors import InvalidArgument, MillraceError

RAW, PREPARED = "raw", "prepared"
# So many of a request's bad rows are told one by one.
MAX_SHOWN_ROWS = 10


@dataclass(frozen=True, eq=False)
class Rows:
    """`values` has each input tensor's rows along its first axis; `form` is `RAW` or `PREPARED`.

    `nulls` says of some tensors where they are null: bool (rows,). What `values` holds there means nothing. `trace` are
    the W3C's headers of the span that rows on their way to a replica are computed for, if that is recorded.
    `size_bytes` is about what the values of a request's rows take in memory.
    """

    form: str
    values: Mapping[str, Array]
    nulls: Mapping[str, Array] = field(default_factory=dict)
    trace: Mapping[str, str] | None = None
    requests: tuple[int, ...] = ()
    size_bytes: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def slice(self, start: int, stop: int) -> Rows:
        """The rows `start` to `stop`, without a copy."""
        values = {name: whole[start:stop] for name, whole in self.values.items()}
        nulls = {name: flags[start:stop] for name, flags in self.nulls.items()}
        return Rows(self.form, values, nulls, size_bytes=sum(map(bytes_of, values.values())))

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, which are of one form and one model, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        names = {name: None for part in parts for name in part.nulls}
        return Rows(
            parts[0].form,
            {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values},
            {
                name: np.concatenate([part.nulls.get(name, np.zeros(len(part), np.bool_)) for part in parts])
                for name in names
            },
            requests=tuple(map(len, parts)),
        )


def bytes_of(values: Array) -> int:
    """What an array takes in memory; of one of bytes objects, what these do."""
    return sum(map(len, values.flat)) if values.dtype.kind == "O" else values.nbytes


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model gives for some rows: one array an output, rows along the first axis.

    `refused` says of single rows what is wrong with them, by their place, and `failed` with what error others failed
    through no fault of theirs; what the arrays hold there means nothing.
    `input_s` and `infer_s` are how long the preprocessing and the model took for all of the batch; `sent_again` where a
    first replica had died with it, so that the way there tells nothing of others'. `non_finite` are the places of rows
    that are answered with a NaN or an infinity.
    """

    arrays: Sequence[Array]
    refused: Mapping[int, str] = field(default_factory=dict)
    input_s: float = 0.0
    infer_s: float = 0.0
    sent_again: bool = False
    failed: Mapping[int, MillraceError] = field(default_factory=dict)
    non_finite: Sequence[int] = ()

    def slice(self, start: int, stop: int) -> Outputs:
        return Outputs(
            [array[start:stop] for array in self.arrays],
            {row - start: why for row, why in self.refused.items() if start <= row < stop},
            failed={row - start: error for row, error in self.failed.items() if start <= row < stop},
            non_finite=[row - start for row in self.non_finite if start <= row < stop],
        )

    def checked(self, first_row: int = 0) -> Sequence[Array]:
        """The arrays. Raises `InvalidArgument` naming the rows that were refused, counted from `first_row`, or else the
        error of the first row that failed."""
        if not self.refused and not self.failed:
            return self.arrays
        if not self.refused:
            raise self.failed[min(self.failed)]
        problems = [f"row {first_row + row}: {why}" for row, why in sorted(self.refused.items())]
        more = len(problems) - MAX_SHOWN_ROWS
        shown = problems[:MAX_SHOWN_ROWS] + ([f"and {more} rows more"] if more > 0 else [])
        raise InvalidArgument(
            "; ".join(shown),
            reason="BAD_ROW",
            metadata={"row": str(first_row + min(self.refused))},
            fields=[("inputs", problem) for problem in shown],
        )
