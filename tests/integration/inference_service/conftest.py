"""One Ray head for all; on it a service for each kind of store, with a checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.inference.v1 import deployment_service_pb2 as pb
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.storage.object_store import ensure_bucket
from tests.integration.inference_service.checkpoints import Written, write
from tests.integration.inference_service.client import Client, environment
from tests.support import custom_functions
from tests.support.ports import free_ports
from tests.support.ray_head import RayHead, ray_head
from tests.support.s3_server import S3Server
from tests.support.service_process import ServiceProcess, running_service

# Of the head. Its one GPU is only a word for test_packing.py: there is none.
CPUS = 8


@dataclass(frozen=True)
class Stack:
    """A service, alone with Ray and a store that holds one checkpoint. `metrics` is where Prometheus reads."""

    head: RayHead
    store: ObjectStore
    service: ServiceProcess
    client: Client
    checkpoint: Written
    metrics: str


@pytest.fixture(scope="package")
def inference_ray() -> Iterator[RayHead]:
    allowed = {"MILLRACE_CUSTOM_TRANSFORMS": f"{custom_functions.MODULE}:hanging"}
    with ray_head(num_cpus=CPUS, num_gpus=1, environ=allowed) as head:
        yield head


@pytest.fixture(scope="package")
def stack(inference_ray: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """On a store in a directory."""
    folder = tmp_path_factory.mktemp("inference")
    with running_stack(inference_ray, StoreSettings(url=(folder / "store").as_uri()), folder) as running:
        yield running


@pytest.fixture(scope="package")
def s3_stack(inference_ray: RayHead, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """On a real S3 server; beside the other stack, on the same Ray. Batches go through Serve's handle, as they do to
    replicas on other machines; and it runs callers' code, which the other does not."""
    settings = s3_server.settings(f"s3://millrace/{uuid.uuid4().hex}")
    ensure_bucket(settings)
    folder = tmp_path_factory.mktemp("inference-s3")
    variables = {"MILLRACE_REPLICA_SOCKETS": "0", "MILLRACE_OWN_CODE": "trusted"}
    with running_stack(inference_ray, settings, folder, **variables) as running:
        yield running


@contextmanager
def running_stack(head: RayHead, settings: StoreSettings, folder: Path, **variables: str) -> Iterator[Stack]:
    """With further `variables` in the service's environment."""
    store = open_store(settings)
    checkpoint = write(store)
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    environ = {**environment(settings, head.address), "MILLRACE_METRICS_LISTEN": metrics, **variables}
    with (
        running_service("inference_service", environ, folder / "service.log") as service,
        Client(service.address) as client,
    ):
        yield Stack(head, store, service, client, checkpoint, metrics)


@pytest.fixture(scope="package")
def deployed(stack: Stack) -> pb.Deployment:
    """`deployments/digits`, READY, of the job's best checkpoint."""
    return stack.client.deploy("digits", "trainingJobs/digits", max_batch_size=16)
