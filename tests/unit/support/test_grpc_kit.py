"""A server of the kit is the test's own, or there is none."""

from __future__ import annotations

import pytest

from tests.support import grpc_kit
from tests.support.grpc_kit import kit_server


async def test_where_another_has_taken_the_port_meanwhile_no_call_reaches_that_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends with its own test, and all calls with it: CANCELLED, "Cancelling all calls"."""
    async with kit_server() as stranger:
        port = int(stranger.address.rpartition(":")[2])
        monkeypatch.setattr(grpc_kit, "free_ports", lambda _: [port])
        with pytest.raises(RuntimeError, match=str(port)):
            async with kit_server():
                pytest.fail("a server that another test has started answers")
