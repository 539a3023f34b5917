"""A prediction as one attempt of the durable job: a version and a checkpoint in, a version out.

One pass over the source, whose parts are spread over workers that keep the model. If rows may be left out, a pass
before it only prepares the model's input and counts the remaining rows, because each part's row ids depend on the
counts.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_service.attempt import attempt_folder, commit_version
from data_service.domain.bad_rows import build_report
from data_service.domain.checks_rows import RowChecks
from data_service.domain.transform_spec import PredictSpec
from data_service.parallel import PartRunner, Passes, Pool, Progress, Results, Work, pool_of, run_on_ray
from data_service.transforms.checking import NewColumns, columns_with, new_columns, preparation
from data_service.transforms.job import Gathered, impure, lay_out, load_source
from data_service.transforms.plan import PartitionRange, parts_of, plan_parts
from data_service.transforms.predict_work import Predictor, Preparer
from data_service.transforms.predictor_work import (
    Declare,
    InputRows,
    PredictorRows,
    ProgramPredictor,
    check_inputs,
    output_columns,
)
from data_service.transforms.work import CountPart, VersionRows, WritePart
from shared.bundle_predictor import DeclaredTensor
from shared.checkpoint import load_checkpoint
from shared.checkpoint.format import is_program_checkpoint, load_program_checkpoint
from shared.dataset_version import VersionReader
from shared.dataset_version.manifest import DatasetVersion, Parent, Prediction
from shared.errors import InvalidArgument
from shared.jobs import AttemptContext
from shared.storage import ObjectStore

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
    with attempt_folder(context) as (folder, scratch):
        passes = Passes(context, folder, run_parts, Progress(context))
        model: _Model | _Program
        if is_program_checkpoint(context.store, spec.checkpoint.folder, spec.checkpoint.sha256):
            model = _Program(context.store, spec, source, passes)
        else:
            model = _Model(context.store, spec, source)
        return _Predict(context, spec, source, model, folder, scratch, passes).run()


class _Model:
    """A model of Millrace's loop: how its checkpoint predicts."""

    def __init__(self, store: ObjectStore, spec: PredictSpec, source: DatasetVersion) -> None:
        self._store = store
        self._spec = spec
        self._source = source
        content = load_checkpoint(store, spec.checkpoint.folder, spec.checkpoint.sha256).content
        self._preparation = preparation(content, source.manifest, source.name)
        self.new = new_columns(spec, source.manifest, content)
        self.trained_on = content.dataset_version
        self.runs_foreign_code = self._preparation.steps.has_custom

    def inputs(self, rows: int) -> Preparer:
        source = VersionRows(self._store.settings, self._source, None, rows)
        return Preparer(source, self._preparation, self.new.kept, self._spec.bad_rows.are_left_out)

    def predictions(self, schema: pa.Schema) -> Predictor:
        inputs = self.inputs(self._spec.workers.batch_size)
        return Predictor(inputs, self._spec.checkpoint, self.new.predictions, self._spec.workers, schema)


class _Program:
    """A program's checkpoint: how its bundle's predictor predicts.

    A worker finds first what the predictor takes and gives.
    """

    runs_foreign_code = True

    def __init__(self, store: ObjectStore, spec: PredictSpec, source: DatasetVersion, passes: Passes) -> None:
        self._store = store
        self._spec = spec
        self._source = source
        self._program = ProgramPredictor(store.settings, spec.checkpoint, spec.predictor)
        content = load_program_checkpoint(store, spec.checkpoint.folder, spec.checkpoint.sha256)
        self._inputs, outputs = self._declared(passes)
        check_inputs(self._inputs, source.manifest, source.name)
        self._outputs = output_columns(spec, outputs)
        self.new = columns_with(spec, source.manifest, self._outputs)
        self.trained_on = content.dataset_version

    def inputs(self, rows: int) -> InputRows:
        source = VersionRows(self._store.settings, self._source, None, rows)
        return InputRows(source, self._inputs, self.new.kept, self._spec.bad_rows.are_left_out)

    def predictions(self, schema: pa.Schema) -> PredictorRows:
        inputs = self.inputs(self._spec.workers.batch_size)
        return PredictorRows(inputs, self._program, self._outputs, self._spec.workers, schema)

    def _declared(self, passes: Passes) -> tuple[tuple[DeclaredTensor, ...], tuple[DeclaredTensor, ...]]:
        reader = VersionReader(self._store, self._source)
        first_split = self._source.manifest.splits[0].name
        one_part = list(islice(parts_of(reader, reader.schema, [first_split], MIN_PART_BYTES), 1))
        pool = replace(pool_of(self._spec.workers), most=1)
        work = Declare(self._program)
        with closing(passes.over("CHECKING", work, one_part, foreign_code=True, pool=pool)) as results:
            ((_, declaration),) = results
        return declaration.inputs, declaration.outputs


class _Predict:
    def __init__(
        self,
        context: AttemptContext,
        spec: PredictSpec,
        source: DatasetVersion,
        model: _Model | _Program,
        folder: str,
        scratch: Path,
        passes: Passes,
    ) -> None:
        self._context = context
        self._spec = spec
        self._source = source
        self._model = model
        self._folder = folder
        self._scratch = scratch
        self._passes = passes
        self._reader = VersionReader(context.store, source)
        self._new = model.new
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
        work = WritePart(self._model.predictions(self._schema), self._no_checks(), None, self._folder)
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
        work = CountPart(self._model.inputs(COUNTED_ROWS), self._no_checks(), None)
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

    def _no_checks(self) -> RowChecks:
        return RowChecks([], self._schema)

    def _prediction(self, new: NewColumns) -> Prediction:
        return Prediction(
            checkpoint=self._spec.checkpoint.name,
            checkpoint_sha256=self._spec.checkpoint.sha256,
            trained_on=self._model.trained_on,
            columns=new.predictions.names,
        )

    def _pass(
        self, phase: str, work: Work[PartitionRange], parts: list[PartitionRange], pool: Pool | None
    ) -> Results[PartitionRange]:
        return self._passes.over(phase, work, parts, foreign_code=self._model.runs_foreign_code, pool=pool)
