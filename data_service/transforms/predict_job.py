"""A prediction as one attempt of the durable job: a version and a checkpoint in, a version out.

One pass over the source, whose parts are spread over workers that keep the model. If rows may be left out, a pass
before it only prepares the model's input and counts the remaining rows, because each part's row ids depend on the
counts.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_service.attempt import attempt_folder, commit_version
from data_service.domain.bad_rows import build_report
from data_service.domain.checks_rows import RowChecks
from data_service.domain.predict_spec import PredictSpec
from data_service.transforms.checking import NewColumns, new_columns, preparation
from data_service.transforms.job import Gathered, impure, lay_out, load_source
from data_service.transforms.parallel import PartRunner, Passes, Pool, Progress, Results, Work, pool_of, run_on_ray
from data_service.transforms.plan import PartitionRange, plan_parts
from data_service.transforms.predict_work import Predictor, Preparer
from data_service.transforms.work import CountPart, VersionRows, WritePart
from shared.checkpoint import CheckpointContent, load_checkpoint
from shared.dataset_version import VersionReader
from shared.dataset_version.manifest import Parent, Prediction
from shared.dataset_version.version import DatasetVersion
from shared.errors import InvalidArgument
from shared.jobs import AttemptContext

# A model takes far longer for a row than a step does, so smaller parts are worth a task.
MIN_PART_BYTES = 1024 * 1024
# The batch size where rows are only counted.
COUNTED_ROWS = 256


def run_predict(context: AttemptContext, run_parts: PartRunner = run_on_ray) -> dict[str, Any]:
    """Runs a prediction and returns the manifest's name; the job's entry point.

    The job's spec is `{"predict": PredictSpec}`. Raises `InvalidArgument` (a step cannot process a row, named by its
    id, or too many rows), `FailedPrecondition` (the source is not the requested one, a split without rows, a model that
    does not load), `DataLoss` (a damaged source or checkpoint) and `Unavailable` (the cluster lost the work).
    """
    spec = PredictSpec.from_record(context.job.spec["predict"])
    source = load_source(context.store, spec.source, spec.source_sha256)
    content = load_checkpoint(context.store, spec.checkpoint.folder, spec.checkpoint.sha256).content
    with attempt_folder(context) as (folder, scratch):
        return _Predict(context, spec, source, content, folder, scratch, run_parts).run()


class _Predict:
    def __init__(
        self,
        context: AttemptContext,
        spec: PredictSpec,
        source: DatasetVersion,
        content: CheckpointContent,
        folder: str,
        scratch: Path,
        run_parts: PartRunner,
    ) -> None:
        self._context = context
        self._spec = spec
        self._source = source
        self._content = content
        self._folder = folder
        self._scratch = scratch
        self._passes = Passes(context, folder, run_parts, Progress(context))
        self._reader = VersionReader(context.store, source)
        self._preparation = preparation(content, source.manifest, source.name)
        self._new = new_columns(spec, source.manifest, content)
        # From the source's files, since a manifest does not record which columns have no nulls.
        kept = self._reader.select(self._new.kept)
        self._schema = pa.schema([*kept, *list(self._new.schema)[len(kept) :]])

    def run(self) -> dict[str, Any]:
        splits = [self._spec.split] if self._spec.split else []
        parts = plan_parts(self._reader, self._schema, splits, MIN_PART_BYTES)
        counts = self._counts(parts)
        there = [split for split in self._source.manifest.splits if not splits or split.name in splits]
        ranges, parts = lay_out(None, there, parts, counts)
        gathered = Gathered(self._schema, ranges, self._scratch)
        predictor = Predictor(
            self._preparer(self._spec.workers.batch_size),
            self._spec.checkpoint,
            self._new.predictions,
            self._spec.workers,
            self._schema,
        )
        work = WritePart(predictor, self._no_checks(), None, self._folder)
        with closing(self._pass("PREDICTING", work, parts, pool_of(self._spec.workers))) as results:
            for part, written in results:
                if written.rows != counts[part.number]:
                    raise impure(part)
                gathered.add(part, written)
        self._context.raise_if_stopped(fresh=True)
        bad_rows = gathered.bad_rows()
        return commit_version(
            self._context.store,
            self._folder,
            columns=self._new.columns,
            ranges=ranges,
            files=gathered.files,
            report=build_report(gathered.statistics, {}, bad_rows),
            quarantine=bad_rows.path,
            quarantined_row_count=bad_rows.row_count,
            parents=[Parent(version=self._source.name, manifest_sha256=self._source.manifest_sha256)],
            ingested=self._new.ingested,
            transforms=self._new.transforms,
            prediction=self._prediction(self._new),
        )

    def _counts(self, parts: list[PartitionRange]) -> list[Counter[str]]:
        """Returns how many rows remain of each part.

        Raises `InvalidArgument` if there are more bad rows than allowed.
        """
        if not self._spec.bad_rows.are_left_out:
            return [Counter({part.split: part.row_count}) for part in parts]
        counts: list[Counter[str]] = [Counter() for _ in parts]
        bad = 0
        work = CountPart(self._preparer(COUNTED_ROWS), self._no_checks(), None)
        with closing(self._pass("CHECKING", work, parts, None)) as results:
            for part, counted in results:
                counts[part.number] = counted.rows
                bad += part.row_count - counted.rows.total()
                self._check_bad_rows(bad)
        return counts

    def _check_bad_rows(self, bad: int) -> None:
        most = self._spec.bad_rows.max_rows
        if most and bad > most:
            raise InvalidArgument(
                f"the checkpoint's steps cannot work on more than {most:,} rows of {self._source.name}; mend them, or "
                "allow more",
                reason="TOO_MANY_BAD_ROWS",
                metadata={"source": self._source.name, "max_rows": str(most)},
            )

    def _preparer(self, rows: int) -> Preparer:
        source = VersionRows(self._context.store.settings, self._source, None, rows)
        return Preparer(source, self._preparation, self._new.kept, self._spec.bad_rows.are_left_out)

    def _no_checks(self) -> RowChecks:
        return RowChecks([], self._schema)

    def _prediction(self, new: NewColumns) -> Prediction:
        return Prediction(
            checkpoint=self._spec.checkpoint.name,
            checkpoint_sha256=self._spec.checkpoint.sha256,
            trained_on=self._content.dataset_version,
            columns=new.predictions.names,
        )

    def _pass(self, phase: str, work: Work, parts: list[PartitionRange], pool: Pool | None) -> Results:
        return self._passes.over(phase, work, parts, foreign_code=self._preparation.steps.has_custom, pool=pool)
