"""Through how many files of the product a request and a training step run: `python -m tests.traces`.

A profiler records every function that the real code calls, on a small case without Ray: one ModelInfer of one row, from
the gRPC server over the replica's own socket to ResNet-18, and one rank of a small training run. A training step is its
batch, its learning and its report: from the reading of the rows to the first validation. The whole run has its start,
validation, checkpoints and records, too. A reader opens these files to follow the paths, so their number should stay
small.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import safetensors.torch
import torch

from inference import grpc_service_pb2 as oip
from inference_service.serve import served_model
from inference_service.serve.ray_serve import ServeModel
from inference_service.serve.replica import Loaded, ModelReplica, ReplicaSpec
from inference_service.serve.sockets import LocalReplicas
from shared.checkpoint import write_checkpoint
from shared.checkpoint.format import WEIGHTS
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.checkpoint_samples import content
from tests.support.inference_server import deployment, inference_server
from tests.support.versions import commit_version, striped_digits
from train_service.domain.spec import OptimizerSpec, TrainingSpec
from train_service.learning.ranks import Ranks
from train_service.records.event_log import TRAIN_KIND
from train_service.worker.loop import LoopConfig, Run

ROOT = Path(__file__).parents[1]
PRODUCT = ("data_service", "train_service", "inference_service", "shared")
VERSION = "datasets/digits/versions/v1"
JOB = "trainingJobs/traced"


class Calls:
    """The files and functions of the product that are called while `recording`, in every thread that starts later."""

    def __init__(self) -> None:
        self.recording = False
        # Threads whose calls are left out, by their `ident`.
        self.left_out: set[int] = set()
        self.functions: set[tuple[str, str, int]] = set()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if not self.recording or event != "call" or threading.get_ident() in self.left_out:
            return
        code = frame.f_code
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
            self.functions.add((str(path.relative_to(ROOT)), code.co_qualname, code.co_firstlineno))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def files(self) -> dict[str, int]:
        """How many functions of each file were called."""
        names = [file for file, _, _ in self.functions]
        return {file: names.count(file) for file in sorted(set(names))}


@contextmanager
def profiled() -> Iterator[Calls]:
    calls = Calls()
    threading.setprofile(calls.note)
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def trace_request() -> Calls:
    """One request of one row, after a first one that opened connections and started threads."""
    with profiled() as calls, tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(ask_twice(calls, load_replica(Path(folder))), 120))
    return calls


def load_replica(folder: Path) -> Loaded:
    """A replica as Ray Serve makes one, on the device that Ray gives it on a node without a GPU. It listens."""
    store = open_store(StoreSettings(url=(folder / "store").as_uri()))
    checkpoint = content(transforms=[{"steps": [{"column": "image", "toFloat": {}}]}])
    weights = safetensors.torch.save(build_model(checkpoint.model).state_dict())
    digest, _ = write_checkpoint(store, "checkpoint", checkpoint, {WEIGHTS: weights})
    spec = ReplicaSpec(store=store.settings, folder="checkpoint", manifest_sha256=digest, threads=1, max_batch_size=1)
    with patch.object(served_model, "assigned_device", lambda: torch.device("cpu")):
        replica = ModelReplica(spec, folder / "sockets")
    return asyncio.run(replica.describe())


async def ask_twice(calls: Calls, loaded: Loaded) -> None:
    (tensor,) = loaded.signature.raw
    row = np.zeros([1, *tensor.shape[1:]], np.uint8)
    inputs = [oip.ModelInferRequest.InferInputTensor(name=tensor.name, datatype=tensor.datatype, shape=row.shape)]
    request = oip.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=[row.tobytes()])
    # There is no handle of Ray's: a batch that did not find the socket would fail.
    model = ServeModel(cast(Any, None), LocalReplicas(loaded.sockets, 1, "m"))
    async with inference_server(deployment(signature=loaded.signature), model) as server:
        await server.stub.ModelInfer(request)
        with calls.recorded():
            answer = await server.stub.ModelInfer(request)
    assert answer.outputs, "the request was not answered"


def trace_step() -> Calls:
    """The first steps of a run until they are validated: rows, batches, learning, and reports over ranks.

    The threads of rank 0 that write events and metrics behind the steps are left out. They run before the first step.
    """
    with profiled() as calls, opened_run(checkpoint_every_steps=4) as run:
        train, validate = run._train, run._validate

        def traced(*arguments: Any) -> None:
            calls.left_out = {thread.ident or 0 for thread in threading.enumerate()} - {threading.get_ident()}
            calls.recording = True
            train(*arguments)

        def ended(*arguments: Any) -> dict[str, float]:
            calls.recording = False
            return validate(*arguments)

        with patch.object(run, "_train", traced), patch.object(run, "_validate", ended):
            run.run()
    return calls


def trace_training() -> Calls:
    """A whole run: its start, all steps, validation, checkpoints and records."""
    with profiled() as calls, opened_run() as run, calls.recorded():
        run.run()
    return calls


@contextmanager
def opened_run(checkpoint_every_steps: int = 2) -> Iterator[Run]:
    """The run of a job's only rank, before its first step. An epoch has four steps."""
    spec = TrainingSpec(
        dataset_version=VERSION,
        validation_split="validation",
        transform={"steps": [{"toFloat": {}}]},
        model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
        optimizer=OptimizerSpec(learning_rate=0.001),
        epochs=1,
        global_batch_size=20,
        checkpoint_every_steps=checkpoint_every_steps,
    )
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(StoreSettings(url=Path(folder).as_uri()))
        commit_version(store, VERSION, {"train": striped_digits(80), "validation": striped_digits(20, 1)})
        begin_job(store, spec)
        config = LoopConfig(store=store.settings, job_name=JOB, attempt=1, spec=spec)
        yield Run(config, Ranks(0, 1, torch.device("cpu")))


def begin_job(store: ObjectStore, spec: TrainingSpec) -> None:
    jobs, now = Jobs(store, TRAIN_KIND), time.time()
    config = {"training": spec.as_config()}
    jobs.create(JOB, JobRecord(uid="traced", name=JOB, spec=config, create_time=now, update_time=now))
    jobs.transition(JOB, lambda job: begin_attempt(job, time.time()), attempt=1)


def main() -> None:
    torch.set_num_threads(1)
    traces = (("request", trace_request), ("training step", trace_step), ("training run", trace_training))
    for what, trace in traces:
        calls = trace()
        files = calls.files()
        print(f"A {what} calls {len(calls.functions)} functions in {len(files)} files:")
        for file, count in files.items():
            print(f"  {count:4} {file}")


if __name__ == "__main__":
    main()
