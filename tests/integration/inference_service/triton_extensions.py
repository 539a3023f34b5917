"""Drives a server's extensions with the real `tritonclient`, blocking and asyncio, and prints what it saw as one JSON
object.

Run as a process of its own, as `triton_session.py` is.

    python triton_extensions.py HOST:PORT MODEL IMAGES.npy
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException


def main(target: str, model: str, path: str) -> dict[str, Any]:
    images = np.load(path)
    client = triton.InferenceServerClient(target)
    return {
        "config": client.get_model_config(model, as_json=True)["config"],
        "index": client.get_model_repository_index(as_json=True)["models"],
        "streamed": streamed(client, model, images),
        "asyncio": asyncio.run(with_asyncio(target, model, images)),
        "classes": classes(client, model, images),
        "names": names(client, model, images),
        "compressed": labels(client.infer(model, [image_input(images)], compression_algorithm="gzip")),
        "urgent": labels(client.infer(model, [image_input(images)], priority=1, timeout=120_000_000)),
        "loaded": status(lambda: client.load_model(model)),
        "errors": {
            "timeout": status(lambda: client.infer(model, [image_input(images)], timeout=1)),
            "load unknown": status(lambda: client.load_model("nobody")),
            "load configured": status(lambda: client.load_model(model, config="{}")),
            "unload unknown": status(lambda: client.unload_model("nobody")),
            "system shared memory": status(client.get_system_shared_memory_status),
            "cuda shared memory": status(client.get_cuda_shared_memory_status),
            "trace": status(client.get_trace_settings),
            "log": status(client.get_log_settings),
        },
        "ready": client.is_model_ready(model),
        "statistics": client.get_inference_statistics(model, as_json=True)["model_stats"],
        "unloaded": unloaded(client, model, images),
    }


def unloaded(client: triton.InferenceServerClient, model: str, images: Any) -> dict[str, Any]:
    """The model taken out of service, and loaded again."""
    client.unload_model(model)
    seen = {
        "ready": client.is_model_ready(model),
        "server ready": client.is_server_ready(),
        "infer": status(lambda: client.infer(model, [image_input(images)])),
        "index": client.get_model_repository_index(as_json=True)["models"],
    }
    client.load_model(model)
    return {
        **seen,
        "ready again": client.is_model_ready(model),
        "labels": labels(client.infer(model, [image_input(images)])),
    }


def image_input(images: Any) -> triton.InferInput:
    tensor = triton.InferInput("image", images.shape, "UINT8")
    tensor.set_data_from_numpy(np.ascontiguousarray(images))
    return tensor


def labels(result: Any) -> list[int]:
    found: list[int] = result.as_numpy("label").tolist()
    return found


def classes(client: triton.InferenceServerClient, model: str, images: Any) -> list[list[str]]:
    outputs = [triton.InferRequestedOutput("probabilities", class_count=3), triton.InferRequestedOutput("label")]
    found = client.infer(model, [image_input(images)], outputs=outputs).as_numpy("probabilities")
    return [[item.decode() for item in row] for row in found]


def names(client: triton.InferenceServerClient, model: str, images: Any) -> dict[str, Any]:
    """Of the labels, in raw contents and in a request that says nothing of outputs; and where the model offers them."""
    wanted = [triton.InferRequestedOutput(name) for name in ("label_name", "label")]
    found = client.infer(model, [image_input(images)], outputs=wanted)
    metadata = client.get_model_metadata(model, as_json=True)
    return {
        "names": [item.decode() for item in found.as_numpy("label_name")],
        "labels": labels(found),
        "unasked": client.infer(model, [image_input(images)]).as_numpy("label_name") is not None,
        "offered": [one for one in metadata["outputs"] if one["name"] == "label_name"],
    }


def streamed(client: triton.InferenceServerClient, model: str, images: Any) -> list[Any]:
    """Each image by itself over one stream, with a request for an unknown model in between."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(result_of(result, error)))
    for number, image in enumerate(images):
        client.async_stream_infer(model, [image_input(image[None])], request_id=f"r{number}")
        if number == 1:
            client.async_stream_infer("nobody", [image_input(image[None])], request_id="wrong")
    seen = [answers.get(timeout=120) for _ in range(len(images) + 1)]
    client.stop_stream()
    return seen


def result_of(result: Any, error: InferenceServerException | None) -> Any:
    if error is not None:
        return error.message()
    answer = result.get_response()
    return [answer.id, labels(result)[0], answer.parameters["triton_final_response"].bool_param]


async def with_asyncio(target: str, model: str, images: Any) -> dict[str, Any]:
    async with aio.InferenceServerClient(target) as client:
        whole = await client.infer(model, [image_input(images)], request_id="whole")

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number, image in enumerate(images):
                yield {"model_name": model, "inputs": [image_input(image[None])], "request_id": f"r{number}"}

        streamed = [result_of(result, error) async for result, error in client.stream_infer(requests())]
        return {
            "labels": labels(whole),
            "streamed": streamed,
            "ready": await client.is_model_ready(model),
            "metadata": await client.get_server_metadata(as_json=True),
        }


def status(call: Callable[..., object]) -> tuple[str, str]:
    try:
        call()
    except InferenceServerException as error:
        return error.status(), error.message()
    return "OK", ""


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
