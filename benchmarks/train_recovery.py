"""Measures the seconds from the SIGKILL of a worker to the first new optimiser step.

Compares our service with a plain TorchTrainer loop that keeps checkpoints: same model, rows, batch, workers and steps
between checkpoints, each on its own Ray head. Both take their steps with the same function, which records the time.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.support.numbered_rows import BATCH, ROWS, numbered_digits
from tests.support.ray_head import RayHead
from tests.support.waiting import wait_until
from tests.support.witnessed import WORKER, WitnessedStack, witnessed_spec

WORKERS, CHECKPOINT_EVERY = 2, 10
# This models long runs: the worker is killed after it has trained for this long, and once the idle processes have
# settled.
STRIKE_AFTER_S = 45.0
AT_REST_FOR_S, AT_REST_CPU_S = 15.0, 0.5
STEPS = 100_000
TIMEOUT_S = 300.0


def ours(place: WitnessedStack) -> dict[str, float]:
    """Return the seconds from the kill to `noticed`, `next_attempt_begun`, `resumed` (the weights are loaded) and
    `first_step`.
    """
    client = place.stack.client
    job = client.create(witnessed_spec(epochs=5000, workers=WORKERS, checkpoint_every_steps=CHECKPOINT_EVERY)).name
    struck, first_step = _recovery(place.witness, place.head)
    records = [json.loads(place.stack.store.get(info.key)) for info in place.stack.store.list(f"{job}/log")]
    states = [record["state"] for record in sorted(records, key=lambda record: int(record["number"]))]
    watch = client.watch(job)
    resumed = watch.until("attempt_started", lambda event: event.attempt == 2).time.ToNanoseconds() / 1e9
    watch.cancel()
    client.cancel(job)
    client.finished(job)
    moments = {
        "noticed": next(one["update_time"] for one in states if one["state"] == "RECOVERING"),
        "next_attempt_begun": next(one["update_time"] for one in states if one["attempt"] == 2),
        "resumed": resumed,
        "first_step": first_step,
    }
    return {name: moment - struck for name, moment in moments.items()}


def plain_ray_train(witness: Path, head: RayHead) -> float:
    """Measure the loop of Ray's documentation: `report` with a checkpoint, `get_checkpoint` at the start.

    The caller is a driver of that head.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        trainer = TorchTrainer(
            _loop,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        )
        fit = pool.submit(trainer.fit)
        struck, first_step = _recovery(witness, head)
        Path(folder, "stop").touch()
        fit.result()
        return first_step - struck


def _recovery(witness: Path, head: RayHead) -> tuple[float, float]:
    """Kill a worker in the middle of its steps, and wait for the steps of new processes.

    Return the time of the kill, and of the first step of the new processes.
    """
    before = set(witness.iterdir())
    wait_until(lambda: _first_step(witness, before) > 0, "the first step", TIMEOUT_S)
    time.sleep(STRIKE_AFTER_S)
    while _cpu_s_of_idle(head, AT_REST_FOR_S) > AT_REST_CPU_S:
        pass
    before = set(witness.iterdir())
    struck = time.time()
    os.kill(max(head.processes(WORKER)), signal.SIGKILL)
    wait_until(lambda: _first_step(witness, before) > 0, "the first step after the blow", TIMEOUT_S)
    return struck, _first_step(witness, before)


def _first_step(witness: Path, before: set[Path]) -> float:
    """Return the time of the first step of processes that are not in `before`; 0 if there is none."""
    texts = [path.read_text() for path in set(witness.iterdir()) - before]
    return min((json.loads(text.splitlines()[0])["time"] for text in texts if "\n" in text), default=0.0)


def _cpu_s_of_idle(head: RayHead, timeout_s: float) -> float:
    """Return the CPU seconds that idle worker processes use."""

    def ticks() -> int:
        total = 0
        for pid in idle:
            with suppress(OSError):  # a process that Ray has ended
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total

    idle = head.processes("ray::IDLE")
    before = ticks()
    time.sleep(timeout_s)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK")


def _loop(config: dict[str, Any]) -> None:
    import torchvision
    from millrace_example import witness  # type: ignore[import-not-found]  # put there by witness_environment

    folder = Path(config["folder"])
    torch.set_num_threads(1)
    images, labels = numbered_digits()
    inputs, wanted = torch.from_numpy(images).float().unsqueeze(1) / 255, torch.from_numpy(labels)
    rank = ray.train.get_context().get_world_rank()
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
    while step < STEPS and not (folder / "stop").exists():
        begin = (step * BATCH + rank * size) % ROWS
        rows = slice(begin, begin + size)
        loss, _ = witness.step(wrapped, inputs[rows], wanted[rows], torch.nn.functional.cross_entropy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            _report(wrapped, optimizer, step, loss.item(), keep=rank == 0)


def _report(wrapped: Any, optimizer: Any, step: int, loss: float, *, keep: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if keep:
            state = {"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss}, checkpoint=checkpoint)
