"""The tutorials' cells as scripts, word for word but for the cell that installs packages; on some of the digits."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import millrace_client as mc
from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1.train_service_pb2 import Coverage, GetCoverageRequest
from shared.checkpoint import CheckpointEntry
from shared.checkpoint.format import verify_program_checkpoint
from shared.checkpoint.registry import CheckpointRegistry
from tests.support.cluster_storage import cluster_storage
from tests.support.code_folders import write_files
from tests.support.training import State, TrainStack
from tests.support.tutorial_cells import introduction_script, tutorial_script

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

ROWS = 1024
# What a notebook would show of the result.
SHOWN = "\nprint(result)\nprint(result.metrics_dataframe.to_dict('list'))\n"


@pytest.fixture(scope="module", autouse=True)
def storage() -> Iterator[Path]:
    with cluster_storage(ROWS) as folder:
        yield folder


@dataclass(frozen=True)
class Ended:
    job: res.TrainingJob
    logs: str
    warnings: list[str]
    checkpoints: list[CheckpointEntry]
    coverage: Callable[[int], Coverage]


def run(stack: TrainStack, folder: Path, script: str, **config: object) -> Ended:
    """Run it as `millrace train run cells.py --workers 2 --gpus-per-worker 0` does."""
    source = write_files(folder / "code", {"cells.py": script}) / "cells.py"
    with mc.connect(train=stack.service.address) as millrace:
        placement = res.Placement(gpus_per_worker=0)
        bundle = millrace.train.push_code(source)
        spec = mc.program_spec(bundle, "cells.py", config=config, num_workers=2, max_failures=0, placement=placement)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        watch = stack.client.watch(job.name, timeout_s=800)
        watch.rest()
        logs = "".join(one.text for one in millrace.train.stream_logs(job.name))
    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, f"{watch.jobs[-1].error}\n{logs}"
    entries = CheckpointRegistry(stack.store, job.name).entries()
    for one in entries:
        verify_program_checkpoint(stack.store, one.folder, one.manifest_sha256)

    def coverage(epoch: int) -> Coverage:
        found: Coverage = stack.client.rpc.GetCoverage(GetCoverageRequest(name=job.name, epoch=epoch), timeout=60)
        return found

    return Ended(watch.jobs[-1], logs, watch.of("warning"), entries, coverage)


def test_the_first_module_trains_and_shows_its_result(file_stack: TrainStack, tmp_path: Path) -> None:
    ended = run(file_stack, tmp_path, tutorial_script((1, 1, 17)) + SHOWN)

    assert [one.metrics["epoch"] for one in ended.checkpoints] == [0, 1]
    first, second = (one.metrics["loss"] for one in ended.checkpoints)
    assert second < first
    assert f"{{'loss': [{first}, {second}], 'epoch': [0, 1]}}" in ended.logs
    assert re.search(r"Result\(\s*metrics=\{'loss': ", ended.logs), ended.logs
    for epoch in (0, 1):
        coverage = ended.coverage(epoch)
        assert (coverage.witness, coverage.shard) == (Coverage.WITNESS_INDICES, "loader-0")
        assert (coverage.seen_once, coverage.missing, coverage.repeated) == (ROWS, 0, 0)
        assert coverage.epoch_done
    for rank in (0, 1):
        assert re.search(rf"metrics=\{{'loss': .*, 'epoch': 1\}} world_rank={rank}", ended.logs)
    assert any("num_workers 2 counts, and not ScalingConfig(num_workers=8)" in one for one in ended.warnings)


def test_the_second_module_reads_a_ray_dataset_of_its_own(file_stack: TrainStack, tmp_path: Path) -> None:
    ended = run(file_stack, tmp_path, tutorial_script((1, 1, 13), (2, 1, 8)))

    assert [one.metrics["epoch"] for one in ended.checkpoints] == [0]


def test_the_third_module_restores_its_trainer_and_ends_at_once(file_stack: TrainStack, tmp_path: Path) -> None:
    ended = run(file_stack, tmp_path, tutorial_script((1, 1, 13), (2, 1, 7), (3, 1, 6)) + SHOWN, num_epochs=2)

    assert [(one.metrics["epoch"], one.fit) for one in ended.checkpoints] == [(0, 1), (1, 1)]
    assert "fit() of 'fault-tolerant-MNIST-vit' has ended before" in ended.logs
    assert any("train_loop_config['num_epochs'] is 2" in one for one in ended.warnings)


def test_the_introductions_task_runs_without_its_gpu(file_stack: TrainStack, tmp_path: Path) -> None:
    ended = run(file_stack, tmp_path, introduction_script("dataset = MNIST(", "loaded_model = build_model()"))

    assert "Training output contents: ['metrics.csv', 'model.pt']" in ended.logs.replace(
        "['model.pt', 'metrics.csv']", "['metrics.csv', 'model.pt']"
    )
    assert any("ray.init() does nothing" in one for one in ended.warnings)
    assert any(
        "ray.remote(num_gpus=1, resources={'accelerator_type:T4': 0.0001}) is ray.remote()" in one
        for one in ended.warnings
    )
    assert any("has ended without a call of fit()" in one for one in ended.warnings)
    assert ended.checkpoints == []
    assert ended.job.best_checkpoint == ""
