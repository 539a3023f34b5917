"""A server asks core for many calls at a time, and ends cleanly whichever way it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import grpc
import pytest

from shared.grpc_server import concurrent_accepts
from shared.grpc_server.concurrent_accepts import concurrent_server
from tests.support.grpc_kit import Kit, with_kit

# A server under load that is stopped, cancelled while it stops, or left to the end of its event loop; and the garbage
# collector afterwards. Core would crash the process if it wrote to memory that was freed.
ENDS = """
import asyncio, gc, sys

import grpc
from grpc import aio

from shared.grpc_server.concurrent_accepts import concurrent_server


class Answers(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(answer)


async def answer(request, context):
    global answered
    answered += 1
    return request


async def scenario(end):
    server = concurrent_server([("grpc.so_reuseport", 0)], 1000)
    server.add_generic_rpc_handlers([Answers()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=own) as channel:
        method = channel.unary_unary("/test.Answers/Answer")

        async def call_again_and_again():
            while True:
                await method(b"x", timeout=60)

        calls = [asyncio.ensure_future(call_again_and_again()) for _ in range(100)]
        enough = answered + 300
        while answered < enough:
            await asyncio.sleep(0)
        if end == "stop":
            await server.stop(0)
        elif end == "cancel":
            stopping = asyncio.ensure_future(server.stop(None))
            await asyncio.sleep(0)
            stopping.cancel()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


answered = 0
for _ in range(3):
    asyncio.run(scenario(sys.argv[1]))
    gc.collect()
print("ended well")
"""


def test_a_server_keeps_requests_for_many_calls_outstanding_until_it_stops() -> None:
    async def scenario(kit: Kit) -> int:
        await kit.get("one")
        return len(concurrent_accepts._OUTSTANDING)

    before = len(concurrent_accepts._OUTSTANDING)
    while_serving = with_kit(scenario)

    assert while_serving - before >= concurrent_accepts.ACCEPTS - 1
    assert len(concurrent_accepts._OUTSTANDING) == before


def test_each_of_many_calls_at_once_is_answered_once() -> None:
    async def scenario(kit: Kit) -> Counter[str]:
        answers = await asyncio.gather(*(kit.get(str(number), timeout=120) for number in range(1000)))
        return Counter(answer.name for answer in answers)

    assert with_kit(scenario) == Counter(str(number) for number in range(1000))


@pytest.mark.parametrize("end", ["stop", "cancel", "leave"])
def test_no_end_of_a_busy_server_crashes_its_process(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, end], capture_output=True, text=True, timeout=300)

    assert (done.returncode, done.stdout) == (0, "ended well\n"), done.stderr


async def test_a_stop_does_not_wait_for_calls_that_the_server_has_not_begun() -> None:
    """Core has handed them out, and the main loop ends before it takes them."""

    async def answer(request: bytes, _: Any) -> bytes:
        return request

    class Answers(grpc.GenericRpcHandler):
        def service(self, _: grpc.HandlerCallDetails) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = concurrent_server([("grpc.so_reuseport", 0)], 1000)
    server.add_generic_rpc_handlers([Answers()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=own) as channel:
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Answers/Answer")
        await asyncio.to_thread(method, b"x", timeout=60)
        calls = [method.future(b"x", timeout=300) for _ in range(40)]
        # The event loop stands still while core takes them. A call that comes later is refused, which is as good.
        time.sleep(0.5)  # noqa: ASYNC251
        await asyncio.wait_for(server.stop(120), 60)
        codes = await asyncio.to_thread(lambda: [call.code() for call in calls])
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
