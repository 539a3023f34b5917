"""Measures a whole loop, `train_loop_per_worker`, as a program of ours over the same loop in a bare `TorchTrainer`.

Both run the same text of the loop on the same Ray head, with as many workers, and keep their checkpoints on the same
disk. The loop times itself: its steps with a small report at each epoch's end, then reports of `REPORT_BYTES`. So the
start of processes does not count. Contenders take turns.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import millrace_client as mc
from tests.support.code_folders import write_files
from tests.support.training import State, TrainStack

WORKERS, EPOCHS, STEPS = 2, 3, 60
REPORT_BYTES, REPORTS = 100 * 1000 * 1000, 3
LOOP = """
import json
import os
import tempfile
import time

import ray.train
import ray.train.torch
import torch


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(32 * 7 * 7, 10),
    )


def report(rank, metrics, write):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            write(os.path.join(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        started = time.perf_counter()
        ray.train.report(metrics, checkpoint=checkpoint)
        return time.perf_counter() - started


def train_loop_per_worker(config):
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = config["steps"] * config["batch"] * ray.train.get_context().get_world_size()
    data = torch.utils.data.TensorDataset(torch.randn(rows, 1, 28, 28), torch.randint(0, 10, (rows,)))
    loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(data, config["batch"], shuffle=True))
    started = None
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # The first step waits for the other rank's start.
            started = started or time.perf_counter()
        report(rank, {"loss": loss.item(), "epoch": epoch}, lambda path: torch.save(model.module.state_dict(), path))
    loop_s = time.perf_counter() - started
    content = os.urandom(config["report_bytes"]) if rank == 0 else b""

    def write(path):
        with open(path, "wb") as file:
            file.write(content)

    reports_s = [report(rank, {"number": number}, write) for number in range(config["reports"])]
    if rank == 0:
        with open(config["times"], "w") as file:
            json.dump({"loop_s": loop_s, "report_s": sorted(reports_s)[len(reports_s) // 2]}, file)
"""


def measure(stack: TrainStack, folder: Path, pairs: int) -> dict[str, Any]:
    """Return the two ratios, as medians over pairs, and the seconds. The caller is a driver of the stack's Ray head."""
    code = write_files(folder / "code", {"loop.py": LOOP})
    times: list[tuple[dict[str, float], dict[str, float]]] = []
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(code)
        contenders: tuple[Callable[[], dict[str, float]], ...] = (
            lambda: _ours(millrace, stack, bundle.name, folder),
            lambda: _bare(folder),
        )
        for number in range(pairs):
            # The second contender finds a machine that the first has warmed.
            first, second = contenders if number % 2 == 0 else contenders[::-1]
            made = [first(), second()]
            ours, bare = made if number % 2 == 0 else made[::-1]
            times.append((ours, bare))
            print(f"whole loop: {json.dumps({'ours': ours, 'ray_train': bare})}", flush=True)
    parts = ("loop_s", "report_s")
    ratio = {name: statistics.median(ours[name] / bare[name] for ours, bare in times) for name in parts}
    return {
        "whole_loop_vs_ray_train": round(ratio["loop_s"], 3),
        "report_100mb_vs_ray_train": round(ratio["report_s"], 3),
        **{
            f"{name}_{what}": round(statistics.median(pair[place][what] for pair in times), 3)
            for place, name in enumerate(("whole", "ray_train"))
            for what in parts
        },
    }


def _config(times: Path) -> dict[str, Any]:
    return {
        "epochs": EPOCHS,
        "steps": STEPS,
        "batch": 64,
        "report_bytes": REPORT_BYTES,
        "reports": REPORTS,
        "times": str(times),
    }


def _ours(millrace: mc.Millrace, stack: TrainStack, bundle: str, folder: Path) -> dict[str, float]:
    times = folder / f"{uuid.uuid4().hex}.json"
    spec = mc.program_spec(bundle, "loop:train_loop_per_worker", config=_config(times), num_workers=WORKERS)
    job = millrace.train.create_training_job(f"b{uuid.uuid4().hex[:12]}", spec)
    ended = stack.client.finished(job.name)
    if ended.state != State.STATE_SUCCEEDED:
        raise RuntimeError(f"the loop did not end well: {ended}")
    return _read(times)


def _bare(folder: Path) -> dict[str, float]:
    times = folder / f"{uuid.uuid4().hex}.json"
    with tempfile.TemporaryDirectory(dir=folder) as storage:
        TorchTrainer(
            _whole_loop,
            train_loop_config=_config(times),
            scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    return _read(times)


def _read(times: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(times.read_text())
    return found


def _whole_loop(config: dict[str, Any]) -> None:
    names: dict[str, Any] = {}
    exec(LOOP, names)
    names["train_loop_per_worker"](config)
