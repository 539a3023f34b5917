"""What Prometheus reads, over HTTP, of a real server."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference import grpc_service_pb2 as oip
from inference_service.domain.deployment import application_name
from inference_service.domain.signature import Outputs, Rows
from inference_service.frontend_tasks import metrics_served
from inference_service.serve.models import Models
from inference_service.settings import settings_from
from shared.settings import SettingsError
from tests.support.grpc_kit import call_error
from tests.support.inference_server import ask, inference_server, until
from tests.support.ports import free_ports

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
ENVIRON = {"MILLRACE_STORE": "file:///tmp/store", "RAY_ADDRESS": "127.0.0.1:6379"}


def read(address: str) -> Samples:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removeprefix("millrace_inference_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(**more: str) -> frozenset[tuple[str, str]]:
    return frozenset({"model": "m", "version": "1", **more}.items())


async def test_the_metrics_are_the_numbers_of_the_statistics() -> None:
    async with inference_server() as server:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        await server.stub.ModelInfer(ask(1, 2, 3))
        await server.stub.ModelInfer(ask(4))
        await call_error(server.stub.ModelInfer(ask(4, parameters={"timeout": {"int64_param": -1}})))
        await call_error(server.stub.ModelInfer(ask(4, model="nobody")))
        server.model.may_work.clear()
        calls = [asyncio.ensure_future(server.stub.ModelInfer(ask(0)))]
        await until(lambda: server.model.at_work == 1, "the model is at work")
        calls.append(asyncio.ensure_future(server.stub.ModelInfer(ask(0, 0))))
        await until(lambda: sum(one.queued_rows for one in server.models.listed()) == 2, "two rows wait")
        with metrics_served(address, server.models):
            seen = await asyncio.to_thread(read, address)
        (found,) = (await server.stub.ModelStatistics(oip.ModelStatisticsRequest(name="m"))).model_stats
        server.model.may_work.set()
        await asyncio.gather(*calls)
        assert seen["requests_total", labels(status="OK")] == found.inference_stats.success.count == 2
        assert seen["requests_total", labels(status="INVALID_ARGUMENT")] == found.inference_stats.fail.count == 1
        assert seen["requests_total", labels(model="", version="", status="NOT_FOUND")] == 1
        for name, duration in (
            ("request_seconds", found.inference_stats.success),
            ("queue_seconds", found.inference_stats.queue),
            ("compute_input_seconds", found.inference_stats.compute_input),
            ("compute_infer_seconds", found.inference_stats.compute_infer),
            ("compute_output_seconds", found.inference_stats.compute_output),
        ):
            assert seen[f"{name}_count", labels()] == duration.count, name
            assert seen[f"{name}_sum", labels()] == pytest.approx(duration.ns / 1e9, abs=1e-9), name
        assert seen["compute_infer_seconds_bucket", labels(le="0.25")] == 0
        assert seen["compute_infer_seconds_bucket", labels(le="0.5")] == 2
        assert seen["batch_rows_sum", labels()] == found.inference_count == 4
        assert seen["batch_seconds_count", labels()] == found.execution_count == 2
        assert (seen["queued_rows", labels()], seen["ready", labels()]) == (2, 1)


class NoNumbers:
    """Refuses rows that begin with 9, and answers those that begin with 7 with a NaN."""

    async def forward(self, rows: Rows) -> Outputs:
        firsts = rows.values["image"][:, 0]
        logits = np.where(firsts[:, None] == 7, np.nan, rows.values["image"]).astype(np.float32)
        refused = {int(row): "tensor 'image': nan is not finite" for row in np.flatnonzero(firsts == 9)}
        return Outputs([logits, logits.argmax(axis=1)], refused, non_finite=np.flatnonzero(firsts == 7).tolist())


async def test_rows_answered_with_a_nan_are_counted_and_a_refused_request_of_their_batch_harms_none() -> None:
    async with inference_server(model=NoNumbers(), max_delay_s=0.05) as server:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        asked = [ask(1, 7, 7), ask(1, 9), ask(7), ask(1)]
        refused, *_ = await asyncio.gather(
            call_error(server.stub.ModelInfer(asked[1])),
            *(server.stub.ModelInfer(one) for one in (asked[0], *asked[2:])),
        )
        with metrics_served(address, server.models):
            seen = await asyncio.to_thread(read, address)
        assert refused.code.name == "INVALID_ARGUMENT"
        assert "row 1: tensor 'image'" in refused.message
        assert seen["requests_total", labels(status="OK")] == 3
        assert seen["non_finite_rows_total", labels()] == 3


def test_a_port_that_is_taken_is_reported_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(SettingsError, match="MILLRACE_METRICS_LISTEN") as refused,
            metrics_served(address, Models()),
        ):
            pass
    assert "use another port" in str(refused.value)


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    (port,) = free_ports(1)
    listen = settings_from({**ENVIRON, "MILLRACE_METRICS_LISTEN": f"[::1]:{port}"}).metrics_listen
    with metrics_served(listen, Models()):
        assert read(listen) == {}


@pytest.mark.parametrize("host", ["203.0.113.7", "nowhere.invalid"])
def test_an_address_that_is_not_this_machines_is_reported_with_the_remedy(host: str) -> None:
    with (
        pytest.raises(SettingsError, match=r"MILLRACE_METRICS_LISTEN.*; use an address of this machine"),
        metrics_served(f"{host}:9400", Models()),
    ):
        pass


def test_metrics_are_off_unless_an_address_is_set() -> None:
    assert settings_from(ENVIRON).metrics_listen == ""
    assert settings_from({**ENVIRON, "MILLRACE_METRICS_LISTEN": "127.0.0.1:9000"}).metrics_listen == "127.0.0.1:9000"


@pytest.mark.parametrize(
    "listen", ["9000", ":9000", "localhost:", "localhost:http", "localhost:70000", "::1:9400", "[::1:9400"]
)
def test_an_address_that_is_none_is_refused_with_examples(listen: str) -> None:
    with pytest.raises(SettingsError, match=r"MILLRACE_METRICS_LISTEN.*e\.g\. 127\.0\.0\.1:9400 or \[::1\]:9400"):
        settings_from({**ENVIRON, "MILLRACE_METRICS_LISTEN": listen})


async def test_how_many_replicas_run_is_reported() -> None:
    async with inference_server() as server:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        (one,) = server.models.listed()
        server.models.scaled({application_name(one.deployment, one.version): 3})
        with metrics_served(address, server.models):
            assert (await asyncio.to_thread(read, address))["replicas", labels()] == 3
