"""The loop of docs/extending.md that reads a shard: wherever it is resumed, it trains the epochs that are left."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch

from tests.unit.train_service.conftest import TRAIN_ROWS, Committed
from tests.unit.train_service.program.test_shards import SPEC
from train_service.program.shards import ProgramShards

EXTENDING = Path(__file__).parents[4] / "docs" / "extending.md"
EPOCHS, BATCH_ROWS, BATCHES_PER_REPORT = 2, 16, 4
BATCHES = -(-TRAIN_ROWS // BATCH_ROWS)
# The loop reports after each fourth batch, and once more after the epoch.
REPORTS = BATCHES // BATCHES_PER_REPORT + 1

Loop = Callable[[dict[str, Any]], None]


def loop_of_the_page() -> Loop:
    blocks = re.findall(r"```python\n(.*?)```", EXTENDING.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "get_dataset_shard" in block]
    module: dict[str, Any] = {}
    exec(code, module)
    loop: Loop = module["train_loop_per_worker"]
    return loop


class Runs:
    """Runs of the loop in this process, with the shard of a worker alone. `rows` has those of each pass of the last."""

    def __init__(self, committed: Committed, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._committed = committed
        self._folder = folder
        self._monkeypatch = monkeypatch
        self.rows: list[int] = []
        self._numbers = itertools.count()
        self.checkpoints: list[ray.train.Checkpoint] = []

    def run(self, resumed: ray.train.Checkpoint | None = None) -> None:
        shards = ProgramShards(self._committed.store, SPEC, 0, 1, {})
        self.rows, self.checkpoints = [], []

        def counted(batches: Any) -> Iterator[Any]:
            rows = 0
            for batch in batches:
                rows += len(batch["label"])
                yield batch
            self.rows.append(rows)

        def get_shard(name: str, state_dict: dict[str, Any] | None) -> Any:
            shard = shards.get(name, state_dict)

            def iter_torch_batches(**options: Any) -> Any:
                batches = shard.iter_torch_batches(**options)
                return _Counted(lambda: counted(batches), batches.state_dict)

            return SimpleNamespace(iter_torch_batches=iter_torch_batches)

        def report(_: dict[str, float], *, checkpoint: ray.train.Checkpoint) -> None:
            kept = self._folder / str(next(self._numbers))
            shutil.copytree(checkpoint.path, kept)
            self.checkpoints.append(ray.train.Checkpoint.from_directory(str(kept)))

        patch = self._monkeypatch.setattr
        patch(ray.train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 0))
        patch(ray.train, "get_checkpoint", lambda: resumed)
        patch(ray.train, "get_dataset_shard", get_shard)
        patch(ray.train, "report", report)
        patch(ray.train.torch, "prepare_model", Wrapped)
        loop_of_the_page()({"epochs": EPOCHS})


class Wrapped(torch.nn.Module):
    """A model as `prepare_model` wraps it on several workers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, rows: torch.Tensor) -> Any:
        return self.module(rows)


class _Counted:
    """Batches, each of whose passes is counted."""

    def __init__(self, begin: Callable[[], Iterator[Any]], state_dict: Callable[[], dict[str, Any]]) -> None:
        self._begin = begin
        self.state_dict = state_dict

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def test_a_loop_that_is_resumed_from_any_report_trains_the_rows_that_are_left(
    committed: Committed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BATCHES % BATCHES_PER_REPORT == 0, "an epoch's last batch has a report"
    runs = Runs(committed, tmp_path, monkeypatch)
    runs.run()
    whole = runs.checkpoints
    assert (runs.rows, len(whole)) == ([TRAIN_ROWS] * EPOCHS, EPOCHS * REPORTS)

    begun = 2 * BATCHES_PER_REPORT * BATCH_ROWS
    left = {1: [TRAIN_ROWS - begun, TRAIN_ROWS], REPORTS - 2: [TRAIN_ROWS], REPORTS - 1: [TRAIN_ROWS], -2: [], -1: []}
    found = {}
    for number in left:
        runs.run(whole[number])
        found[number] = runs.rows

    assert found == left
