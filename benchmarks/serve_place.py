"""The processes of the contenders: all on loopback, and cleaned up at the end."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import millrace_client
from benchmarks import serve_load, serve_mlserver, serve_ray
from benchmarks.serve_load import MODEL
from benchmarks.serve_model import BareModel, write_checkpoints
from millrace_client.load import Measured
from shared.settings import StoreSettings
from tests.support.ports import free_ports
from tests.support.ray_head import RayHead, ray_head
from tests.support.service_process import ServiceProcess, running_service, store_environ
from tests.support.waiting import wait_until

LOADED_TIMEOUT_S = 180.0
THREADS, MAX_BATCH = 1, 32
# Ray's logical CPUs, not cores: during a rollout, old and new replicas both fit.
RAY_CPUS = 4
# The load on a deployment that is changed.
SWAP_IN_FLIGHT, SWAP_DEADLINE_S = 8, 5.0


@dataclass(frozen=True)
class Serving:
    """Our service on its own Ray head, with two checkpoints in its store, and clients in their own process.

    `metrics` is host:port.
    """

    head: RayHead
    service: ServiceProcess
    metrics: str
    checkpoints: tuple[str, ...]
    weights: Path
    folder: Path
    clients: ProcessPoolExecutor

    @property
    def address(self) -> str:
        return self.service.address

    def in_clients(self, task: Callable[..., Any], *arguments: Any) -> Any:
        return self.clients.submit(task, *arguments).result()

    def asked_meanwhile(self, work: Callable[[], None], timeout_s: float) -> Measured:
        """Return the clients' results while `work` changes the deployment.

        The clients send requests without a pause, each with `SWAP_DEADLINE_S`.
        """
        stop = self.folder / f"stop-{uuid.uuid4().hex}"
        load = self.clients.submit(
            serve_load.closed_until, self.address, SWAP_IN_FLIGHT, SWAP_DEADLINE_S, stop, timeout_s
        )
        try:
            work()
        finally:
            stop.touch()
            measured: Measured = load.result(timeout_s)
        return measured

    def deploy(self, replicas: int = 1) -> None:
        """Deploy the checkpoint as the model of the load, replacing an existing one; return when it answers."""
        name = f"deployments/{MODEL}"
        with millrace_client.connect(inference=self.address) as client:
            if any(one.name == name for one in client.deployments.list_deployments()):
                client.deployments.delete_deployment(name)
                _wait_until_gone(client, name)
            operation = client.deployments.create_deployment(
                MODEL, self.checkpoints[0], num_replicas=replicas, threads_per_replica=THREADS, max_batch_size=MAX_BATCH
            )
            operation.wait(timeout_s=LOADED_TIMEOUT_S)


@dataclass(frozen=True)
class Place(Serving):
    """Also has the bare model in its own process."""

    model: ProcessPoolExecutor

    def bare(self, method: str, *arguments: Any) -> Any:
        """Call a method of `BareModel`."""
        return self.model.submit(_bare, method, *arguments).result()


@contextmanager
def serving(folder: Path) -> Iterator[Serving]:
    settings = StoreSettings(url=(folder / "store").as_uri())
    checkpoints, weights = write_checkpoints(settings)
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    spawn = multiprocessing.get_context("spawn")
    with ray_head(num_cpus=RAY_CPUS) as head:
        environ = {
            **store_environ(settings),
            "RAY_ADDRESS": head.address,
            "MILLRACE_METRICS_LISTEN": metrics,
            # No log line for each call, as for the peers.
            "MILLRACE_LOG_LEVEL": "WARNING",
        }
        with (
            running_service("inference_service", environ, folder / "service.log") as service,
            ProcessPoolExecutor(1, mp_context=spawn) as clients,
        ):
            yield Serving(head, service, metrics, checkpoints, weights, folder, clients)


@contextmanager
def our_place(folder: Path) -> Iterator[Place]:
    spawn = multiprocessing.get_context("spawn")
    with (
        serving(folder) as ours,
        ProcessPoolExecutor(1, mp_context=spawn, initializer=_make_bare) as model,
    ):
        place = Place(**vars(ours), model=model)
        place.deploy()
        yield place


@contextmanager
def ray_serve(weights: Path) -> Iterator[tuple[str, Callable[[float], None]]]:
    """Yield the address of the peer on Ray Serve, and a function that sets its batch wait."""
    port, http_port = free_ports(2)
    spawn = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, serve_ray.ENVIRONMENT),
        ray_head(num_cpus=RAY_CPUS) as head,
        ProcessPoolExecutor(1, mp_context=spawn) as driver,
    ):
        driver.submit(serve_ray.start, head.address, str(weights), THREADS, port, http_port).result(LOADED_TIMEOUT_S)

        def wait(batch_wait_s: float) -> None:
            driver.submit(serve_ray.wait, str(weights), THREADS, batch_wait_s).result(LOADED_TIMEOUT_S)

        try:
            yield f"{serve_ray.HOST}:{port}", wait
        finally:
            driver.submit(serve_ray.stop).result()


@contextmanager
def mlserver(weights: Path, batch_wait_s: float) -> Iterator[str]:
    with serve_mlserver.running(weights, THREADS, batch_wait_s) as address:
        yield address


_model: BareModel | None = None


def _make_bare() -> None:
    global _model
    _model = BareModel(THREADS)


def _bare(method: str, *arguments: Any) -> Any:
    return getattr(_model, method)(*arguments)


def _wait_until_gone(client: millrace_client.Millrace, name: str) -> None:
    wait_until(lambda: all(one.name != name for one in client.deployments.list_deployments()), f"{name} is gone", 60.0)
