"""Custom functions that raise, hang or crash on a row: the job fails, says which, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from google.rpc import code_pb2

from millrace.data.v1.resources_pb2 import DatasetVersion
from tests.support.chunk_sender import commit, send
from tests.support.custom_functions import POISON
from tests.support.data_place import DataPlace, data_place, normalising
from tests.support.faults import Faults
from tests.support.ray_head import RayHead
from tests.support.refusals import refusal_of
from tests.support.stores import KINDS, STORES, new_store

ROWS, POISONED_ROW = 3_000, 1_234
TIMEOUT_S = 3.0


@dataclass
class Scene:
    place: DataPlace
    store: str
    # Its row `POISONED_ROW` is poison.
    source: str


@pytest.fixture(scope="module", params=KINDS)
def scene(
    request: pytest.FixtureRequest, data_head: RayHead, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("poison")
    labels = np.zeros(ROWS, np.int64)
    labels[POISONED_ROW] = POISON
    table = pa.table({"label": labels})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = bytes(sink.getvalue())
    with data_place(new_store(request, folder), data_head, folder / "service") as place:
        upload = place.start_upload()
        send(place.client.data, upload, data, 0, len(data))
        commit(place.client.data, upload, data)
        yield Scene(place, STORES[request.param], place.imported(upload).name)


@pytest.mark.chaos  # tests/integration/data_service/test_transforming.py has the same without the service
@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("raising", code_pb2.INVALID_ARGUMENT, ["raised ValueError: thirteen is unlucky", str(POISONED_ROW)]),
        ("hanging", code_pb2.INVALID_ARGUMENT, [f"took longer than {TIMEOUT_S:g} s"]),
        ("crashing", code_pb2.FAILED_PRECONDITION, ["a custom function crashes"]),
    ],
    ids=["raising", "hanging", "crashing"],
)
def test_a_poisonous_function_fails_its_job_alone(
    scene: Scene, faults: Faults, function: str, code: int, said: list[str]
) -> None:
    place = scene.place
    started = place.start_transform(scene.source, normalising(function, timeout_s=TIMEOUT_S, images=False))
    faults.add(f"{function} function", "transform", scene.store)
    done = place.ended(started)
    refusal = refusal_of(done.error)
    assert done.error.code == code, done.error
    for words in [*said, "custom_functions" if function != "crashing" else "rows"]:
        assert words in refusal.message
    version = place.version_of(started)
    assert place.get(version).state == DatasetVersion.STATE_FAILED
    assert list(place.store.list(f"{version}/data")) == []
