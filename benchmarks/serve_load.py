"""The tasks of the clients' process: the load generator of `millrace bench`, for any contender."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import grpc
import numpy as np

from benchmarks.data_rows import SIDE
from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc as pb_grpc
from millrace_client.inference import infer_request, output_arrays
from millrace_client.load import Measured, Outcome, Plan, closed_loop, open_loop, requests_of

MODEL = "digits"
DISTINCT = 256
WARM_UP_S = 1.0


def images(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return noise, (count, 28, 28)."""
    return np.random.default_rng(1).integers(0, 256, (count, SIDE, SIDE), np.uint8)


@lru_cache(maxsize=1)
def _requests() -> list[bytes]:
    """Return requests of one image each; all contenders answer with logits only."""
    return requests_of(MODEL, {"image": images(DISTINCT)}, outputs=["logits"])


def closed(address: str, in_flight: int, seconds: float, deadline_s: float = 5.0) -> Measured:
    return closed_loop(_plan(address, seconds, WARM_UP_S, deadline_s), in_flight)


def opened(address: str, rate: float, seconds: float, deadline_s: float, seed: int) -> Measured:
    return open_loop(_plan(address, seconds, WARM_UP_S, deadline_s), rate, seed)


def opened_counting_cpu(
    address: str, rate: float, seconds: float, deadline_s: float, seed: int
) -> tuple[Measured, float]:
    """Return the same result, with the CPU seconds of all threads of this process, including the warm-up."""
    began_s = time.process_time()
    measured = opened(address, rate, seconds, deadline_s, seed)
    return measured, time.process_time() - began_s


def closed_until(address: str, in_flight: int, deadline_s: float, stop: Path, timeout_s: float) -> Measured:
    """Run until the file `stop` exists, which is polled every second."""
    began_s = time.perf_counter()
    outcomes: list[Outcome] = []
    while not stop.exists() and time.perf_counter() < began_s + timeout_s:
        outcomes += closed_loop(_plan(address, 1.0, 0.0, deadline_s), in_flight).outcomes
    return Measured(time.perf_counter() - began_s, 1, outcomes)


def logits(address: str, count: int) -> np.ndarray:
    """Return (count, 10) logits of the first images of the load, requested one by one."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        answers = []
        for image in images(DISTINCT)[:count]:
            request = infer_request(MODEL, {"image": image[None]})
            request.outputs.append(pb.ModelInferRequest.InferRequestedOutputTensor(name="logits"))
            answers.append(output_arrays(stub.ModelInfer(request, timeout=30.0))["logits"])
    return np.concatenate(answers)


def _plan(address: str, seconds: float, warm_up_s: float, deadline_s: float) -> Plan:
    return Plan(address=address, requests=_requests(), seconds=seconds, warm_up_s=warm_up_s, deadline_s=deadline_s)
