"""What a rank of a sharded model holds in memory at its start, at a checkpoint and when it goes on from one.

Two ranks on CPUs (gloo) share a multi-layer perceptron with AdamW. Measured is each rank's greatest resident size in a
phase, less that of the same rank before it has a model, over the size of its own shard: parameters, gradients and
optimizer. Prints one JSON line.

    .venv/bin/python -m benchmarks.shard_memory --megabytes 2000
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry
from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.transforms import TensorSpec
from train_service.checkpoints.tensor_files import restore_shards
from train_service.checkpoints.writing_and_restoring import CheckpointWriter, ShardWriter, new_folder
from train_service.domain.spec import FSDP, OptimizerSpec, Placement, TrainingSpec
from train_service.learning.learner import Learner
from train_service.learning.ranks import Ranks
from train_service.learning.sharding import local_rows
from train_service.loading.loader import Batch

JOB = "trainingJobs/memory"
WIDTH = 2048
RANKS = 2
# Parameters, gradients and the two moments of AdamW.
COPIES = 4
BUCKET_BYTES = 32 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="of parameters, gradients and optimizer together")
    megabytes = parser.parse_args().megabytes
    layers = max(1, megabytes * 10**6 // (COPIES * WIDTH * WIDTH * 4))
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        context: Any = torch.multiprocessing
        context.start_processes(measure, (folder, layers), nprocs=RANKS, start_method="spawn")
        ranks = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    print(json.dumps({"layers": layers, "ranks": ranks}))


def measure(rank: int, folder: str, layers: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    ranks = Ranks(rank, RANKS, torch.device("cpu"))
    round_of(ranks, folder, "idle", 1, 64, Phases())  # all is imported and all pools are there
    phases = Phases()
    round_of(ranks, folder, "measured", layers, WIDTH, phases)
    shard = COPIES * phases.shard_bytes
    ratios = {f"{name}_ratio": round((grown - BUCKET_BYTES) / shard, 3) for name, grown in phases.grown.items()}
    measured = {"shard_mb": round(shard / 1e6), **{f"{name}_mb": round(v / 1e6) for name, v in phases.grown.items()}}
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps({**measured, **ratios}))
    dist.barrier()
    os._exit(0)


class Phases:
    def __init__(self) -> None:
        gc.collect()
        self._idle = resident_bytes("VmRSS:")
        self.grown: dict[str, int] = {}
        self.shard_bytes = 0

    def run(self, name: str, phase: Callable[[], Any]) -> Any:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self.grown[f"before_{name}"] = resident_bytes("VmRSS:") - self._idle
        result = phase()
        self.grown[name] = resident_bytes("VmHWM:") - self._idle
        return result


def round_of(ranks: Ranks, folder: str, name: str, layers: int, width: int, phases: Phases) -> None:
    spec = TrainingSpec(
        dataset_version="datasets/none/versions/none",
        input_column="x",
        model=ModelSpec(builder="mlp", in_channels=width, num_classes=2, kwargs={"hidden": [width] * layers}),
        optimizer=OptimizerSpec(name="AdamW", learning_rate=0.001),
        placement=Placement(parallel=FSDP),
        epochs=1,
        global_batch_size=4,
        num_workers=RANKS,
        lanes=RANKS,
    )

    def build() -> Learner:
        return Learner(spec, ranks, TensorSpec("x", "float32", (width,)), 1, 1)

    learner: Learner = phases.run("start", build)
    phases.shard_bytes = sum(local_rows(one)[1].nbytes for one in learner.model.parameters())
    learner.prepare()
    rows = np.arange(2) + 2 * ranks.rank
    learner.step(Batch(0, 0, np.ones((2, width), np.float32), rows % 2, rows, 4))
    store = open_store(StoreSettings(url=f"file://{folder}/{name}"))
    trained = [learner]
    entry = phases.run("save", lambda: save(ranks, store, trained.pop(), spec))
    del learner
    other = build()

    def restore() -> None:
        restore_shards(store, entry, *other.shards)  # type: ignore[misc]

    phases.run("restore", restore)


def save(ranks: Ranks, store: Any, learner: Learner, spec: TrainingSpec) -> CheckpointEntry:
    registry = CheckpointRegistry(store, JOB)
    committed: list[CheckpointEntry] = []
    folder = ranks.share(new_folder(registry, 1, 1))
    learner.check_shards()
    weights, state = learner.model.state_dict(), {**learner.sharded_state(), "history": []}
    if ranks.rank == 0:
        registry.fence(1, spec.checkpoints.ranking)
        with CheckpointWriter(store, registry, 1, committed.append) as writer:
            writer.save_shards(lambda: content_of(spec), folder, RANKS, weights, state)
            writer.wait()
    else:
        with ShardWriter(store, ranks.rank, RANKS) as uploads:
            uploads.save(folder, weights, state)
            uploads.wait()
    entry: CheckpointEntry = ranks.share(committed[0] if committed else None)
    return entry


def content_of(spec: TrainingSpec) -> CheckpointContent:
    return CheckpointContent(
        training_job=JOB,
        dataset_version=spec.dataset_version,
        dataset_manifest_sha256="",
        step=1,
        epoch=0,
        seed=0,
        metrics={},
        model=spec.model,
        ingested=[],
        transforms=[],
        input_column="x",
    )


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
