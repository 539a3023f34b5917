from __future__ import annotations

import uuid
from functools import partial

import grpc
import pytest

from millrace.data.v1 import data_service_pb2 as pb
from tests.integration.data_service.client import DataClient
from tests.integration.data_service.conftest import DataStack
from tests.support.refusals import refused


def new_id() -> str:
    return f"d{uuid.uuid4().hex[:12]}"


def test_a_dataset_is_got_as_it_was_created(client: DataClient) -> None:
    request = pb.CreateDatasetRequest(dataset_id=new_id(), display_name="Digits", description="0 to 9")
    created = client.data.CreateDataset(request, timeout=60)
    assert created.name == f"datasets/{request.dataset_id}"
    assert (created.display_name, created.description) == ("Digits", "0 to 9")
    assert created.uid
    assert created.etag
    assert created.create_time.seconds > 0
    assert client.data.GetDataset(pb.GetDatasetRequest(name=created.name), timeout=60) == created


def test_the_same_request_gets_the_first_answer(client: DataClient) -> None:
    request = pb.CreateDatasetRequest(dataset_id=new_id(), request_id=str(uuid.uuid4()))
    assert client.data.CreateDataset(request, timeout=60) == client.data.CreateDataset(request, timeout=60)


def test_the_same_request_id_with_another_body_is_refused(client: DataClient, stack: DataStack) -> None:
    request = pb.CreateDatasetRequest(dataset_id=new_id(), request_id=str(uuid.uuid4()))
    client.data.CreateDataset(request, timeout=60)
    before = stack.stored_keys()
    request.dataset_id = new_id()
    refusal = refused(lambda: client.data.CreateDataset(request, timeout=60))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    assert "request_id" in refusal.fields
    assert stack.made_since(before) == []


def test_a_taken_id_is_refused_and_nothing_is_claimed(client: DataClient, stack: DataStack, dataset: str) -> None:
    before = stack.stored_keys()
    request = pb.CreateDatasetRequest(dataset_id=dataset.removeprefix("datasets/"), request_id=str(uuid.uuid4()))
    refusal = refused(lambda: client.data.CreateDataset(request, timeout=60))
    assert refusal.code is grpc.StatusCode.ALREADY_EXISTS
    assert refusal.metadata["resource"] == dataset
    assert stack.made_since(before) == []


def test_validating_makes_nothing(client: DataClient, stack: DataStack, dataset: str) -> None:
    before = stack.stored_keys()
    request = pb.CreateDatasetRequest(dataset_id=new_id(), validate_only=True, request_id=str(uuid.uuid4()))
    checked = client.data.CreateDataset(request, timeout=60)
    assert checked.name == f"datasets/{request.dataset_id}"
    assert not checked.uid
    request.dataset_id = dataset.removeprefix("datasets/")
    assert refused(lambda: client.data.CreateDataset(request, timeout=60)).code is grpc.StatusCode.ALREADY_EXISTS
    assert stack.made_since(before) == []


def test_pages_hold_every_dataset_once_in_the_order_of_names(client: DataClient, stack: DataStack) -> None:
    made = {stack.new_dataset() for _ in range(5)}
    names, token = [], ""
    while True:
        page = client.data.ListDatasets(pb.ListDatasetsRequest(page_size=2, page_token=token), timeout=60)
        assert len(page.datasets) <= 2
        names += [dataset.name for dataset in page.datasets]
        if not (token := page.next_page_token):
            break
    assert names == sorted(set(names))
    assert made <= set(names)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (pb.CreateDatasetRequest(), {"dataset_id"}),
        (pb.CreateDatasetRequest(dataset_id="Digits"), {"dataset_id"}),
        (pb.CreateDatasetRequest(dataset_id="a" * 64), {"dataset_id"}),
        (pb.CreateDatasetRequest(dataset_id="../d", display_name="x" * 64), {"dataset_id", "display_name"}),
        (pb.CreateDatasetRequest(dataset_id="d", description="x" * 4097), {"description"}),
        (pb.CreateDatasetRequest(dataset_id="d", request_id="not-a-uuid"), {"request_id"}),
        (pb.CreateDatasetRequest(dataset_id="d", request_id=str(uuid.uuid1())), {"request_id"}),
    ],
)
def test_bad_fields_are_named_and_nothing_is_made(
    client: DataClient, stack: DataStack, request_: pb.CreateDatasetRequest, fields: set[str]
) -> None:
    before = stack.stored_keys()
    refusal = refused(lambda: client.data.CreateDataset(request_, timeout=60))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert set(refusal.fields) == fields
    assert stack.made_since(before) == []


@pytest.mark.parametrize("name", ["", "d", "datasets/", "datasets/D", "datasets/a/b", "datasets/..", "x" * 5000])
def test_a_malformed_name_is_refused(client: DataClient, name: str) -> None:
    refusal = refused(lambda: client.data.GetDataset(pb.GetDatasetRequest(name=name), timeout=60))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert set(refusal.fields) == {"name"}


def test_an_unknown_dataset_is_not_found(client: DataClient) -> None:
    refusal = refused(lambda: client.data.GetDataset(pb.GetDatasetRequest(name="datasets/never"), timeout=60))
    assert (refusal.code, refusal.metadata) == (grpc.StatusCode.NOT_FOUND, {"resource": "datasets/never"})


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ListDatasetsRequest(page_size=-1), "page_size"),
        (pb.ListDatasetsRequest(page_size=1001), "page_size"),
        (pb.ListDatasetsRequest(page_token="§"), "page_token"),
    ],
)
def test_a_bad_page_is_refused(client: DataClient, request_: pb.ListDatasetsRequest, field: str) -> None:
    refusal = refused(lambda: client.data.ListDatasets(request_, timeout=60))
    assert (refusal.code, set(refusal.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, {field})


def test_malformed_bytes_are_refused_by_every_method(client: DataClient, stack: DataStack) -> None:
    before = stack.stored_keys()
    methods = pb.DESCRIPTOR.services_by_name["DataService"].methods
    for method in methods:
        if not method.server_streaming:
            refusal = refused(partial(client.send_raw, method.name, b"\xff\xff\xff"))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert stack.made_since(before) == []
