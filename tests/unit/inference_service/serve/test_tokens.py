"""A foreign client of the Open Inference Protocol brings the token as a header."""

from __future__ import annotations

import asyncio
import sys

import grpc

from shared.grpc_server import BearerToken
from tests.support.grpc_kit import call_error
from tests.support.inference_server import ask, inference_server

TOKEN = "a-token-of-the-tests"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
# In a process of its own: tritonclient and our protos share names of messages.
TRITON = """
import queue
import sys

import numpy as np
import tritonclient.grpc as triton

address, token = sys.argv[1:]
headers = {"authorization": f"Bearer {token}"}
image = triton.InferInput("image", [1, 4], "UINT8")
image.set_data_from_numpy(np.array([[0, 1, 2, 3]], np.uint8))
answers = queue.SimpleQueue()
with triton.InferenceServerClient(address) as client:
    print(client.is_server_live(headers=headers))
    print(client.infer("m", [image], headers=headers).as_numpy("label").tolist())
    client.start_stream(lambda result, error: answers.put((result, error)), headers=headers)
    client.async_stream_infer("m", [image])
    result, error = answers.get(timeout=240)
    client.stop_stream()
    print(error or result.as_numpy("label").tolist())
    try:
        client.infer("m", [image])
    except triton.InferenceServerException as error:
        print(error.status())
"""


async def test_tritonclient_asks_with_a_header() -> None:
    async with inference_server(token=BearerToken(TOKEN)) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TRITON, server.kit.address, TOKEN, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        assert said.decode().splitlines() == ["True", "[3]", "[3]", "StatusCode.UNAUTHENTICATED"]


async def test_without_the_token_no_request_reaches_a_model() -> None:
    async with inference_server(token=BearerToken(TOKEN)) as server:
        unary = await call_error(server.stub.ModelInfer(ask(1)))
        stream = await call_error(server.stub.ModelStreamInfer().read())
        assert (unary.code, stream.code) == (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED)
        assert server.model.batches == []
        await server.stub.ModelInfer(ask(1), metadata=tuple(HEADERS.items()))
        assert server.model.batches == [[1]]
