"""C25: the tutorial's notebook on a GPU, unchanged: two workers on a quarter GPU each, its actor, and a deployment.

Its trainer is killed once, and a replica once. Without a GPU the cells with `.to("cuda")` are left out.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

import millrace_client as mc
from benchmarks.gpu_processes import CheckFailed
from millrace.train.v1 import resources_pb2 as res
from millrace_client.errors import MillraceError
from shared.checkpoint.registry import CheckpointRegistry
from shared.settings import StoreSettings
from tests.support.cluster_storage import cluster_storage
from tests.support.code_folders import write_files
from tests.support.needs import Missing
from tests.support.ray_head import RayHead, ray_head
from tests.support.service_process import running_service, store_environ
from tests.support.training import State, TrainStack, train_stack
from tests.support.tutorial_cells import tutorial_script

JOB = "tutorial"
WORKER, REPLICA = "ray::RayTrainWorker", "ray::ServeReplica"
# By whether there is a GPU; a CPU takes as long for fewer rows.
ROWS = {True: 7000, False: 1024}
ASKED = 1000
# The settings of all three modules' runs, on a tenth of the tutorial's rows; the third's rate is a hundred times the
# first's.
CONFIG: dict[bool, dict[str, int]] = {True: {"num_epochs": 3, "global_batch_size": 128}, False: {}}
RIGHT_SHARE = 0.95
# The notebook leaves TF32 on, and its actor gets all rows at once: if two digits are equally likely, kernels for
# another number of rows may choose the other.
MAX_APART = 3
TIMEOUT_S = {True: 200.0, False: 800.0}
ANSWERS = re.compile(r"ANSWERS (\[.*?\])")
# Inserted between the cell that calls the actor and the one that ends it.
ASK_ACTOR = f"""
held_out = MNIST(root="/mnt/cluster_storage/data", train=False)
asked = torch.stack([normalize_cpu(held_out[place][0]) for place in range({ASKED})])
print("ANSWERS", ray.get(worker.predict.remote(asked)), flush=True)
"""
SERVE = """
import os

import torch
from torchvision.models import resnet18


