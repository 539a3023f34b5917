"""Passes over the parts of a version, told as progress: what transforms and predictions are made of."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from data_service.transforming.parallel import PartRunner, Pool, Results
from data_service.transforming.parts_task import Work
from data_service.transforming.plan import Part
from data_service.transforming.progress import Progress
from shared.jobs import AttemptContext


@dataclass(frozen=True)
class Passes:
    """`folder` is the attempt's own."""

    context: AttemptContext
    folder: str
    run_parts: PartRunner
    progress: Progress

    def over(
        self, phase: str, work: Work, parts: Sequence[Part], *, foreign_code: bool, pool: Pool | None = None
    ) -> Results:
        """To be closed, before anything else is done, by whoever leaves it early: tasks may still write."""
        self.progress.begin(phase, sum(part.row_count for part in parts))
        with closing(
            self.run_parts(self.context, self.folder, work, parts, foreign_code=foreign_code, pool=pool)
        ) as results:
            for part, result in results:
                self.progress.add(part.row_count)
                yield part, result
        self.progress.tell()
