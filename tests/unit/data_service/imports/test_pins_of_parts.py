"""The pins of a large upload stand once in the store while tasks read or scan its parts. They travel with no part."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray import cloudpickle

from data_service.domain.import_spec import Source
from data_service.formats import interface
from data_service.imports import plan
from data_service.imports.passes import Pickled
from data_service.uploads import upload
from shared.jobs import AttemptContext, JobState
from shared.storage import ObjectStore
from tests.support.upload_calls import committed
from tests.support.upload_server import uploads_of
from tests.unit.data_service.imports.test_parts import Parts, numbers, run, spec_of


@pytest.fixture(autouse=True)
def _each_row_group_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SMALL_BYTES", 0)
    monkeypatch.setattr(plan, "MAX_PART_BYTES", 1)


def test_the_pins_of_an_upload_are_in_the_store_while_its_parts_are_read(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "FEW_BLOCKS", 0)
    monkeypatch.setattr(interface, "PART_BYTES", 1)
    data = io.BytesIO()
    pq.write_table(pa.table({"n": range(400)}), data, row_group_size=100)
    name = committed(uploads_of(store), data.getvalue(), chunk_bytes=100)

    class Sending(Parts):
        def __call__(self, context: AttemptContext, folder: str, *arguments: Any, **options: Any) -> Any:
            assert len(list(store.list(f"{folder}/pins"))) == 1
            work, parts = arguments
            pickled = [cloudpickle.dumps(part) for part in parts]  # type: ignore[no-untyped-call]
            assert not any(b"/chunks/" in one for one in pickled)
            sent = [pickle.loads(one) for one in pickled]
            return super().__call__(context, folder, work, sent, **options)

    source, runner = Source(split="train", format="parquet", uris={"parquet.uri": name}), Sending()
    job = run(store, tmp_path, "v1", spec_of([source]), runner)
    assert (job.state, job.error) == (JobState.SUCCEEDED, None)
    assert runner.passes == [("WritePart", [0, 1, 2, 3])]
    assert [n for n, _ in numbers(store, job.name)["train"]] == list(range(400))
    assert not [info.key for info in store.list(f"{job.name}/data") if "/pins/" in info.key]


def test_the_units_of_a_scan_travel_without_the_pins_of_their_upload(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = 200
    monkeypatch.setattr(upload, "FEW_BLOCKS", 10)
    monkeypatch.setattr(interface, "PART_BYTES", 1000)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 500)
    monkeypatch.setattr(interface, "LARGE_BYTES", 1000)
    data = b"n\n" + b"".join(b"%d\n" % n for n in range(1000, 2000))
    name = committed(uploads_of(store), data, chunk_bytes=-(-len(data) // chunks))
    sizes: list[int] = []

    class Sending(Parts):
        def __call__(self, context: AttemptContext, folder: str, *arguments: Any, **options: Any) -> Any:
            work, parts = arguments
            pickled = [cloudpickle.dumps(part) for part in parts]  # type: ignore[no-untyped-call]
            if isinstance(work.work, Pickled):
                sizes.extend(map(len, pickled))
            sent = [pickle.loads(one) for one in pickled]
            return super().__call__(context, folder, work, sent, **options)

    source, runner = Source(split="train", format="csv", uris={"csv.uri": name}), Sending()
    job = run(store, tmp_path, "v1", spec_of([source], column_types=[]), runner)
    assert (job.state, job.error) == (JobState.SUCCEEDED, None)
    assert [kind for kind, _ in runner.passes] == ["ScanInChild", "WritePart"]
    assert sorted(n for n, _ in numbers(store, job.name)["train"]) == list(range(1000, 2000))
    # A pin takes 100 bytes and more.
    assert max(sizes) < 50 * chunks
    assert len(list(store.folders(f"{job.name}/data"))) == 1, "the folder of the scan stays"
    assert not [info.key for info in store.list(f"{job.name}/data") if "/pins/" in info.key]
