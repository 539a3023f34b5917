"""Whatever a request holds, it is answered with a status that the protos name, and a refusal leaves nothing behind."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_status import rpc_status

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc
from shared.storage import ObjectStore, open_store
from tests.support.hostile_messages import hostile
from tests.support.refusals import refusal_of
from tests.support.service_process import running_service, store_environ
from tests.support.stores import S3_IN_CHAOS, new_store

PROTO = Path(__file__).parents[3] / "protos" / "millrace" / "data" / "v1" / "data_service.proto"
METHODS = list(pb.DESCRIPTOR.services_by_name["DataService"].methods)
CALLS_OF_EACH = 40


def documented(method: str) -> set[str]:
    """The statuses that the comment above a method names."""
    found = re.search(rf"((?:  //[^\n]*\n)+)  rpc {method}\(", PROTO.read_text())
    assert found
    immediate = found[1].split("The operation fails")[0]
    return set(re.findall(r"\b[A-Z]+_[A-Z_]+\b|\bABORTED\b", immediate)) | {"RESOURCE_EXHAUSTED"}


# Requests are refused before a store is asked.
@pytest.fixture(scope="module", params=S3_IN_CHAOS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, ObjectStore]]:
    """A service without Ray, with a dataset `d` and an upload `u` in it."""
    folder = tmp_path_factory.mktemp("hostile")
    settings = new_store(request, folder)
    with (
        running_service("data_service", {**store_environ(settings), "RAY_ADDRESS": ""}, folder / "log") as service,
        grpc.insecure_channel(service.address) as channel,
    ):
        stub: Any = data_service_pb2_grpc.DataServiceStub(channel)
        stub.CreateDataset(pb.CreateDatasetRequest(dataset_id="d"), timeout=60)
        stub.StartUpload(pb.StartUploadRequest(parent="datasets/d", upload_id="u"), timeout=60)
        yield stub, open_store(settings)
    assert "unexpected exception" not in (folder / "log").read_text()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_hostile_request_is_refused_by_a_documented_status_and_leaves_nothing(
    served: tuple[Any, ObjectStore], method: Any
) -> None:
    stub, store = served
    random_ = random.Random(method.name)
    for _ in range(CALLS_OF_EACH):
        request = hostile(getattr(pb, method.input_type.name)(), random_)
        before = keys_in(store)
        status = _status_of(stub, method, request)
        if status is not None:
            assert refusal_of(status).code.name in documented(method.name), request
            assert keys_in(store) <= before, request


def keys_in(store: ObjectStore) -> set[str]:
    """Without the index, which follows the jobs of the requests before in its own time."""
    return {info.key for info in store.list("") if not info.key.startswith("index/")}


def _status_of(stub: Any, method: Any, request: Any) -> Any:
    """With its details; None for a call that was not refused."""
    try:
        answer = getattr(stub, method.name)(iter([request]) if method.client_streaming else request, timeout=60)
        if method.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return rpc_status.from_call(cast(grpc.Call, error)) or pytest.fail(f"{method.name}: {error} has no details")
    return None
