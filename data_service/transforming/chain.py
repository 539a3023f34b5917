"""The steps of a pipeline as far as some columns need them, and which rows they leave."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.transforms.batch import Batch
from shared.transforms.pipeline import Pipeline, Sliced, Walk, needed_columns, sliced
from shared.transforms.schema import Schema
from shared.transforms.steps.step import Step

# A custom function that does not let Python interrupt it is given so long beyond its own timeout.
GRACE_S = 10.0
# What a custom step means that names no timeout.
DEFAULT_TIMEOUT_S = 60.0


@contextmanager
def ended_in_time(steps: Iterable[Step]) -> Iterator[None]:
    """Ends this process where a custom function hangs outside Python: only then its own timeout does not."""
    limits_s = [step.to_proto().custom.timeout_s or DEFAULT_TIMEOUT_S for step in steps if step.op == "custom"]
    if not limits_s:
        yield
        return
    # Its thread needs no lock of Python's, which the function may hold.
    faulthandler.dump_traceback_later(sum(limits_s) + GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class _Walk(Walk):
    @property
    def left(self) -> NDArray[np.intp] | None:
        return self._origin


@dataclass(frozen=True)
class Chain:
    """`reads` are the columns that it takes, `field` the path under which errors name the steps. Picklable."""

    steps: Sliced
    reads: list[str]
    field: str = "transform"

    @classmethod
    def towards(cls, pipeline: Pipeline, given: Schema, outputs: Collection[str] | None) -> Chain:
        """What it takes to make these columns (None: all) and to know which rows are left."""
        schemas = [given]
        for step in pipeline.steps:
            schemas.append(step.output(schemas[-1]))
        needed = needed_columns(pipeline.steps, schemas, frozenset(schemas[-1] if outputs is None else outputs))
        reads = [name for name in given if name in needed[0]]
        return cls(sliced(pipeline.steps, [{name: given[name] for name in reads}, *schemas[1:]], needed), reads)

    def apply(self, batch: Batch) -> tuple[Batch, NDArray[np.intp] | None]:
        """The rows that are left, and their indices in `batch`, None where all are. Raises as `Pipeline` does."""
        walk = _Walk(batch)
        with ended_in_time(step for _, step in self.steps):
            for place, step in self.steps:
                walk.through(step, f"{self.field}.steps[{place}]", place)
        return walk.batch, walk.left
