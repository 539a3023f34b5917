"""Asks with the real `tritonclient`, with and without headers, and prints who answered as one JSON object: by the way
of asking, the version and logits of each answer.

Run as a process of its own, as `triton_session.py` is.

    python triton_headers.py HOST:PORT MODEL IMAGES.npy
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import aio

CANARY = {"x-canary": "yes"}
PLAIN = 60


def main(target: str, model: str, path: str) -> dict[str, Any]:
    tensor = image_input(np.load(path))
    client = triton.InferenceServerClient(target)
    return {
        "plain": [result_of(client.infer(model, [tensor])) for _ in range(PLAIN)],
        "another value": [result_of(client.infer(model, [tensor], headers={"x-canary": "no"})) for _ in range(5)],
        "canary": [result_of(client.infer(model, [tensor], headers=CANARY)) for _ in range(5)],
        "named": [result_of(client.infer(model, [tensor], model_version="1", headers=CANARY))],
        "stream": streamed(client, model, tensor),
        "asyncio": asyncio.run(with_asyncio(target, model, tensor)),
    }


def image_input(images: Any) -> triton.InferInput:
    tensor = triton.InferInput("image", images.shape, "UINT8")
    tensor.set_data_from_numpy(np.ascontiguousarray(images))
    return tensor


def result_of(result: Any) -> tuple[str, list[float]]:
    return result.get_response().model_version, result.as_numpy("logits")[0].tolist()


def streamed(client: triton.InferenceServerClient, model: str, tensor: triton.InferInput) -> list[Any]:
    """Over a stream with the header, in which all requests have it."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(str(error) if error else result_of(result)), headers=CANARY)
    for _ in range(3):
        client.async_stream_infer(model, [tensor])
    seen = [answers.get(timeout=120) for _ in range(3)]
    client.stop_stream()
    return seen


async def with_asyncio(target: str, model: str, tensor: triton.InferInput) -> list[Any]:
    async with aio.InferenceServerClient(target) as client:
        return [result_of(await client.infer(model, [tensor], headers=CANARY))]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
