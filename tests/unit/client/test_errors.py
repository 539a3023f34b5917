"""Errors as they arrive over a real connection."""

from __future__ import annotations

import pickle
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from millrace.train.v1 import train_service_pb2_grpc
from millrace_client import connect, errors
from tests.support.fake_servicers import Refusing
from tests.support.grpc_answers import bad_field, error_info, serving, status
from tests.support.ports import free_ports


def refused(status: status_pb2.Status) -> tuple[errors.MillraceError, dict[str, Any]]:
    servicer = Refusing(status)
    with (
        serving(lambda server: train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)) as address,
        connect(train=address, reconnect_for_s=0) as millrace,
        pytest.raises(errors.MillraceError) as raised,
    ):
        millrace.train.get_training_job("trainingJobs/j")
    return raised.value, servicer.called_with


@pytest.mark.parametrize("kind", errors.KINDS.values(), ids=lambda kind: kind.__name__)
def test_each_status_becomes_its_own_kind_of_the_one_family(kind: type[errors.MillraceError]) -> None:
    error, _ = refused(status(grpc.StatusCode[kind.status], "no"))
    assert type(error) is kind
    assert error.message == "no"


def test_an_error_carries_reason_fields_and_the_request_id_that_the_server_was_sent() -> None:
    failure = status(
        grpc.StatusCode.INVALID_ARGUMENT,
        "spec.epochs: 0: use 1 to 10,000",
        error_info("INVALID_FIELD", field="spec.epochs"),
        bad_field("spec.epochs", "0: use 1 to 10,000"),
    )
    error, called_with = refused(failure)
    assert error.reason == "INVALID_FIELD"
    assert error.metadata == {"field": "spec.epochs"}
    assert error.field_violations == (errors.FieldViolation("spec.epochs", "0: use 1 to 10,000"),)
    assert error.request_id == called_with["x-request-id"]


def test_a_full_queue_says_when_to_try_again() -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
    error, _ = refused(status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", error_info("QUEUE_FULL"), retry))
    assert error.retry_after_s == 1.5


def test_a_fault_of_the_server_carries_its_correlation_id() -> None:
    error, _ = refused(
        status(grpc.StatusCode.INTERNAL, "internal error", error_info("INTERNAL", correlation_id="c0ffee"))
    )
    assert error.correlation_id == "c0ffee"


def test_nobody_at_the_address_is_unavailable_and_names_address_and_remedy() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with (
        connect(train=address, reconnect_for_s=0) as millrace,
        pytest.raises(errors.Unavailable, match=address) as raised,
    ):
        millrace.train.get_training_job("trainingJobs/j")
    assert "millrace up" in raised.value.remedy


def test_a_server_that_is_too_slow_is_a_deadline_exceeded() -> None:
    failure = status(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
    error, _ = refused(failure)
    assert isinstance(error, errors.DeadlineExceeded)


def test_errors_survive_pickling() -> None:
    failure = status(grpc.StatusCode.NOT_FOUND, "no such job", error_info("NOT_FOUND", resource="trainingJobs/j"))
    error = errors.from_status(failure, request_id="r1")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.NotFound
    assert copy.as_dict() == error.as_dict()
