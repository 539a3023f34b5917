"""What the parts have become together: the new version's files, statistics and report."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_service.commit import columns_of, commit_version
from data_service.domain.bad_rows import BadRowLog, BadRowPolicy, build_report
from data_service.domain.checks import Drift, parse_checks
from data_service.domain.checks_gate import gate
from data_service.domain.checks_rows import CheckCounts
from data_service.domain.layout import SplitRange
from data_service.domain.split_rules import taken_away
from data_service.domain.statistics import SplitStatistics
from data_service.domain.transform_spec import TransformSpec
from data_service.transforming.plan import Part
from data_service.transforming.value_names import value_names
from data_service.transforming.work import Written
from shared.dataset_version.manifest import REPORT, DataFile, Parent, sha256_hex
from shared.dataset_version.version import DatasetVersion
from shared.errors import DataLoss
from shared.storage import ObjectMissing, ObjectStore
from shared.transforms.pipeline import Pipeline


class Gathered:
    """What was written, part by part in any order. Rows that were left out wait in `scratch`, so that memory does not
    grow with them."""

    def __init__(self, schema: pa.Schema, ranges: Sequence[SplitRange], scratch: Path) -> None:
        self.statistics = {one.name: SplitStatistics(schema) for one in ranges}
        self.files: list[DataFile] = []
        self._scratch = scratch
        self._bad_rows: dict[int, Path] = {}

    def add(self, part: Part, written: Written) -> None:
        self.files += written.files
        for split, statistics in written.statistics.items():
            self.statistics[split].merge(statistics)
        if written.bad_rows.reasons:
            path = self._scratch / f"bad-rows-{part.number}"
            path.write_bytes(pickle.dumps(written.bad_rows))
            self._bad_rows[part.number] = path

    def bad_rows(self) -> BadRowLog:
        """Of all parts, in the order of rows."""
        with BadRowLog(self._scratch / "quarantine.jsonl", BadRowPolicy(quarantines=True)) as bad_rows:
            for number in sorted(self._bad_rows):
                bad_rows.merge(pickle.loads(self._bad_rows[number].read_bytes()))
        return bad_rows


class Outcome:
    """Takes parts in any order."""

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

    def add(self, part: Part, written: Written) -> None:
        self._found.merge(written.checks)
        self._gathered.add(part, written)

    def commit(self, store: ObjectStore, folder: str) -> dict[str, Any]:
        """The job's result. Raises `FailedPrecondition` for a check that fails."""
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
            # A version of before transforms says nothing of them.
            ingested=manifest.ingested or manifest.columns,
            transforms=[*manifest.transforms, self._frozen()],
        )

    def _frozen(self) -> dict[str, Any]:
        """A column that the rule took away goes by a step of its own: the chain since ingest would have it still."""
        taken = taken_away(self._spec.rule)
        first = Pipeline.from_config({"steps": [{"drop": {"columns": taken}}] if taken else []})
        return first.then(self._pipeline).config

    def _parent_report(self, store: ObjectStore) -> Mapping[str, Any] | None:
        """Only where a check compares with it."""
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
