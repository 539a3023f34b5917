"""A transform as one attempt of the durable job: one version in, another out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from data_service.domain.bad_rows import BadRowLog, BadRowParts, build_report
from data_service.domain.checks import Drift, gate, parse_checks
from data_service.domain.checks_rows import CheckCounts, Repeats, RowChecks
from data_service.domain.splits import RatioDivider, SplitRange, SplitRule, divider, split_order, taken_away
from data_service.domain.statistics import SplitStatistics
from data_service.domain.transform_spec import TransformSpec
from data_service.imports.job import SpilledKeys
from data_service.parallel import PartRunner, Passes, Progress, Results, Work, run_on_ray
from data_service.transforms.checking import output_schema, remaining
from data_service.transforms.passes import (
    RESULTS,
    CountPart,
    FindKeys,
    FitPart,
    PartitionRange,
    RowTransformer,
    StepChain,
    VersionRows,
    WritePart,
    Written,
    batch_rows,
    files_of,
    plan_parts,
)
from data_service.version_attempt import KeptPass, attempt_folder, columns_of, commit_version
from millrace.common.v1 import transform_pb2
from shared.dataset_version import VersionReader, load_version
from shared.dataset_version.manifest import REPORT, ROW_ID, DataFile, DatasetVersion, Parent, Split, sha256_hex
from shared.errors import DataLoss, FailedPrecondition
from shared.jobs import AttemptContext
from shared.storage import ObjectMissing, ObjectStore
from shared.transforms.batch import arrow_type_of, schema_of
from shared.transforms.pipeline import Fitter, Pipeline
from shared.transforms.steps.images import image_columns

# --- The job ---
# The job makes passes over the source, spread over the cluster. First the steps are fitted, in as many passes as they
# need. Then, unless the rules and the source alone determine it, a pass counts how many rows each part has for each
# split. Then the rows are written.


def run_transform(context: AttemptContext, run_parts: PartRunner = run_on_ray) -> dict[str, Any]:
    """Run a transform and return the manifest's name; the job's entry point.

    The job's spec is `{"transform": TransformSpec}`.

    Raises `InvalidArgument` (a step cannot process a row, named by its id), `FailedPrecondition` (the source is not the
    requested one, a split without rows, a failing check), `DataLoss` (a damaged source) and `Unavailable` (the cluster
    lost the work).
    """
    spec = TransformSpec.from_record(context.job.spec["transform"])
    source = load_source(context.store, spec.source, spec.source_sha256)
    with attempt_folder(context, keeps_parts=True) as (folder, scratch):
        return _Transform(context, spec, source, folder, scratch, run_parts).run()


def load_source(store: ObjectStore, name: str, sha256: str) -> DatasetVersion:
    """Load the version that a job reads.

    Its manifest must have the digest `sha256`, if given. Raises the errors of `load_version`, and `FailedPrecondition`
    if the name now belongs to another version.
    """
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
        with closing(self._pass("WRITING", work, parts, self._kept("write", repeats))) as results:
            for part, written in results:
                # The counts may differ if a failing check rejected rows here. That failure is raised at the commit,
                # after all parts.
                if written.rows != counts[part.number] and written.checks.failure is None:
                    raise impure(part)
                outcome.add(part, written)
        self._context.raise_if_stopped(fresh=True)
        return outcome.commit(self._context.store, self._folder)

    def _fit(self) -> None:
        """Fit the steps, in one or more passes.

        Each pass fits the steps that depend on no unfitted step.
        """
        passes = 0
        while self._pipeline.unfitted:
            parts = plan_parts(self._reader, output_schema(self._pipeline, self._given))
            if self._divider is None:
                parts = [part for part in parts if part.split == self._spec.fit_split]
            fitter, untaught = self._pipeline.fitter(self._given), self._pipeline.fitter(self._given)
            columns = self._columns_to_fit(fitter)
            work = FitPart(self._rows(self._reader.select(columns)), untaught, self._spec.fit_split, columns)
            with closing(self._pass("FITTING", work, parts, self._kept(f"fit-{passes}"))) as results:
                for _, taught in results:
                    fitter.merge(taught)
            self._pipeline = fitter.fitted()
            passes += 1

    def _columns_to_fit(self, fitter: Fitter) -> list[str]:
        """Return the source columns that the steps fitted in this pass need."""
        needed: set[str] = set()
        for index in fitter.fitting_steps:
            before = self._pipeline.with_steps(self._pipeline.steps[:index])
            needed.update(before.reads(self._pipeline.steps[index].reads, self._given))
        return [name for name in self._given if name in needed]

    def _repeats(self, parts: list[PartitionRange], schema: pa.Schema, checks: RowChecks) -> Repeats:
        keys = SpilledKeys(checks.empty_keys(), self._scratch)
        work = FindKeys(self._judging(schema, checks), checks)
        with closing(self._pass("FITTING", work, parts, self._kept("keys"))) as results:
            for _, found in results:
                keys.merge(found)
        return keys.repeats(self._context.raise_if_stopped)

    def _counts(
        self, parts: list[PartitionRange], schema: pa.Schema, checks: RowChecks, repeats: Repeats | None
    ) -> list[Counter[str]]:
        """Return how many rows each part has for each split.

        Raises `FailedPrecondition` for a failing check.
        """
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
        with closing(self._pass("FITTING", work, parts, self._kept("count", repeats))) as results:
            for part, counted in results:
                counts[part.number] = counted.rows
                found.merge(counted.checks)
        found.refuse(lambda row_id: f"row {row_id} of {self._source.name}")
        return counts

    def _judging(self, schema: pa.Schema, checks: RowChecks) -> RowTransformer:
        """Return a maker of only the columns that row checks read."""
        columns = {check.column for check in checks.checks if check.is_of_rows}
        return self._maker(schema, columns)

    def _maker(self, schema: pa.Schema, columns: set[str] | None) -> RowTransformer:
        chain = StepChain.towards(self._pipeline, self._given, columns)
        made = pa.schema([field for field in schema if columns is None or field.name in columns])
        return RowTransformer(self._rows(made), chain, made)

    def _rows(self, schema: pa.Schema) -> VersionRows:
        limit = batch_rows(self._pipeline, self._reader.schema, schema)
        images = tuple(image_columns(self._pipeline.steps, self._given))
        return VersionRows(self._context.store.settings, self._source, self._divider, limit, images)

    def _pass(
        self, phase: str, work: Work[PartitionRange], parts: list[PartitionRange], kept: KeptPass
    ) -> Results[PartitionRange]:
        return self._passes.over(phase, work, parts, foreign_code=self._pipeline.has_custom, kept=kept)

    def _kept(self, name: str, repeats: Repeats | None = None) -> KeptPass:
        """Describe a pass, so that later attempts take over the results that depend on the same."""
        ordinals = {} if repeats is None else repeats.ordinals
        depends_on = {
            "job": [self._context.job.uid, self._context.job.spec],
            "source": self._source.manifest_sha256,
            "pipeline": self._pipeline.config,
            "repeats": {check: sha256_hex(found.tobytes()) for check, found in sorted(ordinals.items())},
        }
        return KeptPass(name, depends_on, RESULTS, files_of)


def _drawn(drawn: RatioDivider, part: PartitionRange) -> Counter[str]:
    row_ids = np.arange(part.first_row_id, part.first_row_id + part.row_count)
    assigned = drawn.assign(None, row_ids)
    counts = np.bincount(assigned.choice, minlength=len(assigned.splits)).tolist()
    return Counter({split: count for split, count in zip(assigned.splits, counts, strict=True) if count})


def impure(part: PartitionRange) -> FailedPrecondition:
    rows = f"{part.first_row_id} to {part.first_row_id + part.row_count - 1}"
    return FailedPrecondition(
        f"of the rows {rows} other ones were left when they were made again; a custom function must be pure",
        reason="IMPURE_TRANSFORM",
        metadata={"rows": rows},
    )


# --- Row ids ---
# The row ids of each part's rows: a split owns one range of ids, with its rows in the order of the source.


def lay_out(
    rule: SplitRule | None, source: Sequence[Split], parts: Sequence[PartitionRange], counts: Sequence[Counter[str]]
) -> tuple[list[SplitRange], list[PartitionRange]]:
    """Assign id ranges to the splits, and first row ids to the parts.

    `counts[i]` has the rows of part i, by split. Raises `FailedPrecondition` for a split without rows.
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


