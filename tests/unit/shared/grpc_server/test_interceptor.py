"""A stream whose client takes nothing ends; a call that its deadline ends is logged and traced as that."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from shared.errors import DeadlineExceeded
from shared.grpc_server import interceptor
from shared.grpc_server.interceptor import is_deadline


class TakesNothing:
    async def write(self, _: Any) -> None:
        await asyncio.Event().wait()


def test_a_client_that_takes_no_message_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "SEND_TIMEOUT_S", 0.02)

    with pytest.raises(DeadlineExceeded, match="took no message"):
        asyncio.run(interceptor._send(cast(Any, TakesNothing()), b"message"))


class Call:
    """The context of a call with so many seconds left."""

    def __init__(self, remaining_s: float | None) -> None:
        self._until_s = None if remaining_s is None else time.monotonic() + remaining_s

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else max(self._until_s - time.monotonic(), 0.0)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, _: Any) -> None: ...


@pytest.mark.parametrize(
    ("remaining_s", "outcome"),
    # gRPC's timer comes a moment before the deadline; the client gives up long before it; it has none.
    [(0.004, "DEADLINE_EXCEEDED"), (60.0, "CANCELLED"), (None, "CANCELLED")],
)
async def test_a_call_that_is_cancelled_a_moment_before_its_deadline_is_late(
    remaining_s: float | None, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(interceptor, "log_outcome", lambda _, __, ended, *___: logged.append(ended))

    with pytest.raises(asyncio.CancelledError):
        async with interceptor._call(cast(Any, Call(remaining_s)), "/a.B/C", aborts=True):
            raise asyncio.CancelledError
    assert logged == [outcome]


@pytest.mark.parametrize(
    ("remaining_s", "passed_s", "late"),
    [
        (1.0, 1.2, True),
        (1.0, 0.996, True),
        (1.0, 0.93, True),  # the request was slow on its way, the cancellation was not
        (1.0, 0.85, False),
        (1.01, 1.0, True),  # 1.001 s, as gRPC rounds it
        (0.2, 0.17, False),
        (600.0, 545.0, False),
        (600.0, 593.0, False),
        (101.0, 100.01, True),  # 100.01 s, as gRPC rounds it
        (0.0, 0.0, True),
        (None, 100.0, False),
    ],
)
def test_a_call_that_is_cancelled_in_the_last_part_of_its_time_has_met_its_deadline(
    remaining_s: float | None, passed_s: float, late: bool
) -> None:
    assert is_deadline(remaining_s, passed_s) is late
