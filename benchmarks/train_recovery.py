"""Seconds from the SIGKILL of a worker to the first new optimiser step.

Our service, and a plain TorchTrainer loop that keeps checkpoints: same model, rows, workers, Ray head and steps between
checkpoints.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from millrace.train.v1 import train_service_pb2 as pb
from tests.support.ray_head import RayHead
from tests.support.training import TrainClient, digits_spec
from tests.support.versions import striped_digits
from tests.support.waiting import wait_until

WORKERS, BATCH, ROWS, CHECKPOINT_EVERY = 2, 30, 600, 10
# Steps done before the blow, and far more than are needed after it.
STRIKE_AT, STEPS = 30, 100_000
WITHIN_S = 300.0


def ours(client: TrainClient, head: RayHead) -> float:
    """Of a job on the service behind `client`, whose version is that of `tests.support.training`."""
    job = client.create(digits_spec(epochs=5000, checkpoint_every_steps=CHECKPOINT_EVERY, num_workers=WORKERS)).name

    def steps_of(attempt: int) -> list[Any]:
        points = client.rpc.ListMetrics(pb.ListMetricsRequest(name=job, page_size=10_000), timeout=30).points
        return [point for point in points if point.attempt == attempt]

    wait_until(lambda: len(steps_of(1)) >= STRIKE_AT, "the first attempt's steps", WITHIN_S)
    struck = _strike(head)
    wait_until(lambda: bool(steps_of(2)), "the second attempt's steps", WITHIN_S)
    first: float = min(point.time.ToNanoseconds() / 1e9 for point in steps_of(2))
    client.cancel(job)
    client.finished(job)
    return first - struck


def plain_ray_train(head: RayHead) -> float:
    """Of the loop that Ray's documentation shows: `report` with a checkpoint, `get_checkpoint` at the start."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        log = Path(folder) / "steps"
        log.touch()
        trainer = TorchTrainer(
            _loop,
            train_loop_config={"log": str(log)},
            scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        )
        fit = pool.submit(trainer.fit)
        begun = _steps(log, 0)
        wait_until(lambda: begun() >= STRIKE_AT, "the first steps", WITHIN_S)
        struck = _strike(head)
        later = _steps(log, struck + 0.5)  # what was under way when it was struck is over by then
        wait_until(lambda: later() > 0, "the first step after it", WITHIN_S)
        first = min(entry for entry in _times(log) if entry > struck + 0.5)
        Path(folder, "stop").touch()
        fit.result()
        return first - struck


def _strike(head: RayHead) -> float:
    os.kill(max(head.processes("ray::RayTrainWorker")), signal.SIGKILL)
    return time.time()


def _times(log: Path) -> list[float]:
    return [float(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _steps(log: Path, after: float) -> Callable[[], int]:
    return lambda: sum(moment > after for moment in _times(log))


def _loop(config: dict[str, Any]) -> None:
    log = Path(config["log"])
    torch.set_num_threads(1)
    images, labels = striped_digits(ROWS)
    inputs = (torch.from_numpy(images).float().unsqueeze(1) / 255 - 0.15) / 0.25
    rank = ray.train.get_context().get_world_rank()
    import torchvision

    model = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    model.conv1[0] = torch.nn.Conv2d(1, 24, 3, 2, 1, bias=False)
    wrapped: Any = ray.train.torch.prepare_model(model)
    optimizer: Any = torch.optim.AdamW(wrapped.parameters(), lr=0.003)
    step = 0
    if (last := ray.train.get_checkpoint()) is not None:
        with last.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt")
        wrapped.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    size = BATCH // WORKERS
    while step < STEPS and not (log.parent / "stop").exists():
        begin = (step * BATCH + rank * size) % ROWS
        loss: Any = torch.nn.functional.cross_entropy(
            wrapped(inputs[begin : begin + size]), torch.from_numpy(labels[begin : begin + size])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            with log.open("a") as steps:
                steps.write(f"{time.time()}\n")
        if step % CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank == 0:
                    state = {"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder) / "state.pt")
                    checkpoint = Checkpoint.from_directory(folder)
                ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)
