"""The train service as a foreign client sees it: generated stubs, and nothing of ours behind them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from millrace.train.v1 import train_service_pb2_grpc
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.service_process import ServiceProcess, running_service, store_environ
from tests.support.versions import commit_version, striped_digits

State = res.TrainingJob.State
# The first check of a model imports torch, which takes long on a busy machine.
CREATED_TIMEOUT_S = 400.0
# Attempts start processes that import torch, on a machine that may be busy with other things.
DONE_TIMEOUT_S = 500.0

# Of a job whose id `TrainClient.create` chose.
OF_A_TESTS_JOB = re.compile("trainingJobs/j[0-9a-f]{12}/")

VERSION = "datasets/digits/versions/v1"
TRAIN_ROWS, VALIDATION_ROWS = 600, 200


def commit_digits(store: ObjectStore, name: str = VERSION, first_label: int = 0) -> None:
    """600 rows `train`, 200 rows `validation`, with ten labels from `first_label` on."""
    splits = {"train": striped_digits(TRAIN_ROWS), "validation": striped_digits(VALIDATION_ROWS, 1)}
    commit_version(store, name, {split: (images, labels + first_label) for split, (images, labels) in splits.items()})


def digits_spec(**changes: Any) -> res.TrainingSpec:
    """A small network with BatchNorm on two workers: 20 steps an epoch, 97 % after three epochs."""
    spec = res.TrainingSpec(
        dataset_version=VERSION,
        model=res.Model(builder="torchvision.shufflenet_v2_x0_5", in_channels=1, num_classes=10),
        optimizer=res.Optimizer(name="AdamW", learning_rate=0.003),
        epochs=4,
        global_batch_size=30,
        num_workers=2,
        seed=7,
    )
    spec.transform.steps.add().to_float.SetInParent()
    normalize = spec.transform.steps.add().normalize
    normalize.mean.append(0.15)
    normalize.std.append(0.25)
    spec.MergeFrom(res.TrainingSpec(**changes))
    return spec


class TrainClient:
    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.rpc = train_service_pb2_grpc.TrainServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def send_raw(self, method: str, data: bytes) -> bytes:
        """Call a unary method with these bytes for a request."""
        call: Callable[..., bytes] = self._channel.unary_unary(f"/millrace.train.v1.TrainService/{method}")
        return call(data, timeout=60)

    def create(self, spec: res.TrainingSpec, job_id: str = "", **fields: Any) -> res.TrainingJob:
        job_id = job_id or f"j{uuid.uuid4().hex[:12]}"
        request = pb.CreateTrainingJobRequest(training_job_id=job_id, spec=spec, **fields)
        job: res.TrainingJob = self.rpc.CreateTrainingJob(request, timeout=CREATED_TIMEOUT_S)
        return job

    def get(self, name: str) -> res.TrainingJob:
        job: res.TrainingJob = self.rpc.GetTrainingJob(pb.GetTrainingJobRequest(name=name), timeout=60)
        return job

    def cancel(self, name: str, etag: str = "") -> res.TrainingJob:
        request = pb.CancelTrainingJobRequest(name=name, etag=etag)
        job: res.TrainingJob = self.rpc.CancelTrainingJob(request, timeout=60)
        return job

    def suspend(self, name: str, etag: str = "") -> res.TrainingJob:
        request = pb.SuspendTrainingJobRequest(name=name, etag=etag)
        job: res.TrainingJob = self.rpc.SuspendTrainingJob(request, timeout=60)
        return job

    def resume(self, name: str, etag: str = "") -> res.TrainingJob:
        request = pb.ResumeTrainingJobRequest(name=name, etag=etag)
        job: res.TrainingJob = self.rpc.ResumeTrainingJob(request, timeout=60)
        return job

    def checkpoints(self, name: str) -> list[res.Checkpoint]:
        answer = self.rpc.ListCheckpoints(pb.ListCheckpointsRequest(parent=name), timeout=60)
        return list(answer.checkpoints)

    def watch(self, name: str, after_sequence: int = 0, timeout_s: float = DONE_TIMEOUT_S) -> Watch:
        request = pb.WatchTrainingJobRequest(name=name, after_sequence=after_sequence)
        return Watch(self.rpc.WatchTrainingJob(request, timeout=timeout_s))

    def finished(self, name: str) -> res.TrainingJob:
        """The job once it is final."""
        watch = self.watch(name)
        watch.rest()
        return watch.jobs[-1]


@dataclass
class Watch:
    """A stream of updates, and what it brought so far."""

    stream: Any

    def __post_init__(self) -> None:
        self.jobs: list[res.TrainingJob] = []
        self.events: list[pb.TrainingEvent] = []

    def until(self, kind: str, where: Callable[[pb.TrainingEvent], bool] = lambda _: True) -> pb.TrainingEvent:
        """Read on to the first event of this kind that fits."""
        for update in self._updates():
            if update.WhichOneof("update") == "event":
                event: pb.TrainingEvent = update.event
                if event.WhichOneof("event") == kind and where(event):
                    return event
        raise AssertionError(f"the job ended without {kind}: {self.jobs[-1]}")

    def until_state(self, state: int) -> res.TrainingJob:
        for update in self._updates():
            if update.WhichOneof("update") == "job" and update.job.state == state:
                return self.jobs[-1]
        raise AssertionError(f"the job never was {State.Name(state)}: {self.jobs[-1]}")

    def rest(self) -> None:
        """Read to the end, which comes once the job is final."""
        for _ in self._updates():
            pass

    def of(self, kind: str) -> list[Any]:
        """The payloads of the events of this kind so far."""
        return [getattr(event, kind) for event in self.events if event.WhichOneof("event") == kind]

    def ends(self) -> str:
        """How each attempt so far ended, for a test that wanted another number of them."""
        return "\n".join(f"attempt ended: {one}" for one in self.of("attempt_ended"))

    def cancel(self) -> None:
        self.stream.cancel()

    def _updates(self) -> Iterator[pb.WatchTrainingJobResponse]:
        for update in self.stream:
            if update.WhichOneof("update") == "job":
                self.jobs.append(update.job)
            else:
                self.events.append(update.event)
            yield update


@dataclass(frozen=True)
class TrainStack:
    """A running train service and its store, which holds `datasets/digits/versions/v1`."""

    service: ServiceProcess
    client: TrainClient
    store: ObjectStore

    def all_keys(self) -> list[str]:
        """Everything in the store but what the jobs of other tests write as they go, what the reconciler remembers of
        the cluster, and the index that the service makes from the logs, to see what was left behind."""
        keys = (info.key for info in self.store.list() if not info.key.startswith(("clusters/", "index/")))
        return sorted(key for key in keys if not OF_A_TESTS_JOB.match(key))

    def weights(self, checkpoint: str) -> bytes:
        """The bytes of a checkpoint's weights."""
        from shared.checkpoint import load_checkpoint, resolve

        entry = resolve(self.store, "name", checkpoint)
        return load_checkpoint(self.store, entry.folder, entry.manifest_sha256).read("model.safetensors")


@contextmanager
def train_stack(
    settings: StoreSettings, ray_address: str, folder: Path, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[TrainStack]:
    """Start the service on a store that need not hold anything yet; its log goes below `folder`.

    `more` are variables of its environment."""
    store = open_store(settings)
    commit_digits(store)
    # Tests ask for more workers than there are, to see a job wait.
    environ = {
        **store_environ(settings),
        "RAY_ADDRESS": ray_address,
        "MILLRACE_CLUSTER_MAX": "CPU=1000",
        "MILLRACE_OWN_CODE": "trusted",
        **more,
    }
    with running_service("train_service", environ, folder / "train_service.log") as service:
        client = TrainClient(service.address)
        try:
            yield TrainStack(service, client, store)
        finally:
            client.close()
