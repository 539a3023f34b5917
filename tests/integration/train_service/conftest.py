"""One Ray head for all, and for each kind of store a train service that all tests share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from millrace.train.v1 import resources_pb2 as res
from shared.settings import StoreSettings
from shared.storage.object_store import ensure_bucket
from tests.support.ray_head import NONE_WARM, RayHead, ray_head
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, name_under_test
from tests.support.training import TrainClient, TrainStack, Watch, digits_spec, train_stack
from tests.support.wheels import OFFLINE

# Of the run that several files look at.
EPOCHS, STEPS_PER_EPOCH = 4, 20


@pytest.fixture(scope="package")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings of a node that installs what a bundle requires, from a folder of wheels."""
    folder = tmp_path_factory.mktemp("environments")
    of_node = {"MILLRACE_CODE_ENVIRONMENTS": "uv", "MILLRACE_CODE_ENVIRONMENTS_FOLDER": str(folder / "environments")}
    return {**of_node, **OFFLINE, "UV_FIND_LINKS": str(folder / "wheels")}


@pytest.fixture(scope="package")
def train_ray(environments: dict[str, str]) -> Iterator[RayHead]:
    # A node whose environment has the store's keys: its workers still need none.
    keys = {"MILLRACE_S3_ACCESS_KEY": ACCESS_KEY, "MILLRACE_S3_SECRET_KEY": SECRET_KEY}
    environ = {**NONE_WARM, **keys, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, **environments}
    with ray_head(num_cpus=4, environ=environ) as head:
        yield head


@pytest.fixture(scope="package")
def file_stack(
    train_ray: RayHead, environments: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainStack]:
    folder = tmp_path_factory.mktemp("train-file")
    store = StoreSettings(url=(folder / "store").as_uri())
    with train_stack(store, train_ray.address, folder, environments) as stack:
        yield stack


@pytest.fixture(scope="package")
def s3_stack(train_ray: RayHead, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainStack]:
    settings = s3_server.settings(f"s3://millrace/{uuid.uuid4().hex}")
    ensure_bucket(settings)
    with train_stack(settings, train_ray.address, tmp_path_factory.mktemp("train-s3")) as stack:
        yield stack


@pytest.fixture(scope="package", params=["file", pytest.param("s3", id=f"s3-{name_under_test()}")])
def stack(request: pytest.FixtureRequest) -> TrainStack:
    started: TrainStack = request.getfixturevalue(f"{request.param}_stack")
    return started


@dataclass(frozen=True)
class Finished:
    """A run that ended, and all that its watcher saw."""

    stack: TrainStack
    job: res.TrainingJob
    watch: Watch


@pytest.fixture(scope="package")
def finished(s3_stack: TrainStack) -> Finished:
    """On s3:// alone, for a run takes a minute; the end-to-end and fault suites run on file://."""
    created = s3_stack.client.create(digits_spec(epochs=EPOCHS, checkpoint_every_steps=15))
    watch = s3_stack.client.watch(created.name)
    watch.rest()
    return Finished(s3_stack, s3_stack.client.get(created.name), watch)


@pytest.fixture
def client(stack: TrainStack) -> TrainClient:
    return stack.client
