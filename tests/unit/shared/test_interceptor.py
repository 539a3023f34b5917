"""A stream whose client takes nothing ends."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shared.errors import DeadlineExceeded
from shared.grpc_server import interceptor


class TakesNothing:
    async def write(self, _: Any) -> None:
        await asyncio.Event().wait()


def test_a_client_that_takes_no_message_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "SEND_WITHIN_S", 0.02)

    with pytest.raises(DeadlineExceeded, match="took no message"):
        asyncio.run(interceptor._send(cast(Any, TakesNothing()), b"message"))
