"""How many NaN the training rows had in each column as it was ingested, whatever was done to them since."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service import reconciler
from data_service.domain.import_spec import ImportSpec, Source
from data_service.domain.splits import RatioSplit, Share
from shared.dataset_version import load_version
from shared.dataset_version.version import IMPORT_KIND, ingested_nan_counts
from shared.errors import DataLoss
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt, request_delete
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.transforming import SOURCE, transform_here

NAN = np.nan
ROWS = {
    "train": {"age": [1.0, None, NAN, NAN], "fare": [1.0, None, 3.0, 4.0], "n": [1, 2, 3, 4]},
    "test": {"age": [1.0, 2.0], "fare": [NAN, 2.0], "n": [5, 6]},
}
FILL: list[dict[str, Any]] = [{"column": name, "fillNulls": {"value": {"number": 0}}} for name in ("age", "fare")]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """With `SOURCE`, an import of `ROWS`."""
    store = open_store(StoreSettings(url=(tmp_path / "store").as_uri()))
    sources = []
    for split, columns in ROWS.items():
        pq.write_table(pa.table(columns), tmp_path / split)
        sources.append(Source(split=split, format="parquet", uris={"parquet.uri": (tmp_path / split).as_uri()}))
    jobs, now = Jobs(store, IMPORT_KIND), time.time()
    recorded = {
        "import": ImportSpec(sources=sources, hold_outs=[]).as_record(),
        "import_roots": [str(tmp_path)],
        "request_id": "",
    }
    jobs.create(SOURCE, JobRecord(uid=uuid.uuid4().hex, name=SOURCE, spec=recorded, create_time=now, update_time=now))
    jobs.transition(SOURCE, lambda job: begin_attempt(job, time.time()), attempt=1)
    run_attempt(reconciler.run, store, IMPORT_KIND, SOURCE, 1)
    return store


def made(store: ObjectStore, *steps: dict[str, Any], **spec: Any) -> str:
    job = transform_here(store, steps, **spec)
    assert job.state is JobState.SUCCEEDED, job.error
    return job.name


def counts(store: ObjectStore, name: str, split: str = "train") -> dict[str, int]:
    return ingested_nan_counts(store, load_version(store, name), split)


def test_an_import_reports_them_of_the_split_that_is_trained_on(store: ObjectStore) -> None:
    assert counts(store, SOURCE) == {"age": 2, "fare": 0, "n": 0}
    assert counts(store, SOURCE, "test") == {"age": 0, "fare": 1, "n": 0}


def test_they_are_those_before_any_step(store: ObjectStore) -> None:
    assert counts(store, made(store, *FILL, {"drop": {"columns": ["n"]}})) == {"age": 2, "fare": 0, "n": 0}


def test_where_rows_were_divided_anew_those_of_all_splits_count(store: ObjectStore) -> None:
    shares = [Share(split="train", weight=1), Share(split="test", weight=1)]
    name = made(store, *FILL, splits=RatioSplit(shares=shares, seed=1))
    assert counts(store, name) == {"age": 2, "fare": 1, "n": 0}


def test_of_a_version_that_was_deleted_nothing_is_known(store: ObjectStore) -> None:
    name = made(store, *FILL)
    Jobs(store, IMPORT_KIND).transition(SOURCE, lambda job: request_delete(job, time.time()))
    assert counts(store, name) == {}


def test_a_damaged_report_is_data_loss(store: ObjectStore) -> None:
    version = load_version(store, SOURCE)
    store.put(f"{version.folder}/report.json", b"{}")
    with pytest.raises(DataLoss, match=r"report\.json"):
        counts(store, SOURCE)
