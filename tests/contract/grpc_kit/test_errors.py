"""How domain errors arrive at a client: one status each, with machine-readable details and without internals."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest

from millrace.data.v1 import data_service_pb2, resources_pb2
from shared import errors
from shared.errors import KINDS, MillraceError, invalid_fields
from shared.grpc_errors import STATUS
from tests.support.grpc_kit import CallError, Kit, call_error, kit_server, raising, raising_after, with_kit

SECRET = "postgres://admin:hunter2@10.0.0.5/internal"

CODES = {
    "InvalidArgument": grpc.StatusCode.INVALID_ARGUMENT,
    "NotFound": grpc.StatusCode.NOT_FOUND,
    "AlreadyExists": grpc.StatusCode.ALREADY_EXISTS,
    "Conflict": grpc.StatusCode.ABORTED,
    "FailedPrecondition": grpc.StatusCode.FAILED_PRECONDITION,
    "OutOfRange": grpc.StatusCode.OUT_OF_RANGE,
    "DataLoss": grpc.StatusCode.DATA_LOSS,
    "ResourceExhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "Unavailable": grpc.StatusCode.UNAVAILABLE,
    "DeadlineExceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "Unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "Cancelled": grpc.StatusCode.CANCELLED,
    "Unimplemented": grpc.StatusCode.UNIMPLEMENTED,
    "Internal": grpc.StatusCode.INTERNAL,
}


def unary_error(error: Exception) -> CallError:
    async def scenario(kit: Kit) -> CallError:
        return await call_error(kit.get())

    return with_kit(scenario, unary=raising(error))


def stream_error(error: Exception, after: int = 2) -> CallError:
    async def scenario(kit: Kit) -> CallError:
        call = kit.read()
        for _ in range(after):
            assert (await call.read()).arrow_ipc == b"x"
        return await call_error(call.read())

    return with_kit(scenario, stream=raising_after(after, error))


def test_every_kind_of_error_is_in_the_table() -> None:
    assert set(KINDS) == set(CODES)
    assert set(STATUS) == set(KINDS.values())


async def test_every_kind_of_error_arrives_with_its_status_reason_and_metadata() -> None:
    made = [
        kind(f"{name} happened", reason=f"{name.upper()}_REASON", metadata={"resource": f"datasets/{name}"})
        for name, kind in KINDS.items()
    ]

    async def unary(request: Any, _: Any) -> Any:
        raise made[int(request.name)]

    async with kit_server(unary=unary) as kit:
        found = [await call_error(kit.get(str(number))) for number in range(len(made))]
    for name, answer in zip(KINDS, found, strict=True):
        assert answer.code is CODES[name]
        assert answer.message == f"{name} happened"
        assert (answer.info.domain, answer.info.reason) == ("millrace", f"{name.upper()}_REASON")
        assert dict(answer.info.metadata) == {"resource": f"datasets/{name}"}
        assert answer.violations == []
        assert answer.retry_after_s is None


def test_a_kind_of_its_own_takes_the_status_of_its_base() -> None:
    class TooOld(errors.FailedPrecondition):
        reason = "TOO_OLD"

    answer = unary_error(TooOld("the client is too old"))

    assert (answer.code, answer.info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOO_OLD")


def test_each_bad_field_is_a_violation() -> None:
    answer = unary_error(invalid_fields([("page_size", -1, "use 0 to 1000"), ("name", "Ä", "use a-z")]))

    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.violations == [("page_size", "-1: use 0 to 1000"), ("name", "'Ä': use a-z")]
    assert answer.message == "page_size: -1: use 0 to 1000; name: 'Ä': use a-z"


def test_when_to_come_again_is_said() -> None:
    assert unary_error(errors.ResourceExhausted("the queue is full", retry_after_s=0.25)).retry_after_s == 0.25


@pytest.mark.parametrize("tell", [unary_error, stream_error], ids=["unary", "stream"])
def test_an_unexpected_exception_shows_a_correlation_id_and_nothing_else(
    tell: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        answer = tell(RuntimeError(f"cannot reach {SECRET}"))

    assert answer.code is grpc.StatusCode.INTERNAL
    correlation_id = answer.info.metadata["correlation_id"]
    assert correlation_id in answer.message
    assert "hunter2" not in answer.message
    assert all("hunter2" not in str(value) for value in answer.trailers.values())
    assert "RuntimeError" not in answer.message + str(answer.trailers)
    # The operator finds both in the log.
    assert correlation_id in caplog.text
    assert SECRET in caplog.text


def test_a_timeout_inside_the_domain_is_not_taken_for_the_callers_deadline() -> None:
    answer = unary_error(TimeoutError(f"connecting to {SECRET}"))

    assert answer.code is grpc.StatusCode.INTERNAL
    assert "hunter2" not in answer.message


def test_an_error_in_a_stream_comes_after_what_was_sent() -> None:
    answer = stream_error(errors.DataLoss("a block is damaged", metadata={"file": "f1"}))

    assert answer.code is grpc.StatusCode.DATA_LOSS
    assert dict(answer.info.metadata) == {"file": "f1"}


def test_an_error_before_the_first_message_of_a_stream_arrives_too() -> None:
    assert stream_error(errors.NotFound("no such version"), after=0).code is grpc.StatusCode.NOT_FOUND


HUGE = [
    errors.NotFound("x" * 10_000),
    errors.NotFound("数" * 10_000),
    errors.NotFound("\n\0\x7f" * 3_000),
    errors.NotFound("short", metadata={"resource": "y" * 10_000}),
    errors.NotFound("short", metadata={f"key{number}": "z" * 100 for number in range(500)}),
    invalid_fields([(f"spec.fields[{number}]", "v" * 500, "use less") for number in range(300)]),
    invalid_fields([("f" * 10_000, "v", "use less")]),
]


async def test_however_long_an_error_is_it_arrives_with_its_status_and_reason() -> None:
    async def unary(request: Any, _: Any) -> Any:
        raise HUGE[int(request.name)]

    async with kit_server(unary=unary) as kit:
        found = [await call_error(kit.get(str(number))) for number in range(len(HUGE))]
    for error, answer in zip(HUGE, found, strict=True):
        assert answer.code is STATUS[type(error)], answer.message[:200]
        assert answer.info.reason == error.specific_reason
        assert answer.message[:5] == error.message[:5]
        if error.fields:
            assert answer.violations
            assert answer.violations[0][0][:20] == error.fields[0][0][:20]


@pytest.mark.parametrize("error", [KINDS["NotFound"]("gone"), ValueError("odd")], ids=["expected", "unexpected"])
async def test_the_server_goes_on_after_an_error(error: Exception) -> None:
    async def unary(request: Any, _: Any) -> Any:
        if request.name == "bad":
            raise error
        return resources_pb2.Dataset(name=request.name)

    async with kit_server(unary=unary) as kit:
        await call_error(kit.get("bad"))
        answer = await kit.get("good")
        found = str(answer.name)
    assert found == "good"


def test_a_method_that_nobody_wrote_is_unimplemented() -> None:
    async def scenario(kit: Kit) -> list[CallError]:
        unknown = kit.raw.unary_unary("/millrace.data.v1.DataService/NoSuchMethod")
        return [
            await call_error(kit.data.ListDatasets(data_service_pb2.ListDatasetsRequest())),
            await call_error(unknown(b"")),
        ]

    unwritten, unknown = with_kit(scenario)

    assert unwritten.code is unknown.code is grpc.StatusCode.UNIMPLEMENTED
    assert unwritten.info.domain == "millrace"


def test_only_millrace_errors_are_meant_for_callers() -> None:
    assert all(issubclass(kind, MillraceError) for kind in STATUS)
