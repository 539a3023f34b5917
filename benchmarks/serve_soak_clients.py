"""The clients of the soak: well-behaved ones, and those whose requests a server must not retain.

Each kind has its own connection, and pauses only if it would slow the others down.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
from grpc import aio

from benchmarks.serve_load import MODEL, images
from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc as pb_grpc
from millrace_client.inference import infer_request
from tests.support.mutated_requests import flipped, mutated

# Statuses by kind: gRPC's names, or `LEFT`.
Counted = dict[str, Counter[str]]

LEFT = "LEFT"
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
METHOD = "/inference.GRPCInferenceService/ModelInfer"
# A good request has ample time, even with the other load.
MIN_TIME_LEFT_S = 30.0
IN_A_STREAM = 16
STREAMS_LEFT, ASKING_OF_THEM = 1000, 100
OVERSIZED_BYTES = 65 * 2**20
NAMES, OUTPUTS = ("image", "picture", "image.null"), ("logits", "label", "y")

# The allowed statuses of each kind. A cancelled or late request may just have been answered, and a malformed one may
# still be valid. If the frontend has no time to spare, it refuses requests with milliseconds left unread: OVERLOADED.
EXPECTED = {
    "unary": {"OK"},
    "stream": {"OK"},
    "malformed": {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED"},
    "cancelled": {"OK", "CANCELLED"},
    "late": {"OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"},
    "oversized": {"RESOURCE_EXHAUSTED"},
    "flood": {"RESOURCE_EXHAUSTED"},
    "left": {LEFT},
}


def soak(address: str, seconds: float, seed: int) -> Counted:
    """Run the clients for `seconds`; each call is followed to its end."""
    return asyncio.run(_soak(address, seconds, seed))


async def _soak(address: str, seconds: float, seed: int) -> Counted:
    counted: Counted = {kind: Counter() for kind in EXPECTED}
    until_s = time.monotonic() + seconds

    async def again_and_again(number: int, kind: str, ask: Ask, pause_s: float) -> None:
        random_ = random.Random(f"{seed}/{number}")
        async with _channel(address) as channel:
            while time.monotonic() < until_s:
                counted[kind].update(await ask(address, channel, random_))
                await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as tasks:
        number = 0
        for kind, (ask, clients, pause_s) in KINDS.items():
            for _ in range(clients):
                number += 1
                tasks.create_task(again_and_again(number, kind, ask, pause_s))
    return counted


@asynccontextmanager
async def _channel(address: str) -> AsyncIterator[aio.Channel]:
    async with aio.insecure_channel(address, options=OPTIONS) as channel:
        await channel.channel_ready()
        yield channel


async def _unary(_: str, channel: aio.Channel, random_: random.Random) -> list[str]:
    return [await _status(_stub(channel).ModelInfer(_good(random_), timeout=MIN_TIME_LEFT_S))]


async def _stream(_: str, channel: aio.Channel, random_: random.Random) -> list[str]:
    stream = _stub(channel).ModelStreamInfer(
        iter([_good(random_) for _ in range(IN_A_STREAM)]), timeout=MIN_TIME_LEFT_S
    )
    seen: list[str] = []

    async def take() -> None:
        async for answer in stream:
            seen.append(answer.error_message.partition(":")[0] or "OK")  # noqa: PERF401 - kept where it raises

    status = await _status(take())
    missing = IN_A_STREAM - len(seen)
    return [*seen, *([status if status != "OK" else "MISSING"] * missing)]


async def _malformed(_: str, channel: aio.Channel, random_: random.Random) -> list[str]:
    if random_.random() < 0.5:
        bad = mutated(_good(random_), NAMES, OUTPUTS, random_).SerializeToString()
    else:
        bad = flipped(_good(random_).SerializeToString(), random_)
    return [await _status(_raw(channel)(bad, timeout=MIN_TIME_LEFT_S))]


async def _cancelled(_: str, channel: aio.Channel, random_: random.Random) -> list[str]:
    call: Any
    if random_.random() < 0.5:
        call = _stub(channel).ModelInfer(_good(random_), timeout=MIN_TIME_LEFT_S)
    else:
        call = _stub(channel).ModelStreamInfer(timeout=MIN_TIME_LEFT_S)
        await call.write(_good(random_))
    await asyncio.sleep(random_.uniform(0.0, 0.05))
    call.cancel()
    code: grpc.StatusCode = await call.code()
    return [code.name]


async def _late(_: str, channel: aio.Channel, random_: random.Random) -> list[str]:
    return [await _status(_stub(channel).ModelInfer(_good(random_), timeout=random_.uniform(0.0005, 0.02)))]


async def _oversized(_: str, channel: aio.Channel, __: random.Random) -> list[str]:
    return [await _status(_raw(channel)(b"\0" * OVERSIZED_BYTES, timeout=MIN_TIME_LEFT_S))]


async def _flood(_: str, channel: aio.Channel, random_: random.Random) -> list[str]:
    metadata = tuple((f"x-{number}", "y" * 1000) for number in range(200))
    return [await _status(_stub(channel).ModelInfer(_good(random_), timeout=MIN_TIME_LEFT_S, metadata=metadata))]


async def _left(address: str, _: aio.Channel, random_: random.Random) -> list[str]:
    """Open streams over another connection, send requests on some of them, and disconnect abruptly."""
    async with _channel(address) as channel:
        streams = [_stub(channel).ModelStreamInfer() for _ in range(STREAMS_LEFT)]
        asking = streams[-ASKING_OF_THEM:]
        for stream in asking:
            await stream.write(_good(random_))
        # The last stream's answer shows that the server has seen them all; the others are still waiting.
        await asking[-1].read()
    return [LEFT] * STREAMS_LEFT


Ask = Callable[[str, aio.Channel, random.Random], Awaitable[list[str]]]

# The client function, the number of such clients, and the pause of each in seconds.
KINDS: dict[str, tuple[Ask, int, float]] = {
    "unary": (_unary, 8, 0.0),
    "stream": (_stream, 2, 0.0),
    "malformed": (_malformed, 2, 0.005),
    "cancelled": (_cancelled, 4, 0.0),
    "late": (_late, 4, 0.01),
    "oversized": (_oversized, 1, 2.0),
    "flood": (_flood, 1, 0.1),
    "left": (_left, 1, 2.0),
}


async def _status(answer: Awaitable[Any]) -> str:
    try:
        await answer
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"


def _stub(channel: aio.Channel) -> Any:
    return pb_grpc.GRPCInferenceServiceStub(channel)


def _raw(channel: Any) -> Any:
    """Return a call for messages given as bytes, which the stub's types do not allow."""
    return channel.unary_unary(METHOD)


def _good(random_: random.Random) -> pb.ModelInferRequest:
    """Return a request of one to four images."""
    first, count = random_.randrange(len(IMAGES) - 4), random_.randint(1, 4)
    return infer_request(MODEL, {"image": np.ascontiguousarray(IMAGES[first : first + count])})


IMAGES = images(64)
