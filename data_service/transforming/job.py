"""A transform, as the durable job's attempt runs it: a version in, another out.

Passes over the source, each spread over the cluster: steps learn, in as many passes as it takes; where the rules and
the data alone do not tell how many rows each part has for each split, they are counted; then rows are written.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_service.attempt_folder import attempt_folder
from data_service.domain.checks import parse_checks
from data_service.domain.checks_rows import CheckCounts, Repeats, RowChecks, UniqueKeys
from data_service.domain.split_rules import RatioDivider, divider
from data_service.domain.transform_spec import TransformSpec
from data_service.transforming.chain import Chain
from data_service.transforming.checking import output_schema, remaining
from data_service.transforming.layout import lay_out
from data_service.transforming.outcome import Outcome
from data_service.transforming.parallel import PartRunner, Results, run_on_ray
from data_service.transforming.parts_task import Work
from data_service.transforming.passes import Passes
from data_service.transforming.plan import Part, plan_parts
from data_service.transforming.progress import Progress
from data_service.transforming.rows import RowSource, batch_rows
from data_service.transforming.work import CountPart, FindKeys, FitPart, Maker, WritePart
from shared.dataset_version import VersionReader, load_version
from shared.dataset_version.columns import ROW_ID
from shared.dataset_version.version import DatasetVersion
from shared.errors import FailedPrecondition
from shared.jobs import AttemptContext
from shared.storage import ObjectStore
from shared.transforms.fitting import Fitter
from shared.transforms.pipeline import Pipeline
from shared.transforms.schema import schema_of
from shared.transforms.steps.decoding import image_columns


def run_transform(context: AttemptContext, run_parts: PartRunner = run_on_ray) -> dict[str, Any]:
    """The job's entry. Its spec is `{"transform": TransformSpec}`; the result names the manifest.

    Raises `InvalidArgument` (a row that a step cannot work on, named by its id), `FailedPrecondition` (the source is
    another than was asked for, a split without rows, a check that fails), `DataLoss` (a damaged source) and
    `Unavailable` (the cluster lost the work).
    """
    spec = TransformSpec.from_record(context.job.spec["transform"])
    source = load_source(context.store, spec.source, spec.source_sha256)
    with attempt_folder(context) as (folder, scratch):
        return _Transform(context, spec, source, folder, scratch, run_parts).run()


def load_source(store: ObjectStore, name: str, sha256: str) -> DatasetVersion:
    """The version that a job reads, whose manifest must have this digest (empty: any). Raises as `load_version`, and
    `FailedPrecondition` for another one of that name."""
    source = load_version(store, name)
    if sha256 and source.manifest_sha256 != sha256:
        raise FailedPrecondition(
            f"source: {name} was deleted and made again since the job was asked for; ask again",
            reason="SOURCE_REPLACED",
            metadata={"resource": name},
        )
    return source


class _Transform:
    def __init__(
        self,
        context: AttemptContext,
        spec: TransformSpec,
        source: DatasetVersion,
        folder: str,
        scratch: Path,
        run_parts: PartRunner,
    ) -> None:
        self._context = context
        self._spec = spec
        self._source = source
        self._folder = folder
        self._scratch = scratch
        self._passes = Passes(context, folder, run_parts, Progress(context))
        self._reader = VersionReader(context.store, source)
        self._divider = divider(spec.rule, source.manifest.row_count) if spec.rule else None
        whole = schema_of(pa.schema([field for field in self._reader.schema if field.name != ROW_ID]))
        self._given = remaining(whole, spec.rule)
        self._pipeline = Pipeline.from_config(spec.transform)

    def run(self) -> dict[str, Any]:
        self._fit()
        schema = output_schema(self._pipeline, self._given)
        checks = RowChecks(parse_checks(self._spec.checks), schema)
        parts = plan_parts(self._reader, schema)
        repeats = self._repeats(parts, schema, checks) if checks.needs_keys else None
        counts = self._counts(parts, schema, checks, repeats)
        ranges, parts = lay_out(self._spec.rule, self._source.manifest.splits, parts, counts)
        outcome = Outcome(self._spec, self._source, self._pipeline, schema, ranges, self._scratch)
        work = WritePart(self._maker(schema, None), checks, repeats, self._folder)
        with closing(self._pass("WRITING", work, parts)) as results:
            for part, written in results:
                # Rows that a failing check met are not written, and all parts are looked at before the first is told.
                if written.rows != counts[part.number] and written.checks.failure is None:
                    raise impure(part)
                outcome.add(part, written)
        self._context.raise_if_stopped(fresh=True)
        return outcome.commit(self._context.store, self._folder)

    def _fit(self) -> None:
        """Each pass teaches the steps that depend on none that still has to learn."""
        while self._pipeline.unfitted:
            parts = plan_parts(self._reader, output_schema(self._pipeline, self._given))
            if self._divider is None:
                parts = [part for part in parts if part.split == self._spec.fit_split]
            fitter, untaught = self._pipeline.fitter(self._given), self._pipeline.fitter(self._given)
            columns = self._columns_to_learn(fitter)
            work = FitPart(self._rows(self._reader.select(columns)), untaught, self._spec.fit_split, columns)
            with closing(self._pass("FITTING", work, parts)) as results:
                for _, taught in results:
                    fitter.merge(taught)
            self._pipeline = fitter.fitted()

    def _columns_to_learn(self, fitter: Fitter) -> list[str]:
        """Those of the source that it takes to bring the steps that learn now their columns."""
        needed: set[str] = set()
        for index in fitter.learns:
            before = self._pipeline.with_steps(self._pipeline.steps[:index])
            needed.update(before.reads(self._pipeline.steps[index].reads, self._given))
        return [name for name in self._given if name in needed]

    def _repeats(self, parts: list[Part], schema: pa.Schema, checks: RowChecks) -> Repeats:
        keys: UniqueKeys | None = None
        with closing(self._pass("FITTING", FindKeys(self._judging(schema, checks), checks), parts)) as results:
            for _, found in results:
                if keys is None:
                    keys = found
                else:
                    keys.merge(found)
        assert keys is not None
        return keys.repeats()

    def _counts(
        self, parts: list[Part], schema: pa.Schema, checks: RowChecks, repeats: Repeats | None
    ) -> list[Counter[str]]:
        """By part, how many rows it has for each split. Raises `FailedPrecondition` for a check that fails."""
        quarantines = any(check.is_of_rows and check.quarantines for check in checks.checks)
        if not self._pipeline.drops_rows and not quarantines:
            if self._divider is None:
                return [Counter({part.split: part.row_count}) for part in parts]
            if isinstance(self._divider, RatioDivider):
                return [_drawn(self._divider, part) for part in parts]
        if not quarantines:
            checks, repeats = RowChecks([], schema), None
        counts: list[Counter[str]] = [Counter() for _ in parts]
        found = CheckCounts(checks.checks)
        work = CountPart(self._judging(schema, checks), checks, repeats)
        with closing(self._pass("FITTING", work, parts)) as results:
            for part, counted in results:
                counts[part.number] = counted.rows
                found.merge(counted.checks)
        found.refuse(lambda row_id: f"row {row_id} of {self._source.name}")
        return counts

    def _judging(self, schema: pa.Schema, checks: RowChecks) -> Maker:
        """Makes only what checks of rows look at."""
        columns = {check.column for check in checks.checks if check.is_of_rows}
        return self._maker(schema, columns)

    def _maker(self, schema: pa.Schema, columns: set[str] | None) -> Maker:
        chain = Chain.towards(self._pipeline, self._given, columns)
        made = pa.schema([field for field in schema if columns is None or field.name in columns])
        return Maker(self._rows(made), chain, made)

    def _rows(self, made: pa.Schema) -> RowSource:
        limit = batch_rows(self._pipeline, self._reader.schema, made)
        images = tuple(image_columns(self._pipeline.steps, self._given))
        return RowSource(self._context.store.settings, self._source, self._divider, limit, images)

    def _pass(self, phase: str, work: Work, parts: list[Part]) -> Results:
        return self._passes.over(phase, work, parts, foreign_code=self._pipeline.has_custom)


def _drawn(drawn: RatioDivider, part: Part) -> Counter[str]:
    row_ids = np.arange(part.first_row_id, part.first_row_id + part.row_count)
    assigned = drawn.assign(None, row_ids)
    counts = np.bincount(assigned.choice, minlength=len(assigned.splits)).tolist()
    return Counter({split: count for split, count in zip(assigned.splits, counts, strict=True) if count})


def impure(part: Part) -> FailedPrecondition:
    rows = f"{part.first_row_id} to {part.first_row_id + part.row_count - 1}"
    return FailedPrecondition(
        f"of the rows {rows} other ones were left when they were made again; a custom function must be pure",
        reason="IMPURE_TRANSFORM",
        metadata={"rows": rows},
    )
