"""Measures the seconds per optimiser step of our runs over a bare DDP loop on tensors in memory, and the cost of
checkpoints.

Our runs use torch's fused optimizer, and so does the bare loop of the bar. A second bare loop is written as most are,
`AdamW(parameters)`, which processes parameter by parameter on a CPU.

W processes joined by gloo, like Ray Train's workers, with one thread each. Contenders take turns in the same processes.
"""

from __future__ import annotations

import os
import pickle
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.train_loader import BATCH, MEAN, SPEC, STD
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.settings import StoreSettings
from shared.storage import open_store
from train_service.domain.spec import TrainingSpec
from train_service.jobs.run_records import RunRecords
from train_service.learning.ranks import Ranks
from train_service.records.event_log import TRAIN_KIND
from train_service.worker.loop import LoopConfig, Run

# A small convolutional network: a step takes tens of milliseconds, so that an overhead of one is visible.
MODEL = ModelSpec(builder="torchvision.shufflenet_v2_x0_5", in_channels=1, num_classes=10)
CHECKPOINT_EVERY = 20


def measure(settings: StoreSettings, images: Any, labels: Any, *, workers: int, pairs: int) -> dict[str, float]:
    """Return `step_overhead` and `checkpoint_cost`, as medians over pairs.

    `step_overhead` is the ratio of seconds per step between the first and the last, also over the bare loop with an
    unfused optimizer; `checkpoint_cost` is that of whole runs. Images are uint8 (rows, 28, 28), labels (rows,).
    """
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = multiprocessing
        processes.spawn(_rank, (workers, folder, settings, images, labels, pairs), nprocs=workers)
        times: list[dict[str, _Times]] = pickle.loads((Path(folder) / "result").read_bytes())
    overhead = [pair["ours"].step_s / pair["bare"].step_s for pair in times]
    over_unfused = [pair["ours"].step_s / pair["bare_unfused"].step_s for pair in times]
    cost = [pair["checkpointing"].run_s / pair["ours"].run_s for pair in times]
    return {
        "step_overhead": round(statistics.median(overhead), 4),
        "step_overhead_over_unfused": round(statistics.median(over_unfused), 4),
        "checkpoint_cost": round(statistics.median(cost), 4),
        **{
            f"{name}_step_ms": round(1e3 * statistics.median(pair[name].step_s for pair in times), 2)
            for name in times[0]
        },
        **{f"{name}_run_s": round(statistics.median(pair[name].run_s for pair in times), 3) for name in times[0]},
    }


@dataclass(frozen=True)
class _Times:
    """The times of a whole run, and of one step: the mean between the first step and the last."""

    run_s: float
    step_s: float


def _rank(rank: int, workers: int, folder: str, settings: StoreSettings, images: Any, labels: Any, pairs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=workers)
    ranks = Ranks(rank, workers, torch.device("cpu"))
    contenders: dict[str, Callable[[], _Times]] = {
        "bare": lambda: _bare(ranks, images, labels),
        "bare_unfused": lambda: _bare(ranks, images, labels, fused=False),
        "ours": lambda: _ours(ranks, settings, _spec(workers)),
        "checkpointing": lambda: _ours(
            ranks, settings, replace(_spec(workers), checkpoint_every_steps=CHECKPOINT_EVERY)
        ),
    }
    for run in contenders.values():  # imports, allocations
        run()
    seconds = [{name: run() for name, run in contenders.items()} for _ in range(pairs)]
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(seconds))
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter and then abort the process


def _spec(workers: int) -> TrainingSpec:
    return replace(SPEC, model=MODEL, global_batch_size=BATCH, num_workers=workers)


def _ours(ranks: Ranks, settings: StoreSettings, spec: TrainingSpec) -> _Times:
    """Run one epoch; the steps are timed by their own metrics."""
    store = open_store(settings)
    name: str = ranks.share(f"trainingJobs/b{uuid.uuid4().hex}")
    if ranks.rank == 0:
        jobs, now = Jobs(store, TRAIN_KIND), time.time()
        jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec={}, create_time=now, update_time=now))
        jobs.transition(name, lambda job: begin_attempt(job, now), attempt=1)
    dist.barrier()
    run = Run(LoopConfig(store=settings, job_name=name, attempt=1, spec=spec), ranks)
    dist.barrier()
    started = time.perf_counter()
    run.run()
    dist.barrier()
    run_s = time.perf_counter() - started
    points, _ = RunRecords(store).metrics(name, 0, 10_000, "")
    moments = [point.time for point in points if "loss" in point.values]
    return _Times(run_s, (moments[-1] - moments[0]) / (len(moments) - 1))


def _bare(ranks: Ranks, images: Any, labels: Any, *, fused: bool = True) -> _Times:
    """Run as many steps on the rank's rows as ready tensors in memory, without reports or checkpoints."""
    mine = slice(ranks.rank, None, ranks.world_size)
    inputs = ((torch.from_numpy(images[mine]).float().unsqueeze(1) / 255 - MEAN) / STD).contiguous()
    wanted = torch.from_numpy(labels[mine]).long()
    torch.manual_seed(0)
    model = build_model(MODEL)
    wrapped: nn.Module = DistributedDataParallel(model) if ranks.world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=fused)
    loss_of = nn.CrossEntropyLoss()
    size = BATCH // ranks.world_size
    dist.barrier()
    started = time.perf_counter()
    wrapped.train()
    moments: list[float] = []
    for begin in range(0, len(inputs), size):
        loss = loss_of(wrapped(inputs[begin : begin + size]), wanted[begin : begin + size])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
        moments.append(time.perf_counter())
    dist.barrier()
    return _Times(time.perf_counter() - started, (moments[-1] - moments[0]) / (len(moments) - 1))
