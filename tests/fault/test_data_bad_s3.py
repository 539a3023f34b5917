"""Upload, import and transform where the way to S3 is slow, fails, resets or goes silent: the result is the same."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

import millrace_client
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import Upload
from shared.storage.object_store import ensure_bucket
from tests.support.chunk_sender import chunks, commit, send
from tests.support.data_place import DataPlace, data_place, digits_stream, normalising
from tests.support.faults import Faults
from tests.support.ray_head import RayHead
from tests.support.refusals import refused
from tests.support.s3_fault_proxy import (
    NONE,
    WRITES,
    Fault,
    S3FaultProxy,
    failing,
    fault_proxy,
    full,
    resetting,
    slow,
    unresponsive,
)
from tests.support.s3_server import S3Server
from tests.support.stores import S3

ROWS = 4_000
UNRESPONSIVE_S = 8.0
chaos = pytest.mark.chaos


@dataclass
class Scene:
    """`imported` and `transformed` are the digests that come out without faults, `source` what was imported then."""

    place: DataPlace
    proxy: S3FaultProxy
    data: bytes
    source: str
    imported: str
    transformed: str


@pytest.fixture(scope="module")
def scene(s3_server: S3Server, data_head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    behind = s3_server.settings(f"s3://millrace/{uuid.uuid4().hex}")
    ensure_bucket(behind)
    with fault_proxy(behind) as proxy:
        folder = tmp_path_factory.mktemp("bad-s3")
        with data_place(proxy.settings(behind), data_head, folder, behind) as place:
            data = digits_stream(ROWS)
            source = place.imported(uploaded(place, data).name)
            transformed = place.transformed(source.name, normalising())
            yield Scene(place, proxy, data, source.name, source.manifest_sha256, transformed.manifest_sha256)


def uploaded(place: DataPlace, data: bytes) -> Upload:
    """By our own client, which goes on after breaks."""
    with millrace_client.connect(data=place.service.address) as client:
        return client.data.upload(place.dataset, data)


FAULTS = [
    pytest.param(failing(503, share=0.1), id="a tenth fails with 503", marks=chaos),
    pytest.param(failing(500, share=0.1), id="a tenth fails with 500", marks=chaos),
    pytest.param(failing(503, share=0.3), id="a third fails with 503", marks=chaos),
    pytest.param(resetting("response", share=0.1), id="a tenth is done but reset", marks=chaos),
    pytest.param(resetting("response", 500, share=0.1), id="a tenth of answers is cut", marks=chaos),
    pytest.param(resetting("request", 100, share=0.4, methods=WRITES), id="four tenths of writes are cut", marks=chaos),
    pytest.param(slow(4_000_000, latency_s=0.02), id="slow", marks=chaos),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_way_to_the_store_changes_nothing(
    scene: Scene, fault: Fault, faults: Faults, request: pytest.FixtureRequest
) -> None:
    place, proxy = scene.place, scene.proxy
    proxy.fault = fault
    try:
        upload = uploaded(place, scene.data)
        imported = place.ended(place.start_import(upload.name))
        transformed = place.ended(place.start_transform(scene.source, normalising()))
        assert proxy.struck >= 3
        faults.add(f"requests to S3: {request.node.callspec.id}", "upload, import, transform", S3, proxy.struck)
    finally:
        proxy.fault = NONE
    place.assert_made_once(imported, scene.imported)
    place.assert_made_once(transformed, scene.transformed)


@chaos
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(failing(503, share=0.2), id="a fifth fails with 503"),
        pytest.param(resetting("response", 500, share=0.1), id="a tenth of answers is cut"),
    ],
)
def test_sources_on_s3_are_read_by_a_bad_way_too(
    scene: Scene, fault: Fault, faults: Faults, request: pytest.FixtureRequest
) -> None:
    place, proxy = scene.place, scene.proxy
    sources = sources_on_s3(place)
    wanted = place.get(place.version_of(place.ended(place.start_import_of(*sources)))).manifest_sha256
    proxy.fault = fault
    try:
        imported = place.ended(place.start_import_of(*sources))
        assert proxy.struck >= 3
        faults.add(f"requests to S3: {request.node.callspec.id}", "import from s3://", S3, proxy.struck)
    finally:
        proxy.fault = NONE
    place.assert_made_once(imported, wanted)


def sources_on_s3(place: DataPlace) -> list[pb.ImportSource]:
    """The same columns as Parquet of many row groups, and as CSV."""
    rows = pa.table({"id": np.arange(100_000), "x": np.random.default_rng(5).normal(size=100_000)})
    for name, write in (("a.parquet", partial(pq.write_table, row_group_size=5_000)), ("b.csv", csv.write_csv)):
        sink = pa.BufferOutputStream()
        write(rows, sink)
        place.store.put(f"sources/{name}", bytes(sink.getvalue()))
    uri = f"{place.store.settings.url}/sources"
    return [
        pb.ImportSource(split="train", parquet=pb.ParquetSource(uri=f"{uri}/a.parquet")),
        pb.ImportSource(split="test", csv=pb.CsvSource(uri=f"{uri}/b.csv")),
    ]


@chaos
def test_a_store_that_falls_silent_is_waited_for(scene: Scene, faults: Faults) -> None:
    place, proxy = scene.place, scene.proxy
    upload = place.start_upload()
    send(place.client.data, upload, scene.data, 0, len(scene.data) // 2)
    started = place.start_import(upload)
    proxy.fault = unresponsive()
    well_again = threading.Timer(UNRESPONSIVE_S, setattr, (proxy, "fault", NONE))
    well_again.start()
    try:
        acknowledged = place.acknowledged(upload)
        send(place.client.data, upload, scene.data, acknowledged, len(scene.data))
        commit(place.client.data, upload, scene.data)
    finally:
        well_again.join()
    faults.add(f"S3 silent for {UNRESPONSIVE_S:g} s", "upload, import", S3)
    place.assert_made_once(place.ended(started), scene.imported)


@chaos
def test_a_full_bucket_refuses_chunks_and_takes_them_later(scene: Scene, faults: Faults) -> None:
    place, proxy = scene.place, scene.proxy
    upload, half = place.start_upload(), len(scene.data) // 2
    acknowledged = send(place.client.data, upload, scene.data, 0, half)
    proxy.fault = full()
    try:
        rest = chunks(upload, scene.data, acknowledged, len(scene.data))
        refusal = refused(lambda: place.client.data.UploadChunks(rest, timeout=60))
    finally:
        proxy.fault = NONE
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.reason == "STORE_FULL"
    faults.add("full bucket", "upload", S3)
    assert place.acknowledged(upload) == acknowledged
    send(place.client.data, upload, scene.data, acknowledged, len(scene.data))
    commit(place.client.data, upload, scene.data)
    place.assert_made_once(place.ended(place.start_import(upload)), scene.imported)
