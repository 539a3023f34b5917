"""One Ray head for all, and for each kind of store a data service that all tests share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.longrunning import operations_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import Jobs
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.integration.data_service.client import DataClient, idx, imported
from tests.support.idx import digits, write_idx
from tests.support.ray_head import NONE_WARM, RayHead, ray_head
from tests.support.service_process import ServiceProcess, running_service, store_environ
from tests.support.stores import KINDS, new_store
from tests.support.version_attempts import Reconciler, running_reconciler

TRAIN_ROWS, TEST_ROWS = 1300, 300


@dataclass(frozen=True)
class DataStack:
    """A running service; `inputs` is the folder below which it may read files, `store` what it keeps."""

    service: ServiceProcess
    client: DataClient
    store: ObjectStore
    settings: StoreSettings
    inputs: Path

    def stored_keys(self) -> set[str]:
        """What is in the store, without the markers of live jobs, and without the index, which is made from the jobs'
        logs in its own time."""
        return {info.key for info in self.store.list() if not info.key.startswith(("live/", "index/"))}

    def made_since(self, before: set[str]) -> list[str]:
        """What was not in the store when it had the keys `before`. What has gone since says nothing: the reconciler
        takes away what other tests' jobs have left, in its own time."""
        return sorted(self.stored_keys() - before)

    def put_source(self, name: str, data: bytes) -> str:
        """The URI of a file on the kind of store that the service has: where that is file://, it has no S3 to read
        from."""
        if self.settings.url.startswith("s3://"):
            self.store.put(f"sources/{name}", data)
            return f"{self.settings.url}/sources/{name}"
        path = self.inputs / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path.as_uri()

    def new_dataset(self) -> str:
        dataset_id = f"d{uuid.uuid4().hex[:12]}"
        return str(self.client.data.CreateDataset(pb.CreateDatasetRequest(dataset_id=dataset_id), timeout=60).name)


@pytest.fixture(scope="package")
def data_ray() -> Iterator[RayHead]:
    # Each CPU that Ray is told of may get a worker, and each worker takes seconds of a processor to start.
    with ray_head(num_cpus=2, environ=NONE_WARM, dashboard=False) as head:
        yield head


@pytest.fixture(scope="package", params=KINDS)
def stack(
    request: pytest.FixtureRequest, data_ray: RayHead, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DataStack]:
    folder = tmp_path_factory.mktemp("data")
    settings = new_store(request, folder)
    inputs = folder / "inputs"
    inputs.mkdir()
    environ = {
        **store_environ(settings),
        "RAY_ADDRESS": data_ray.address,
        "MILLRACE_IMPORT_ROOTS": str(inputs),
    }
    with running_service("data_service", environ, folder / "service.log") as service:
        client = DataClient(service.address)
        yield DataStack(service, client, open_store(settings), settings, inputs)
        client.close()


@dataclass(frozen=True)
class Digits:
    """1,300 training rows, 130 of them held out for validation, and 300 test rows; made by `request` and `started`."""

    request: pb.ImportVersionRequest
    started: operations_pb2.Operation
    done: operations_pb2.Operation
    version: DatasetVersion


@pytest.fixture(scope="package")
def digits_version(stack: DataStack) -> Digits:
    """For tests that only read it: an import takes seconds."""
    request = digits_request(stack, stack.new_dataset())
    started = stack.client.data.ImportVersion(request, timeout=60)
    done = stack.client.wait(started)
    return Digits(request, started, done, imported(done))


def digits_request(stack: DataStack, parent: str) -> pb.ImportVersionRequest:
    """A gzipped training pair and a plain test pair, the same each time."""
    sources = []
    for split, rows, suffix in (("train", TRAIN_ROWS, ".gz"), ("test", TEST_ROWS, "")):
        images, labels = digits(rows, seed=rows)
        uris = [
            write_idx(stack.inputs / f"{split}-{kind}{suffix}", values)
            for kind, values in (("images", images), ("labels", labels))
        ]
        sources.append(idx(split, *uris))
    hold_out = pb.HoldOut(from_split="train", to_split="validation", fraction=0.1, seed=7)
    return pb.ImportVersionRequest(parent=parent, sources=sources, hold_outs=[hold_out])


@pytest.fixture
def client(stack: DataStack) -> DataClient:
    return stack.client


@pytest.fixture
def dataset(stack: DataStack) -> str:
    """The name of a new, empty dataset."""
    return stack.new_dataset()


# Of modules that have no service, but a reconciler on a `store` of their own.


@pytest.fixture(scope="module", params=KINDS[:1])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StoreSettings:
    """On file://, but for tests that name other kinds: a transform takes seconds."""
    return new_store(request, tmp_path_factory.mktemp("attempts"))


@pytest.fixture(scope="module")
def jobs(store: ObjectStore) -> Jobs:
    return Jobs(store, IMPORT_KIND)


@pytest.fixture(scope="module")
def reconciler(
    settings: StoreSettings, data_ray: RayHead, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reconciler]:
    with running_reconciler(settings, data_ray, tmp_path_factory.mktemp("reconciler") / "log") as running:
        yield running
