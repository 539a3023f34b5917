"""SIGKILL to everything that takes part in an import: it is done in the end, and committed once."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.longrunning import operations_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import JobRecord, Jobs, JobState
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.integration.data_service.client import DataClient, idx, imported, metadata_of
from tests.support.faults import Faults
from tests.support.ports import free_ports
from tests.support.ray_head import RayHead, ray_head
from tests.support.service_process import ServiceProcess, running_service, store_environ
from tests.support.stores import S3_IN_CHAOS, STORES, new_store
from tests.support.waiting import wait_until

# `make test` has kills of the service and of the attempt in test_data_kills_by_stage.py, where an open upload holds the
# import; here many rows are read as fast as they can be. A service that reaches no Ray is in
# tests/integration/data_service/test_process.py.
pytestmark = pytest.mark.chaos

# All black, so a file of holes: it takes no room, and seconds to import.
ROWS = 2_400_000


@dataclass(frozen=True)
class Running:
    """A service with an import under way."""

    service: ServiceProcess
    client: DataClient
    store: ObjectStore
    request: pb.ImportVersionRequest

    def start_import(self) -> operations_pb2.Operation:
        return self.client.data.ImportVersion(self.request, timeout=60)

    def operation(self, name: str) -> operations_pb2.Operation:
        return self.client.operations.GetOperation(operations_pb2.GetOperationRequest(name=name), timeout=60)

    def wait_until_rows_are_read(self, started: operations_pb2.Operation) -> str:
        """Return the version's name, in the middle of its import."""
        wait_until(lambda: metadata_of(self.operation(started.name)).rows_read > 0, "the first rows", timeout_s=120)
        return str(metadata_of(started).version)

    def job(self, version: str) -> JobRecord:
        return Jobs(self.store, IMPORT_KIND).get(version, version)

    def assert_committed_once(self, version: str) -> None:
        """One record of success, one manifest, and no file that it does not name."""
        records = [json.loads(self.store.get(info.key)) for info in self.store.list(f"{version}/log")]
        states = [record["state"]["state"] for record in sorted(records, key=lambda record: int(record["number"]))]
        assert states.count("SUCCEEDED") == 1
        assert states[-1] == "SUCCEEDED"
        found = self.client.data.GetVersion(pb.GetVersionRequest(name=version), timeout=60)
        assert (found.state, found.row_count) == (DatasetVersion.STATE_ACTIVE, ROWS)
        names = [info.key.rsplit("/", 1)[-1] for info in self.store.list(f"{version}/data")]
        assert sorted(names) == sorted(["manifest.json", "report.json", *(file.path for file in found.files)])


def write_holes(path: Path, rows: int, row_shape: tuple[int, ...]) -> str:
    """An IDX file of zeros."""
    row_bytes = 1
    for side in row_shape:
        row_bytes *= side
    with path.open("wb") as file:
        file.write(struct.pack(f">HBB{1 + len(row_shape)}I", 0, 8, 1 + len(row_shape), rows, *row_shape))
        file.truncate(file.tell() + rows * row_bytes)
    return path.as_uri()


def running_import_service(stack: ExitStack, settings: StoreSettings, folder: Path, ray_address: str) -> Running:
    environ = {**store_environ(settings), "RAY_ADDRESS": ray_address, "MILLRACE_IMPORT_ROOTS": str(folder)}
    service = stack.enter_context(running_service("data_service", environ, folder / "service.log"))
    client = DataClient(service.address)
    stack.callback(client.close)
    dataset = client.data.CreateDataset(pb.CreateDatasetRequest(dataset_id="black"), timeout=60)
    uris = write_holes(folder / "images", ROWS, (28, 28)), write_holes(folder / "labels", ROWS, ())
    request = pb.ImportVersionRequest(parent=dataset.name, sources=[idx("train", *uris)])
    return Running(service, client, open_store(settings), request)


