"""Drives a server with the real `tritonclient`, and prints what it saw as one JSON object.

Run as a process of its own: tritonclient registers the protocol's messages too, and in one process they clash with
ours.

    python triton_session.py HOST:PORT MODEL IMAGES.npy
"""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def main(target: str, model: str, path: str) -> dict[str, Any]:
    images = np.load(path)
    client = triton.InferenceServerClient(target)
    tensor = image_input(images)
    full = client.infer(model, [tensor], request_id="call-1", client_timeout=120)
    some = client.infer(
        model, [tensor], model_version="1", outputs=[triton.InferRequestedOutput("label")], client_timeout=120
    )
    answer = full.get_response()
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "version_ready": client.is_model_ready(model, "1"),
        "unknown_ready": client.is_model_ready("nobody"),
        "unknown_version_ready": client.is_model_ready(model, "9"),
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata(model, as_json=True),
        "id": answer.id,
        "model_name": answer.model_name,
        "model_version": answer.model_version,
        "parameters": {name: value.string_param for name, value in answer.parameters.items()},
        "logits": full.as_numpy("logits").tolist(),
        "probabilities": full.as_numpy("probabilities").tolist(),
        "label": full.as_numpy("label").tolist(),
        "requested": [output.name for output in some.get_response().outputs],
        "asynchronous": asynchronous(client, model, tensor),
        "errors": {
            "unknown model": status(lambda: client.infer("nobody", [tensor])),
            "unknown version": status(lambda: client.infer(model, [tensor], model_version="9")),
            "unknown model's metadata": status(lambda: client.get_model_metadata("nobody")),
            "unknown output": status(
                lambda: client.infer(model, [tensor], outputs=[triton.InferRequestedOutput("score")])
            ),
            "wrong name": status(lambda: client.infer(model, [image_input(images, "picture")])),
            "wrong shape": status(lambda: client.infer(model, [image_input(images[:, :, :27])])),
            "wrong type": status(lambda: client.infer(model, [image_input(images.astype(np.int32))])),
            "no name": status(lambda: client.is_model_ready("")),
        },
    }


def image_input(images: Any, name: str = "image") -> triton.InferInput:
    datatype = {"uint8": "UINT8", "int32": "INT32"}[images.dtype.name]
    tensor = triton.InferInput(name, images.shape, datatype)
    tensor.set_data_from_numpy(np.ascontiguousarray(images))
    return tensor


def asynchronous(client: triton.InferenceServerClient, model: str, tensor: triton.InferInput) -> list[int]:
    """The labels by way of `async_infer`, three calls at once."""
    answers: queue.Queue[Any] = queue.Queue()
    for _ in range(3):
        client.async_infer(model, [tensor], callback=lambda result, error: answers.put(error or result))
    labels = [answers.get(timeout=120).as_numpy("label").tolist() for _ in range(3)]
    assert labels[0] == labels[1] == labels[2]
    return list(labels[0])


def status(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except InferenceServerException as error:
        return error.status(), error.message()
    return "OK", ""


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
