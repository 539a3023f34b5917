"""A request's trace, from its client through the real service to Ray Serve's replica, at a real receiver."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from shared.settings import StoreSettings
from tests.integration.inference_service.checkpoints import JOB
from tests.integration.inference_service.client import eventually, infer_request
from tests.integration.inference_service.conftest import Stack, running_stack
from tests.integration.inference_service.paused import paused, queued_rows
from tests.support.otlp_receiver import OtlpReceiver, Seen, otlp_receiver
from tests.support.ray_head import RayHead

IMAGE = np.zeros((1, 28, 28), np.uint8)
CALL = "inference.GRPCInferenceService/ModelInfer"
PARTS = ("queue", "batch", "replica", "model", "preprocess", "infer")
CLIENT = "b" * 16
MAX_AT_ONCE = 500
# A request that waited for an export that hangs would meet its own deadline long before.
EXPORT_TIMEOUT_S, DEADLINE_S = 3600, 240.0


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as one:
        yield one


@pytest.fixture(scope="module")
def exporting(
    inference_ray: RayHead, receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """With a deployment `traced`."""
    folder = tmp_path_factory.mktemp("tracing")
    settings = StoreSettings(url=(folder / "store").as_uri())
    environ = {**receiver.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": str(EXPORT_TIMEOUT_S), "OTEL_SERVICE_NAME": "shop"}
    with running_stack(inference_ray, settings, folder, **environ) as running:
        running.client.deploy("traced", JOB)
        yield running
        if running.service.is_running():
            running.client.delete("deployments/traced")


def ask(stack: Stack, flags: str = "01") -> str:
    """Ask as a client with a trace of its own, whose id this is."""
    trace = secrets.token_hex(16)
    metadata = (("traceparent", f"00-{trace}-{CLIENT}-{flags}"), ("tracestate", "vendor=1"))
    stack.client.inference.ModelInfer(infer_request("traced", IMAGE), timeout=DEADLINE_S, metadata=metadata)
    return trace


def test_one_trace_goes_from_the_client_to_the_model_in_the_replica(exporting: Stack, receiver: OtlpReceiver) -> None:
    spans = receiver.wait_for(ask(exporting), CALL, *PARTS)
    parents = {name: next((one.name for one in spans.values() if one.id == spans[name].parent), "") for name in PARTS}
    assert spans[CALL].parent == CLIENT
    assert parents == {
        "queue": CALL,
        "batch": CALL,
        "replica": "batch",
        "model": "replica",
        "preprocess": "model",
        "infer": "model",
    }
    assert (spans["batch"].links, spans[CALL].links) == ((spans[CALL].id,), (spans["batch"].id,))
    assert {one.resource["service.name"] for one in spans.values()} == {"shop"}
    assert {one.state for one in spans.values()} == {"vendor=1"}
    pids = {name: one.resource["process.pid"] for name, one in spans.items()}
    assert {pids[name] for name in (CALL, "queue", "batch", "replica")} == {exporting.service.pid}
    (replica,) = {pids[name] for name in ("model", "preprocess", "infer")}
    assert replica in exporting.head.processes("ray::ServeReplica")
    order = (CALL, "batch", "replica", "model", "preprocess", "infer")
    began = [spans[name].began_ns for name in order]
    assert began == sorted(began)
    assert spans["infer"].ended_ns <= spans["replica"].ended_ns <= spans["batch"].ended_ns <= spans[CALL].ended_ns


def test_requests_that_share_a_batch_are_linked_with_it(exporting: Stack, receiver: OtlpReceiver) -> None:
    replica = int(receiver.wait_for(ask(exporting), "model")["model"].resource["process.pid"])
    asked: list[Future[str]] = []
    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        # It has two batches at most, so those that come next wait together.
        with paused([replica]):
            while queued_rows(exporting, "traced") < 2:
                assert len(asked) < MAX_AT_ONCE
                asked.append(threads.submit(ask, exporting))
                time.sleep(0.05)
        traces = [one.result() for one in asked]
    calls = {trace: receiver.wait_for(trace, CALL)[CALL] for trace in traces}

    def batches() -> list[Seen] | None:
        seen = [one for trace in traces for one in receiver.spans(trace) if one.name == "batch"]
        return seen if sum(len(one.links) for one in seen) == len(traces) else None

    found = eventually(batches, 180, "the batches of all requests")
    assert len(found) < len(traces)
    for batch in found:
        served = [call for call in calls.values() if call.id in batch.links]
        assert len(served) == len(batch.links) == batch.attributes["millrace.requests"]
        assert all(call.links == (batch.id,) for call in served)
        assert batch.parent == batch.links[0]
        assert receiver.wait_for(batch.trace, "model")["model"].attributes["millrace.rows"] == len(served)


def test_who_is_not_recorded_by_its_client_is_not_recorded_here(exporting: Stack, receiver: OtlpReceiver) -> None:
    unseen = ask(exporting, "00")
    receiver.wait_for(ask(exporting), CALL, *PARTS)  # exported later, from the same processes
    assert receiver.spans(unseen) == []


def test_a_receiver_that_hangs_or_is_gone_delays_no_request_and_no_stop(
    exporting: Stack, receiver: OtlpReceiver
) -> None:
    receiver.may_answer.clear()
    before = receiver.exports
    ask(exporting)
    eventually(lambda: receiver.exports > before, 240, "an export that hangs")
    for _ in range(20):
        ask(exporting)
    receiver.stop()
    ask(exporting)
    assert exporting.service.stop() == 0