@pytest.fixture(params=S3_IN_CHAOS)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> StoreSettings:
    return new_store(request, tmp_path)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    """The kind of it, for the table of blows."""
    return STORES[request.node.callspec.params["settings"]]


@pytest.fixture
def running(settings: StoreSettings, data_head: RayHead, tmp_path: Path) -> Iterator[Running]:
    with ExitStack() as stack:
        yield running_import_service(stack, settings, tmp_path, data_head.address)


def test_imports_outlive_the_service(running: Running, store: str, faults: Faults) -> None:
    under_way = running.start_import()
    version = running.wait_until_rows_are_read(under_way)
    not_begun = running.start_import()
    running.service.kill()
    faults.add("SIGKILL service", "import, of two imports", store)
    assert running.job(version).state is JobState.RUNNING
    running.service.start()
    for started in (under_way, not_begun):
        imported(running.client.wait(started))
        running.assert_committed_once(metadata_of(started).version)
    # The attempt does not live in the service: the one at work went on.
    assert running.job(version).attempt == 1


def test_an_import_outlives_the_process_of_its_attempt(
    running: Running, data_head: RayHead, store: str, faults: Faults
) -> None:
    started = running.start_import()
    version = running.wait_until_rows_are_read(started)
    (actor,) = data_head.processes("ray::AttemptActor.run")
    os.kill(actor, signal.SIGKILL)
    faults.add("SIGKILL attempt", "import, many rows", store)
    done = running.client.wait(started)
    assert metadata_of(done).attempt == 2
    assert running.job(version).failures == 1
    running.assert_committed_once(version)


def test_a_cancelled_import_leaves_no_file(running: Running) -> None:
    started = running.start_import()
    version = running.wait_until_rows_are_read(started)
    running.client.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=started.name), timeout=60)
    done = running.client.wait(started)
    assert done.error.code == 1  # CANCELLED
    found = running.client.data.GetVersion(pb.GetVersionRequest(name=version), timeout=60)
    assert found.state == DatasetVersion.STATE_CANCELLED
    assert list(running.store.list(f"{version}/data")) == []


def cut_off_from_ray(
    stack: ExitStack, settings: StoreSettings, folder: Path, port: int
) -> tuple[Running, operations_pb2.Operation]:
    """A service whose Ray head was killed in the middle of an import."""
    with ray_head(num_cpus=2, port=port) as head:
        running = running_import_service(stack, settings, folder, head.address)
        started = running.start_import()
        running.wait_until_rows_are_read(started)
        head.kill()
    return running, started


def test_without_ray_the_api_answers(settings: StoreSettings, tmp_path: Path, store: str, faults: Faults) -> None:
    (port,) = free_ports(1)
    with ExitStack() as stack:
        running, started = cut_off_from_ray(stack, settings, tmp_path, port)
        faults.add("SIGKILL Ray head", "import", store)
        version, dataset = metadata_of(started).version, str(running.request.parent)
        found = running.client.data.GetVersion(pb.GetVersionRequest(name=version), timeout=60)
        assert found.state == DatasetVersion.STATE_CREATING
        assert running.client.data.GetDataset(pb.GetDatasetRequest(name=dataset), timeout=60).name == dataset
        listed = running.client.data.ListVersions(pb.ListVersionsRequest(parent=dataset), timeout=60)
        assert [one.name for one in listed.versions] == [version]
        assert not running.operation(started.name).done


@pytest.mark.timeout(600)  # two heads start in it, and Ray's client takes its time to give one up
def test_an_import_outlives_the_ray_head(settings: StoreSettings, tmp_path: Path, store: str, faults: Faults) -> None:
    (port,) = free_ports(1)
    with ExitStack() as stack:
        running, started = cut_off_from_ray(stack, settings, tmp_path, port)
        faults.add("SIGKILL Ray head", "import", store)
        version = metadata_of(started).version
        stack.enter_context(ray_head(num_cpus=2, port=port))
        done = running.client.wait(started, timeout_s=240)
        assert metadata_of(done).attempt >= 2
        running.assert_committed_once(version)
