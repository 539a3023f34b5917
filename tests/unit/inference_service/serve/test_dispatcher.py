"""What becomes of rows that are asked for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from inference_service.domain.signature import RequestedOutput, WireTensor
from inference_service.serve.infer import Dispatcher, InFlightBytes
from inference_service.serve.models import Models
from shared.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from tests.unit.inference_service.doubling import READY, attach, tensor


async def test_a_request_larger_than_a_batch_is_answered_whole() -> None:
    models = Models()
    dispatcher = Dispatcher(models)
    models.replace([READY])
    attach(models)
    values = np.arange(9, dtype=np.uint8)
    asked = [RequestedOutput("double")]
    answer = await dispatcher.infer(*models.choose("m", "1"), [tensor(*values.tolist())], asked, 240.0)
    assert answer.outputs[0][1].tolist() == (values * 2).tolist()


async def test_requests_of_all_models_are_bounded_in_bytes_and_one_alone_always_has_room() -> None:
    other = replace(READY, name="deployments/n", uid="other")

    models = Models()
    dispatcher = Dispatcher(models, InFlightBytes(3))
    models.replace([READY, other])
    doubler = attach(models)
    attach(models, other)
    doubler.has_replica.clear()
    large = asyncio.create_task(dispatcher.infer(*models.choose("m", ""), [tensor(1, 2, 3, 4)], [], 240.0))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="requests of 4 bytes wait already") as refused:
        await dispatcher.infer(*models.choose("n", ""), [tensor(1)], [], 240.0)
    assert refused.value.retry_after_s is not None
    assert models.batcher(other, other.versions[0]).load().refused == 0, "its replicas are not what is short"
    assert models.batcher(READY, READY.versions[0]).load().rows > 0, "these rows scale the model that they wait for"
    large.cancel()  # its bytes are free again, as those of one that is answered
    await asyncio.wait([large])
    doubler.has_replica.set()
    for name in ("m", "n", "m"):
        await dispatcher.infer(*models.choose(name, ""), [tensor(1, 2, 3)], [], 240.0)


async def test_calls_that_this_process_was_too_busy_to_read_scale_no_model() -> None:
    models = Models()
    dispatcher = Dispatcher(models)
    models.replace([READY])
    attach(models)
    await dispatcher.infer(*models.choose("m", ""), [tensor(1)], [], 240.0)
    for _ in range(5):
        dispatcher.turned_away()
    assert models.batcher(READY, READY.versions[0]).load().refused == 0


class Unreadable(bytes):
    """Content that nobody is to look at."""

    def __len__(self) -> int:
        raise AssertionError("the content was read")


def unread(*shape: int) -> WireTensor:
    return WireTensor("inputs[0]", "x", "UINT8", shape, Unreadable(), {})


async def test_a_request_that_is_refused_is_refused_before_its_content_is_decoded() -> None:
    models = Models()
    dispatcher = Dispatcher(models)
    models.replace([READY])
    doubler = attach(models)
    doubler.has_replica.clear()
    waiting = [asyncio.create_task(dispatcher.infer(*models.choose("m", ""), [tensor(1)], [], 240.0))]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(dispatcher.infer(*models.choose("m", ""), [tensor(*range(9))], [], 240.0)))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="9 rows wait already"):
        await dispatcher.infer(*models.choose("m", ""), [unread(1)], [], 240.0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    with pytest.raises(DeadlineExceeded):
        await dispatcher.infer(*models.choose("m", ""), [unread(1)], [], 0.0)
    with pytest.raises(InvalidArgument, match="send 1 to"):  # what is wrong in itself is told all the same
        await dispatcher.infer(*models.choose("m", ""), [unread(10_000)], [], 0.0)