# --- Outcome ---
# The combined result of all parts: the new version's files, statistics and report.


class Gathered:
    """Collects the results of parts, in any order.

    Rows that were left out are kept in `scratch`, so that memory does not grow with them.
    """

    def __init__(self, schema: pa.Schema, ranges: Sequence[SplitRange], scratch: Path) -> None:
        self.statistics = {one.name: SplitStatistics(schema) for one in ranges}
        self.files: list[DataFile] = []
        self._scratch = scratch
        self._bad_rows = BadRowParts(scratch)

    def add(self, part: PartitionRange, written: Written) -> None:
        self.files += written.files
        for split, statistics in written.statistics.items():
            self.statistics[split].merge(statistics)
        self._bad_rows.add(part.number, written.bad_rows)

    def bad_rows(self) -> BadRowLog:
        """Return the rows left out of all parts, in row order."""
        return self._bad_rows.merged(self._scratch / "quarantine.jsonl")


class Outcome:
    """The result of a transform; takes parts in any order."""

    def __init__(
        self,
        spec: TransformSpec,
        source: DatasetVersion,
        pipeline: Pipeline,
        schema: pa.Schema,
        ranges: Sequence[SplitRange],
        scratch: Path,
    ) -> None:
        self._spec = spec
        self._source = source
        self._pipeline = pipeline
        self._schema = schema
        self._ranges = ranges
        self._checks = parse_checks(spec.checks)
        self._found = CheckCounts(self._checks)
        self._gathered = Gathered(schema, ranges, scratch)

    def add(self, part: PartitionRange, written: Written) -> None:
        self._found.merge(written.checks)
        self._gathered.add(part, written)

    def commit(self, store: ObjectStore, folder: str) -> dict[str, Any]:
        """Commit the version and return the job's result.

        Raises `FailedPrecondition` for a failing check.
        """
        self._found.refuse(lambda row_id: f"row {row_id} of {self._source.name}")
        statistics = self._gathered.statistics
        judged = gate(self._checks, statistics, self._parent_report(store))
        bad_rows = self._gathered.bad_rows()
        manifest = self._source.manifest
        names = {column.name: column.value_names for column in manifest.columns}
        return commit_version(
            store,
            folder,
            columns=columns_of(self._schema, value_names(names, self._pipeline)),
            ranges=self._ranges,
            files=self._gathered.files,
            report=build_report(statistics, {**self._found.results(), **judged}, bad_rows),
            quarantine=bad_rows.path,
            quarantined_row_count=bad_rows.row_count,
            parents=[Parent(version=self._source.name, manifest_sha256=self._source.manifest_sha256)],
            # Versions written before transforms existed do not record them.
            ingested=manifest.ingested or manifest.columns,
            transforms=[*manifest.transforms, self._frozen()],
        )

    def _frozen(self) -> dict[str, Any]:
        """Return the pipeline's config as the manifest keeps it.

        A column that the split rule consumed is dropped by a step of its own. Otherwise the chain since ingest would
        still have it.
        """
        taken = taken_away(self._spec.rule)
        first = Pipeline.from_config({"steps": [{"drop": {"columns": taken}}] if taken else []})
        return first.then(self._pipeline).config

    def _parent_report(self, store: ObjectStore) -> Mapping[str, Any] | None:
        """Return the source's report, or None if no check compares with it."""
        attached = self._source.manifest.attachment(REPORT)
        if attached is None or not any(isinstance(check.condition, Drift) for check in self._checks):
            return None
        try:
            data = store.get(f"{self._source.folder}/{attached.path}")
        except ObjectMissing:
            data = b""
        if sha256_hex(data) != attached.sha256:
            raise DataLoss(
                f"{attached.path} of {self._source.name} is not what was written",
                reason="DAMAGED_FILE",
                metadata={"resource": self._source.name, "file": attached.path},
            )
        report: Mapping[str, Any] = json.loads(data)
        return report


