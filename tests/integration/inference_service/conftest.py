"""One Ray head for all; for each kind of store a service, a checkpoint, and a deployment of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from millrace.inference.v1 import deployment_service_pb2 as pb
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.storage.opening import ensure_bucket
from tests.integration.inference_service.checkpoints import Written, write
from tests.integration.inference_service.service import Client, Service, running
from tests.support.ray_head import RayHead, ray_head
from tests.support.s3_server import S3Server, name_under_test


@dataclass(frozen=True)
class Stack:
    """A service, alone with Ray and a store that holds one checkpoint."""

    head: RayHead
    store: ObjectStore
    service: Service
    client: Client
    checkpoint: Written


@pytest.fixture(scope="session")
def inference_ray() -> Iterator[RayHead]:
    with ray_head(num_cpus=8) as head:
        yield head


@pytest.fixture(scope="session", params=["file", pytest.param("s3", id=f"s3-{name_under_test()}")])
def stack(
    request: pytest.FixtureRequest, inference_ray: RayHead, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("inference")
    if request.param == "file":
        settings = StoreSettings(url=(folder / "store").as_uri())
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        settings = server.settings(f"s3://millrace/{uuid.uuid4().hex}")
        ensure_bucket(settings)
    store = open_store(settings)
    checkpoint = write(store)
    with running(settings, inference_ray.address, folder / "service.log") as (service, client):
        yield Stack(inference_ray, store, service, client, checkpoint)


@pytest.fixture(scope="session")
def deployed(stack: Stack) -> pb.Deployment:
    """`deployments/digits`, READY, of the job's best checkpoint."""
    return stack.client.deploy("digits", "trainingJobs/digits", max_batch_size=16)
