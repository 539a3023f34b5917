"""The peer on Ray Serve, in a separate process on its own Ray head: its gRPC ingress and `@serve.batch`.

It follows Ray's documentation and is optimised: the same protocol, raw tensors, one replica whose model has its own
thread, so that the next batch gathers while one is computed; no access log.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions
from ray.serve.schema import LoggingConfig

from inference import grpc_service_pb2 as pb

HOST = "127.0.0.1"
# Ray's own switch for throughput, to be set in all processes.
ENVIRONMENT = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
MAX_BATCH = 32
# The tried times that the first request of a batch waits for others.
BATCH_WAITS_S = (0.002, 0.02, 0.05)
# More than any load here has in flight.
MAX_ONGOING = 512


def loopback_only() -> None:
    """Bind Serve's gRPC proxy to loopback; run it in each of Ray's workers.

    The proxy binds all interfaces, and has no option for it.
    """
    from ray.serve._private import default_impl

    def add_grpc_address(server: Any, address: str) -> None:
        server.add_insecure_port(f"{HOST}:{address.rpartition(':')[2]}")

    default_impl.add_grpc_address = add_grpc_address  # type: ignore[assignment]


def start(ray_address: str, weights: str, threads: int, port: int, http_port: int) -> None:
    """Start serving on `port`, before it returns; call it once in the process."""
    ray.init(
        address=ray_address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"worker_process_setup_hook": loopback_only},
    )
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=HOST, port=http_port),
        grpc_options=gRPCOptions(
            port=port,
            grpc_servicer_functions=["inference.grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"],
        ),
        logging_config=LoggingConfig(log_level="ERROR", enable_access_log=False),
    )
    wait(weights, threads, BATCH_WAITS_S[0])


def wait(weights: str, threads: int, batch_wait_s: float) -> None:
    """Set the batch wait before it returns; an existing replica continues."""
    deployment = serve.deployment(
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": threads},
        logging_config=LoggingConfig(log_level="ERROR", enable_access_log=False),
        user_config={"batch_wait_s": batch_wait_s},
    )(Digits)
    serve.run(deployment.bind(weights, threads))


def stop() -> None:
    """Disconnect from Ray; call it before the head ends, since otherwise Ray ends this process."""
    ray.shutdown()


class Digits:
    def __init__(self, weights: str, threads: int) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._module = self._thread.submit(_load, weights, threads).result()

    def reconfigure(self, config: dict[str, float]) -> None:
        """Apply the deployment's `user_config`, which Ray Serve passes."""
        self._batched.set_batch_wait_timeout_s(config["batch_wait_s"])  # type: ignore[attr-defined]

    async def ModelInfer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:  # noqa: N802
        image = np.frombuffer(request.raw_input_contents[0], np.uint8).reshape(tuple(request.inputs[0].shape))
        logits = await self._batched(image)
        response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        response.outputs.add(name="logits", datatype="FP32", shape=logits.shape)
        response.raw_output_contents.append(logits.tobytes())
        return response

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=BATCH_WAITS_S[0], max_concurrent_batches=2)
    async def _batched(self, given: list[Any]) -> list[Any]:
        loop = asyncio.get_running_loop()
        logits = await loop.run_in_executor(self._thread, self._forward, np.concatenate(given))
        return [logits[row : row + 1] for row in range(len(given))]

    def _forward(self, given: Any) -> Any:
        import torch

        from benchmarks.serve_model import prepared

        with torch.inference_mode():
            return self._module(prepared(given)).numpy()


def _load(weights: str, threads: int) -> Any:
    import torch
    from safetensors.torch import load_file

    from shared.models import build_model, load_weights
    from tests.integration.inference_service.checkpoints import MODEL

    torch.set_num_threads(threads)
    module = build_model(MODEL)
    load_weights(module, load_file(weights))
    return module.eval()
