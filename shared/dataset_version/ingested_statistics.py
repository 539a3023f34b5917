"""Statistics of the rows of a version as they were ingested, before any transform changed their values."""

from __future__ import annotations

from collections.abc import Iterator

from shared.dataset_version.attachments import read_report
from shared.dataset_version.version import IMPORT_KIND, DatasetVersion, committed_version
from shared.errors import FailedPrecondition, NotFound
from shared.jobs import Jobs
from shared.storage import ObjectStore


def ingested_nan_counts(store: ObjectStore, version: DatasetVersion, split: str) -> dict[str, int]:
    """How many NaN the rows of `split` had in each column as it was ingested.

    The quality report of the version in which a column was ingested tells it: that of the import, or of the prediction
    that added it. A column is left out where that version is gone, or has no report. Where a transform divided the rows
    anew, the NaN of all splits of the versions before it count, since it is not recorded which rows went where.

    Raises `DataLoss` for a damaged manifest or report.
    """
    counts: dict[str, int] = {}
    for one, splits in _back_to_import(store, version, split):
        ingested = _ingested_there(one)
        if not ingested:
            continue
        try:
            columns = read_report(store, one).get("columns", [])
        except NotFound:
            break
        for column in columns:
            name = column["column"]
            if name in ingested and column["split"] in splits:
                counts[name] = counts.get(name, 0) + int(column["nanCount"])
    return counts


def _back_to_import(
    store: ObjectStore, version: DatasetVersion, split: str
) -> Iterator[tuple[DatasetVersion, frozenset[str]]]:
    """The version, and those that it was made from as far as they are there, each with the splits that the rows of
    `split` were in."""
    jobs, divided = Jobs(store, IMPORT_KIND), False
    while True:
        there = frozenset(one.name for one in version.manifest.splits)
        yield version, there if divided or split not in there else frozenset([split])
        if not version.manifest.transforms:
            return
        (parent,) = version.manifest.parents
        made_by = jobs.find(version.name)
        divided = divided or made_by is None or bool(made_by.spec.get("transform", {}).get("splits"))
        before = jobs.find(parent.version)
        if before is None:
            return
        try:
            version = committed_version(store, before)
        except (NotFound, FailedPrecondition):  # it is being deleted, or one of that name is being made anew
            return
        if version.manifest_sha256 != parent.manifest_sha256:
            return


def _ingested_there(version: DatasetVersion) -> frozenset[str]:
    """The columns whose values have gone through no step before they came into this version."""
    if version.manifest.prediction is not None:
        return frozenset(version.manifest.prediction.columns)
    return frozenset() if version.manifest.transforms else frozenset(column.name for column in version.columns)
