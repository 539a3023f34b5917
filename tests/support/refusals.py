"""What a call is refused with, as it comes over the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


@dataclass(frozen=True)
class Refusal:
    """`fields` maps the bad fields to what is wrong with them."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)


def refused(call: Callable[[], Any]) -> Refusal:
    """Fail unless `call` is refused; a stream is read to its end."""
    with pytest.raises(grpc.RpcError) as raised:
        _exhaust(call())
    status = rpc_status.from_call(cast(grpc.Call, raised.value))
    assert status is not None, raised.value
    return refusal_of(status)


def _exhaust(answer: Any) -> None:
    if isinstance(answer, Iterable) and not isinstance(answer, bytes):
        list(answer)


def refusal_of(status: status_pb2.Status) -> Refusal:
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(bad)
    assert info.domain == "millrace", status
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    fields = {violation.field: violation.description for violation in bad.field_violations}
    return Refusal(code, status.message, info.reason, dict(info.metadata), fields)
