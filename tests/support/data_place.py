"""A data service on a store and a Ray head of the test's own, and what it makes of some digits while it is struck."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
from google.longrunning import operations_pb2

from data_service.version_attempt import KEPT
from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion
from shared.dataset_version.manifest import QUARANTINE, tensor_array
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.integration.data_service.client import DataClient, imported
from tests.support import custom_functions
from tests.support.chunk_sender import retry_on_outage
from tests.support.process_states import stop_process
from tests.support.ray_head import RayHead
from tests.support.refusals import refused
from tests.support.service_process import ServiceProcess, running_service, store_environ
from tests.support.waiting import wait_until

DONE_TIMEOUT_S = 400.0
# An idle attempt actor's title, which that of one at work begins with.
STANDBY, AT_WORK = "ray::AttemptActor", "ray::AttemptActor.run"
# Tasks of a transform, while they have rows.
WORKER = "ray::FlatMap(PartsTask)"
FUNCTIONS = ("gated", "slow", "raising", "hanging", "crashing")


def digits_stream(row_count: int, seed: int = 1) -> bytes:
    """An Arrow stream of noisy images, uint8 (28, 28), and labels 0..9; that of the last row is `LAST`."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (row_count, 28, 28), np.uint8)
    labels = generator.integers(0, 10, row_count)
    labels[-1] = custom_functions.LAST
    table = pa.table({"image": tensor_array(images), "label": labels})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=512)
    return bytes(sink.getvalue())


def normalising(*functions: str, images: bool = True, timeout_s: float = 120.0) -> transform_pb2.Transform:
    """Images to normalised floats, if there are `images`; each of `custom_functions` named gets the labels first."""
    step = transform_pb2.TransformStep
    steps = [
        step(
            custom=transform_pb2.Custom(
                function=f"{custom_functions.MODULE}:{name}", columns=["label"], timeout_s=timeout_s
            )
        )
        for name in functions
    ]
    if images:
        steps.append(step(column="image", to_float=transform_pb2.ToFloat()))
        steps.append(step(column="image", normalize=transform_pb2.Normalize(mean=[0.1307], std=[0.3081])))
    return transform_pb2.Transform(steps=steps)