class Predictor:
    inputs = {"image": ("FP32", [1, 28, 28])}
    outputs = {"digit": ("INT64", [])}

    def __init__(self, checkpoint_dir):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = resnet18(num_classes=10)
        self.model.conv1 = torch.nn.Conv2d(1, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
        self.model.load_state_dict(torch.load(os.path.join(checkpoint_dir, "model.pt"), weights_only=True))
        self.model.to(self.device).eval()

    @torch.inference_mode()
    def predict(self, inputs):
        return {"digit": self.model(torch.from_numpy(inputs["image"]).to(self.device)).argmax(1).cpu().numpy()}
"""


def run_tutorial(folder: Path, *, gpus: bool) -> dict[str, Any]:
    """Run the tutorial and return the figures and, under `text`, a sentence.

    Raises `CheckFailed`.
    """
    folder.mkdir()
    settings = StoreSettings(url=(folder / "store").resolve().as_uri())
    try:
        script = tutorial_script((1, 1, 17), (2, 1, 8), (3, 1, 6))
        if gpus:  # the actor gets the last result, which is the third module's
            script = "\n\n".join((script, tutorial_script((1, 18, 19)), ASK_ACTOR, tutorial_script((1, 20, 20))))
        with ExitStack() as stack:
            storage = stack.enter_context(cluster_storage(ROWS[gpus]))
            head = stack.enter_context(ray_head(num_cpus=8, num_gpus=1 if gpus else 0))
            _say("a Ray head runs")
            service = stack.enter_context(train_stack(settings, head.address, folder))
            _say("the train service serves")
            try:
                return _run(service, head, storage, folder, script, gpus=gpus)
            except Exception as error:
                lines = "\n".join(_ends(service, folder))
                raise CheckFailed(f"{type(error).__name__}: {error}\n{head.said()}\n{lines}") from error
    except Missing as error:
        raise CheckFailed(str(error)) from None


def _run(stack: TrainStack, head: RayHead, storage: Path, folder: Path, script: str, *, gpus: bool) -> dict[str, Any]:
    begun = time.monotonic()
    with mc.connect(train=stack.service.address) as millrace:
        code = write_files(folder / "code", {"cells.py": script, "serve.py": SERVE})
        bundle = millrace.train.push_code(code)
        placement = res.Placement(gpus_per_worker=0.25 if gpus else 0, backend="gloo")
        spec = mc.program_spec(bundle, "cells.py", config=CONFIG[gpus], num_workers=2, placement=placement)
        job = millrace.train.create_training_job(JOB, spec).name
        _say("the job is created")
        _kill_trainer(stack, head, job, TIMEOUT_S[gpus])
        ended = _watched(stack, job)
        logs = "".join(one.text for one in millrace.train.stream_logs(job))
    if ended.state != State.STATE_SUCCEEDED:
        raise CheckFailed(f"{job} is {State.Name(ended.state)}: {ended.error.message}")
    trained_s = time.monotonic() - begun
    lost = ended.failures
    if not lost:
        raise CheckFailed("it lost no attempt, though its worker was killed")
    images, labels = _held_out(storage)
    entry = max(CheckpointRegistry(stack.store, job).entries(), key=lambda one: (one.fit, one.step))
    answers = _actors(logs) if gpus else None
    served, lineage = _served(stack, head, folder, entry.name, images, gpus=gpus)
    differ = 0 if answers is None else sum(one != other for one, other in zip(answers, served, strict=True))
    if differ > MAX_APART:
        raise CheckFailed(f"{differ} of {ASKED} served answers are not the actor's")
    right = float(np.mean(np.array(served) == labels))
    said = {
        "right_share": right,
        "trained_s": round(trained_s, 1),
        "attempts_lost": lost,
        "not_as_the_actor": differ,
        "lineage": lineage,
    }
    if gpus and right < RIGHT_SHARE:
        raise CheckFailed(f"{right:.1%} of {ASKED} predictions are right, and are to be {RIGHT_SHARE:.0%}")
    agree = f"all but {differ} as its actor answered" if gpus else "without its actor, which needs a GPU"
    said["text"] = (
        f"modules I to III ran in {trained_s:.0f} s over a kill; {right:.1%} of {ASKED} digits are recognised, {agree}"
        ", by a deployment over the kill of its replica; each answer names its checkpoint and code"
    )
    return said


def _kill_trainer(stack: TrainStack, head: RayHead, job: str, timeout_s: float) -> None:
    """Kill a worker of the run, once it has a checkpoint."""
    stack.client.watch(job, timeout_s=timeout_s).until("checkpoint_committed")
    for pid in head.processes(WORKER)[:1]:
        os.kill(pid, signal.SIGKILL)
    _say("a worker is killed")


def _watched(stack: TrainStack, job: str) -> res.TrainingJob:
    """Follow the job to its end, printing each checkpoint and each attempt."""
    watch = stack.client.watch(job)
    for update in watch._updates():
        if update.WhichOneof("update") == "event":
            event = update.event
            kind = event.WhichOneof("event")
            if kind in ("checkpoint_committed", "attempt_started", "attempt_ended", "warning"):
                _say(f"{kind}: {getattr(event, kind)}".replace("\n", " ")[:200])
    return watch.jobs[-1]


def _ends(stack: TrainStack, folder: Path) -> Iterator[str]:
    """Yield the ends of the logs of the job and the services."""
    with suppress(MillraceError), mc.connect(train=stack.service.address) as millrace:
        text = "".join(one.text for one in millrace.train.stream_logs(f"trainingJobs/{JOB}", follow=False))
        yield f"the job's log: …{text[-4000:]}"
    for log in sorted(folder.glob("*.log")):
        yield f"{log.name}: …{log.read_text(errors='replace')[-1500:]}"


def _say(text: str) -> None:
    print(f"    {time.strftime('%H:%M:%S')} {text}", flush=True)


def _held_out(storage: Path) -> tuple[Any, Any]:
    """Return float32 (rows, 1, 28, 28), normalised as in the tutorial, and the labels."""
    raw = storage / "data" / "MNIST" / "raw"
    pixels = np.frombuffer((raw / "t10k-images-idx3-ubyte").read_bytes(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    labels = np.frombuffer((raw / "t10k-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    return ((pixels[:ASKED] / np.float32(255) - np.float32(0.5)) / np.float32(0.5)), labels[:ASKED].astype(np.int64)


def _actors(log: str) -> list[int]:
    found = ANSWERS.search(log)
    if found is None:
        raise CheckFailed(f"the actor printed nothing: {log[-2000:]}")
    answers: list[int] = json.loads(found[1])
    return answers


def _served(
    stack: TrainStack, head: RayHead, folder: Path, checkpoint: str, images: Any, *, gpus: bool
) -> tuple[list[int], dict[str, str]]:
    environ = {**store_environ(stack.store.settings), "RAY_ADDRESS": head.address, "MILLRACE_OWN_CODE": "trusted"}
    fields = {"gpus_per_replica": 0.25} if gpus else {}
    with (
        running_service("inference_service", environ, folder / "inference.log") as service,
        mc.connect(inference=service.address) as millrace,
    ):
        millrace.deployments.create_deployment("digits", checkpoint, predictor="serve:Predictor", **fields).wait()
        _say("it is deployed")
        half = len(images) // 2
        first = _asked(lambda: millrace.inference.infer("digits", {"image": images[:half]}), TIMEOUT_S[gpus])
        replicas = head.processes(REPLICA)
        if not replicas:
            raise CheckFailed("no process of a replica was found to be killed")
        os.kill(replicas[0], signal.SIGKILL)
        second = _asked(lambda: millrace.inference.infer("digits", {"image": images[half:]}), TIMEOUT_S[gpus])
        for answer in (first, second):
            if answer.lineage.checkpoint != checkpoint or not answer.lineage.code_bundle:
                raise CheckFailed(f"an answer's lineage is {answer.lineage}, and not that of {checkpoint}")
        lineage = {"checkpoint": second.lineage.checkpoint, "code_bundle": second.lineage.code_bundle}
        digits = np.concatenate([one.outputs["digit"].reshape(-1) for one in (first, second)])
        millrace.deployments.delete_deployment("deployments/digits")
    return digits.tolist(), lineage


def _asked(ask: Callable[[], Any], timeout_s: float) -> Any:
    """Return the answer. Repeats the request while the replica restarts."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(MillraceError):
            return ask()
        if time.monotonic() > deadline:
            return ask()
        time.sleep(0.2)