# --- Names of values ---
# The names of a column's values, after the steps that created or kept them.

ValueNames = Mapping[str, list[str]]


def value_names(given: ValueNames, pipeline: Pipeline) -> dict[str, list[str]]:
    """Return the value names after the steps.

    `given` are those before the steps. A column whose numbers were changed loses its names.
    """
    names = {column: list(values) for column, values in given.items() if values}
    for step in pipeline.to_proto().steps:
        _follow(names, step)
    return names


def _follow(names: dict[str, list[str]], step: transform_pb2.TransformStep) -> None:
    match step.WhichOneof("op"):
        case "ordinal_encode":
            names[step.column] = list(step.ordinal_encode.categories)
        case "select":
            _keep_only(names, step.select.columns)
        case "drop":
            _forget(names, step.drop.columns)
        case "rename":
            renamed = {step.rename.columns.get(column, column): values for column, values in names.items()}
            names.clear()
            names.update(renamed)
        case "concat":
            _forget(names, [step.concat.into, *([] if step.concat.keep else step.concat.columns)])
        case "custom":
            _forget(names, step.custom.columns)
        case "cast" if kinds.is_integer(arrow_type_of(step.cast.arrow_type)):
            pass
        case "filter" | "fill_nulls":
            pass
        case _:
            _forget(names, [step.column])


def _keep_only(names: dict[str, list[str]], columns: object) -> None:
    kept = set(columns)  # type: ignore[call-overload]
    for column in [name for name in names if name not in kept]:
        del names[column]


def _forget(names: dict[str, list[str]], columns: object) -> None:
    for column in columns:  # type: ignore[attr-defined]
        names.pop(column, None)