class Gate:
    """Where `custom_functions.gated` waits, and `slow` is slow. It must be made before the head is started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.environ[custom_functions.GATE_VARIABLE] = str(folder)

    def shut(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()

    def open(self) -> None:
        (self._folder / "open").touch()

    def open_but_for_the_last(self) -> None:
        (self._folder / "ajar").touch()

    @contextmanager
    def slow(self) -> Iterator[None]:
        """While the body runs."""
        sign = self._folder / "slow"
        sign.touch()
        try:
            yield
        finally:
            sign.unlink(missing_ok=True)

    def waiting(self) -> list[int]:
        """The ids of the live processes that have come to it with rows other than the last."""
        return self._come("begun-")

    def at_the_last(self) -> list[int]:
        """The ids of the live processes that have come to it with the last rows."""
        return self._come("last-")

    def _come(self, prefix: str) -> list[int]:
        pids = [int(file.name.removeprefix(prefix)) for file in self._folder.glob(f"{prefix}*")]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@dataclass
class DataPlace:
    """`struck` counts the processes that were killed."""

    service: ServiceProcess
    client: DataClient
    store: ObjectStore
    settings: StoreSettings
    head: RayHead
    struck: int = 0
    _dataset: str = field(default="", repr=False)

    @property
    def dataset(self) -> str:
        if not self._dataset:
            request = pb.CreateDatasetRequest(dataset_id=f"d{uuid.uuid4().hex[:12]}")
            self._dataset = str(self.client.data.CreateDataset(request, timeout=60).name)
        return self._dataset

    def start_upload(self) -> str:
        request = pb.StartUploadRequest(parent=self.dataset, request_id=str(uuid.uuid4()))
        return str(retry_on_outage(lambda: self.client.data.StartUpload(request, timeout=60)).name)

    def acknowledged(self, upload: str) -> int:
        request = pb.GetUploadRequest(name=upload)
        return int(retry_on_outage(lambda: self.client.data.GetUpload(request, timeout=60)).acknowledged_size)

    def import_request(self, *sources: pb.ImportSource) -> pb.ImportVersionRequest:
        return pb.ImportVersionRequest(parent=self.dataset, sources=sources, request_id=str(uuid.uuid4()))

    def start_import(self, upload: str) -> operations_pb2.Operation:
        return self.start_import_of(pb.ImportSource(split="train", arrow=pb.ArrowSource(uri=upload)))

    def start_import_of(self, *sources: pb.ImportSource) -> operations_pb2.Operation:
        request = self.import_request(*sources)
        return retry_on_outage(lambda: self.client.data.ImportVersion(request, timeout=60))

    def transform_request(
        self, source: str, transform: transform_pb2.Transform, **fields: Any
    ) -> pb.TransformVersionRequest:
        return pb.TransformVersionRequest(
            parent=self.dataset, source=source, transform=transform, request_id=str(uuid.uuid4()), **fields
        )

    def start_transform(
        self, source: str, transform: transform_pb2.Transform, **fields: Any
    ) -> operations_pb2.Operation:
        request = self.transform_request(source, transform, **fields)
        return retry_on_outage(lambda: self.client.data.TransformVersion(request, timeout=60))

    def start_prediction(self, source: str, checkpoint: str, **fields: Any) -> operations_pb2.Operation:
        request = pb.PredictVersionRequest(
            parent=self.dataset, source=source, checkpoint=checkpoint, request_id=str(uuid.uuid4()), **fields
        )
        return retry_on_outage(lambda: self.client.data.PredictVersion(request, timeout=60))

    def operation(self, name: str) -> operations_pb2.Operation:
        request = operations_pb2.GetOperationRequest(name=name)
        return retry_on_outage(lambda: self.client.operations.GetOperation(request, timeout=60))

    def ended(self, started: operations_pb2.Operation, timeout_s: float = DONE_TIMEOUT_S) -> operations_pb2.Operation:
        """The operation once it is done, whatever is killed meanwhile."""
        until = time.monotonic() + timeout_s
        while not (operation := self.operation(started.name)).done:
            assert time.monotonic() < until, f"{operation}\n{self.said()}"
            time.sleep(0.1)
        return operation

    def imported(self, upload: str) -> DatasetVersion:
        return self._made(self.start_import(upload))

    def transformed(self, source: str, transform: transform_pb2.Transform, **fields: Any) -> DatasetVersion:
        return self._made(self.start_transform(source, transform, **fields))

    def _made(self, started: operations_pb2.Operation) -> DatasetVersion:
        done = self.ended(started)
        return self.assert_made_once(done, self.get(self.version_of(done)).manifest_sha256)

    def version_of(self, started: operations_pb2.Operation) -> str:
        for metadata in (pb.ImportVersionMetadata(), pb.TransformVersionMetadata(), pb.PredictVersionMetadata()):
            if started.metadata.Unpack(metadata):
                return str(metadata.version)
        raise AssertionError(started)

    def assert_invisible(self, version: str) -> None:
        """Nothing of a version that is being made can be read."""
        assert self.get(version).state == DatasetVersion.STATE_CREATING
        refusal = refused(lambda: self.client.stream(version))
        assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION, refusal

    def files_of(self, version: str) -> int:
        """How many Parquet files there are of a version that is being made."""
        return sum(info.key.endswith(".parquet") for info in self.store.list(f"{version}/data"))

    def records_of(self, version: str) -> list[str]:
        """The keys of the records of finished parts."""
        return [info.key for info in self.store.list(f"{version}/data") if f"/{KEPT}/" in info.key]

    def get(self, version: str) -> DatasetVersion:
        request = pb.GetVersionRequest(name=version)
        found: DatasetVersion = retry_on_outage(lambda: self.client.data.GetVersion(request, timeout=60))
        return found

    def assert_made_once(self, done: operations_pb2.Operation, digest: str) -> DatasetVersion:
        """One record of success, the undisturbed manifest, and no file that it does not name."""
        assert done.WhichOneof("result") == "response", f"{done}\n{self.said()}"
        version = imported(done)
        records = [json.loads(self.store.get(info.key)) for info in self.store.list(f"{version.name}/log")]
        states = [record["state"]["state"] for record in sorted(records, key=lambda record: int(record["number"]))]
        assert states.count("SUCCEEDED") == 1, states
        assert states[-1] == "SUCCEEDED", states
        assert version.manifest_sha256 == digest
        assert self.get(version.name).state == DatasetVersion.STATE_ACTIVE
        # The records of parts are deleted once the log names the version.
        wait_until(lambda: not self.records_of(version.name), "records of parts to be deleted")
        there = sorted(info.key.rsplit("/", 1)[-1] for info in self.store.list(f"{version.name}/data"))
        named = ["manifest.json", "report.json", *(file.path for file in version.files)]
        assert there == sorted([*named, QUARANTINE] if version.quarantined_row_count else named)
        assert self.damages(version.name) == []
        return version

    def damages(self, version: str) -> list[Any]:
        answers = self.client.data.VerifyVersion(pb.VerifyVersionRequest(name=version), timeout=60)
        return [damage for answer in answers for damage in answer.damages]

    def strike_service(self) -> None:
        """SIGKILL; it is for the caller to start it again."""
        self.service.kill()
        self.struck += 1

    def at_work(self) -> list[int]:
        """The ids of the attempts' processes, of which there is one or more; waits for it."""
        wait_until(lambda: bool(self.head.processes(AT_WORK)), "the attempt")
        return self.head.processes(AT_WORK)

    def at_rest(self) -> None:
        """Wait until no attempt is at work: the next one is not to be mistaken for one that ends."""
        wait_until(lambda: not self.head.processes(AT_WORK), "earlier attempts to end")

    def workers(self) -> list[int]:
        """The ids of the processes that have rows before them."""
        return self.head.processes(WORKER)

    def spares(self) -> list[int]:
        """The ids of the processes that wait for the next attempt."""
        return sorted(set(self.head.processes(STANDBY)) - set(self.head.processes(AT_WORK)))

    @contextmanager
    def halted(self) -> Iterator[None]:
        """No attempt at work does anything while the body runs."""
        pids = self.at_work()
        for pid in pids:
            with suppress(ProcessLookupError):
                stop_process(pid)
        try:
            yield
        finally:
            _signal(pids, signal.SIGCONT)

    def strike_pids(self, pids: list[int]) -> None:
        self.struck += _signal(pids, signal.SIGKILL)

    def said(self) -> str:
        """The end of the service's log, and how its Ray head fares."""
        return f"{self.service.log.read_text(errors='replace')[-3000:]}\n{self.head.said()}"


def _signal(pids: Iterable[int], sent: signal.Signals) -> int:
    """Return how many of the processes there were."""
    there = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sent)
            there += 1
    return there


@contextmanager
def data_place(
    settings: StoreSettings, head: RayHead, folder: Path, behind: StoreSettings | None = None, **environ: str
) -> Iterator[DataPlace]:
    """`behind` is how the test itself reaches the store, where the service goes through a proxy."""
    folder.mkdir(parents=True, exist_ok=True)
    functions = ",".join(f"{custom_functions.MODULE}:{name}" for name in FUNCTIONS)
    wanted: Mapping[str, str] = {
        **store_environ(settings),
        "RAY_ADDRESS": head.address,
        "MILLRACE_IMPORT_ROOTS": str(folder),
        "MILLRACE_CUSTOM_TRANSFORMS": functions,
        **environ,
    }
    with running_service("data_service", wanted, folder / "service.log") as service:
        client = DataClient(service.address)
        try:
            yield DataPlace(service, client, open_store(behind or settings), settings, head)
        finally:
            client.close()
