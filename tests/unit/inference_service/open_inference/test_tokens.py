"""A foreign client of the Open Inference Protocol brings the token as a header."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from shared.grpc_server import BearerToken
from tests.support.grpc_kit import everything, told
from tests.support.inference_server import Server, ask, served

TOKEN = "a-token-of-the-tests"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def test_tritonclient_asks_with_a_header() -> None:
    def asks(address: str) -> None:
        image = triton.InferInput("image", [1, 4], "UINT8")
        image.set_data_from_numpy(np.array([[0, 1, 2, 3]], np.uint8))
        with triton.InferenceServerClient(address) as client:
            assert client.infer("m", [image], headers=HEADERS).as_numpy("label").tolist() == [3]
            assert client.is_server_live(headers=HEADERS)
            with pytest.raises(InferenceServerException, match="demands a token") as raised:
                client.infer("m", [image])
            assert raised.value.status() == "StatusCode.UNAUTHENTICATED"
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
            client.start_stream(lambda result, error: answers.put((result, error)), headers=HEADERS)
            client.async_stream_infer("m", [image])
            result, error = answers.get(timeout=20)
            client.stop_stream()
        assert error is None
        assert result.as_numpy("label").tolist() == [3]

    async def scenario(server: Server) -> None:
        await asyncio.to_thread(asks, server.kit.address)

    served(scenario, token=BearerToken(TOKEN))


def test_without_the_token_no_request_reaches_a_model() -> None:
    async def scenario(server: Server) -> None:
        unary = await told(server.stub.ModelInfer(ask(1)))
        stream = await told(everything(server.stub.ModelStreamInfer(iter([ask(1)]))))
        assert (unary.code, stream.code) == (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED)
        assert server.model.batches == []
        await server.stub.ModelInfer(ask(1), metadata=tuple(HEADERS.items()))
        assert server.model.batches == [[1]]

    served(scenario, token=BearerToken(TOKEN))
