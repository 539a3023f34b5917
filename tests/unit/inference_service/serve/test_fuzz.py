"""Requests of all kinds that nobody thought of, for a bounded time: `make fuzz` tries for longer.

MILLRACE_FUZZ_SECONDS says how long, MILLRACE_FUZZ_SEED which messages; what fails names its seed and its number.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import cast

import grpc
import pytest
from grpc import aio
from grpc_status import rpc_status

from inference import grpc_service_pb2 as oip
from shared.grpc_errors import STATUS
from tests.support.cpu_time import slowdown
from tests.support.grpc_kit import everything
from tests.support.hostile_messages import hostile
from tests.support.inference_server import Server, served
from tests.support.mutated_requests import flipped, mutated
from tests.support.prepared_models import any_rows, attach_prepared
from tests.support.refusals import refusal_of
from tests.support.table_model import TABLE, Zeros, request, still_serves

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
SECONDS = float(os.environ.get("MILLRACE_FUZZ_SECONDS") or 4)
SEED = os.environ.get("MILLRACE_FUZZ_SEED") or "0"
# So many at least, however slow the machine is.
MIN = 300
DOCUMENTED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED"}
STATUSES = {code.name for code in STATUS.values()}
# What tensors and outputs are called in what was a good request.
NAMES = ("text", "age", "grid", "x", "text.null", "age.null", "small.null", "y")
OUTPUTS = ("logits", "label", "y")
IN_A_STREAM = 8
TOGETHER = 3
# Some fields are repeated so often; no message may keep this process busy for longer than that.
FLOOD = (5000, 300_000)
BUSY_S = 2.5
TIMEOUT_S = 30.0

Send = Callable[[Server, random.Random], Awaitable[list[str]]]


async def outcome(answer: Awaitable[object]) -> str:
    """The status. Fails where a refusal does not say what it refuses."""
    try:
        await answer
    except aio.AioRpcError as error:
        refused = error
    else:
        return "OK"
    if refused.code() is grpc.StatusCode.INVALID_ARGUMENT:
        status = rpc_status.from_call(cast(grpc.Call, refused))
        assert status is not None, refused
        refusal = refusal_of(status)
        assert refusal.fields or refusal.reason == "MALFORMED_MESSAGE", refusal
    return refused.code().name


def was_good(random_: random.Random) -> oip.ModelInferRequest:
    return mutated(request(), NAMES, OUTPUTS, random_)


def anything(random_: random.Random, flood: Sequence[int] = FLOOD) -> oip.ModelInferRequest:
    made: oip.ModelInferRequest = hostile(oip.ModelInferRequest(), random_, flood=flood)
    if random_.random() < 0.9:
        made.model_name = "t"
    return made


async def send_one_that_was_good(server: Server, random_: random.Random) -> list[str]:
    return [await outcome(server.stub.ModelInfer(was_good(random_), timeout=TIMEOUT_S))]


async def send_anything(server: Server, random_: random.Random) -> list[str]:
    return [await outcome(server.stub.ModelInfer(anything(random_), timeout=TIMEOUT_S))]


async def send_bytes(server: Server, random_: random.Random) -> list[str]:
    data = flipped(request().SerializeToString(), random_)
    return [await outcome(server.kit.raw.unary_unary(INFER)(data, timeout=TIMEOUT_S))]


async def send_a_stream(server: Server, random_: random.Random) -> list[str]:
    # Not so much of anything that the message is not even parsed: that ends a stream.
    requests = [
        was_good(random_) if random_.random() < 0.5 else anything(random_, FLOOD[:1]) for _ in range(IN_A_STREAM)
    ]
    answers = await everything(server.stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S))
    assert [answer.infer_response.id for answer in answers] == [one.id for one in requests]
    return [answer.error_message.partition(":")[0] or "OK" for answer in answers]


async def send_a_stream_of_bytes(server: Server, random_: random.Random) -> list[str]:
    """That of the whole stream: bytes that are no message end it."""
    good = request().SerializeToString()
    stream = server.kit.raw.stream_stream(STREAM)(iter([good, flipped(good, random_), good]), timeout=TIMEOUT_S)
    return [await outcome(everything(stream))]


async def send_any_rows(server: Server, random_: random.Random) -> list[str]:
    """Several requests, so that some share a batch."""
    requests = [any_rows(random_) for _ in range(TOGETHER)]
    return list(await asyncio.gather(*(outcome(server.stub.ModelInfer(one, timeout=TIMEOUT_S)) for one in requests)))


KINDS: dict[str, tuple[Send, int]] = {
    "was good": (send_one_that_was_good, 4),
    "anything": (send_anything, 4),
    "bytes": (send_bytes, 2),
    "in a stream": (send_a_stream, 1),
    "bytes in a stream": (send_a_stream_of_bytes, 1),
    "any rows": (send_any_rows, 3),
}


@pytest.fixture(autouse=True)
def no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield
    assert "unexpected exception" not in caplog.text
    assert "a request of a stream failed" not in caplog.text


@pytest.mark.timed
@pytest.mark.filterwarnings("ignore:::PIL")  # of broken images
@pytest.mark.timeout(SECONDS + 300)
def test_whatever_is_sent_is_answered_or_refused_as_documented(record_property: Callable[[str, object], None]) -> None:
    seen: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}

    async def scenario(server: Server) -> None:
        attach_prepared(server)
        until_s, number = time.monotonic() + SECONDS, 0
        while time.monotonic() < until_s or number < MIN:
            number += 1
            random_ = random.Random(f"{SEED}/{number}")
            (kind,) = random_.choices(list(KINDS), [weight for _, weight in KINDS.values()])
            what = f"message {number} of seed {SEED}, {kind}"
            began_s = time.process_time()
            try:
                statuses = await KINDS[kind][0](server, random_)
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error
            busy_s = time.process_time() - began_s
            assert busy_s < BUSY_S or busy_s < BUSY_S * slowdown(), f"{what}: {busy_s:.1f} s"
            assert set(statuses) <= DOCUMENTED, f"{what}: {statuses}"
            seen[kind].update(statuses)
        await still_serves(server)

    served(scenario, TABLE, model=Zeros(), timeout_s=SECONDS + 240)
    total = sum(seen.values(), Counter[str]())
    by_kind = "; ".join(f"{kind}: {counts.total():,}" for kind, counts in seen.items())
    assert {"OK", "INVALID_ARGUMENT"} == seen["any rows"].keys()
    record_property("counted", f"fuzz: {total.total():,} messages of seed {SEED} ({by_kind}): {dict(total)}")
    assert {"OK", "INVALID_ARGUMENT"} <= total.keys()
    assert total.keys() <= STATUSES | {"OK"}
