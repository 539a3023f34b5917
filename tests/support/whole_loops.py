"""A whole training loop on real workers that reports no further than its test lets it, for tests that strike it.

Every process that takes part writes down which reports it sent and which returned.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import millrace_client as mc
from millrace.train.v1 import resources_pb2 as res
from shared.checkpoint.format import verify_program_checkpoint
from shared.checkpoint.registry import CheckpointEntry, CheckpointRegistry
from tests.support.code_folders import write_files
from tests.support.training import TrainStack, Watch
from tests.support.versions import commit_version, striped_digits

VERSION = "datasets/odd/versions/v1"
# Two workers leave out one row of an epoch.
ROWS = 301
REPORTS_PER_EPOCH = 5
WATCH_TIMEOUT_S = 1700.0
HANG_AFTER_S = 1200

# The loop of docs/extending.md that reads a shard, with `state_dict` saved by rank 0 alone.
CODE = """
import os
import tempfile
import time
from pathlib import Path

import ray.train
import ray.train.torch
import torch


def loop(config):
    torch.manual_seed(7)
    rank = ray.train.get_context().get_world_rank()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    plain = getattr(model, "module", model)
    steps, reports, position = 0, 0, None
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps, reports, position = state["steps"], state["reports"], state["shard"]
    shard = ray.train.get_dataset_shard("train", state_dict=position)
    batches = shard.iter_torch_batches(batch_size=15, dtypes={"image": torch.float32, "label": torch.int64})
    witness = Path(config["folder"], f"rank-{rank}-{os.getpid()}")

    def note(text):
        with witness.open("a") as opened:
            opened.write(text + "\\n")

    def report(loss):
        nonlocal reports
        while int(Path(config["folder"], "allowed").read_text()) <= reports:
            time.sleep(0.05)
        reports += 1
        note(f"sends {reports}")
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
                state.update(shard=batches.state_dict(), steps=steps, reports=reports)
                torch.save(state, os.path.join(folder, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            try:
                ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)
            except BaseException:
                note(f"cannot send {reports}")
                raise
        note(f"has sent {reports}")

    # The epoch is the shard's, which is the next one right after the last batch.
    while batches.state_dict()["epoch"] < config["epochs"]:
        for batch in batches:
            loss = torch.nn.functional.cross_entropy(model(batch["image"] / 255), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % 2 == 0:
                report(loss)
"""


def commit_rows(stack: TrainStack) -> None:
    commit_version(stack.store, VERSION, {"train": striped_digits(ROWS)})


@dataclass(frozen=True)
class LoopRun:
    """A job of that loop. `folder` holds how many reports are allowed, and what its processes wrote down."""

    stack: TrainStack
    millrace: mc.Millrace
    job: res.TrainingJob
    folder: Path

    def allow(self, reports: int) -> None:
        allow(self.folder, reports)

    def watch(self) -> Watch:
        """A stream from the job's first event on."""
        return self.stack.client.watch(self.job.name, timeout_s=WATCH_TIMEOUT_S)

    def started(self, attempt: int) -> tuple[int, int]:
        """The first attempt from that one on that has started, and the report that it goes on after.

        An attempt may be lost before it starts, where Ray has not yet noticed that a node is dead.
        """
        watch = self.watch()
        event = watch.until("attempt_started", lambda event: event.attempt >= attempt)
        watch.cancel()
        return int(event.attempt), int(event.attempt_started.step)

    def committed(self, report: int, attempt: int) -> None:
        """Return once the attempt has committed that report."""
        watch = self.watch()
        watch.until(
            "checkpoint_committed",
            lambda event: event.attempt == attempt and event.checkpoint_committed.step >= report,
        )
        watch.cancel()

    def rest(self) -> Watch:
        """Let the loop run to its end."""
        self.allow(10**9)
        watch = self.watch()
        watch.rest()
        return watch

    def entries(self) -> list[CheckpointEntry]:
        return CheckpointRegistry(self.stack.store, self.job.name).entries()

    def final_state(self) -> dict[str, Any]:
        """What the last checkpoint holds, whose digests are verified."""
        entry = max(self.entries(), key=lambda one: one.step)
        content = verify_program_checkpoint(self.stack.store, entry.folder, entry.manifest_sha256)
        (file,) = content.files
        data = self.stack.store.get(f"{entry.folder}/{file.object}")
        return dict(torch.load(io.BytesIO(data), weights_only=True))

    def coverage(self) -> list[tuple[int, int, int]]:
        """Rows seen once, repeated and missing, by epoch."""
        found = [self.millrace.train.get_coverage(self.job.name, epoch) for epoch in range(self._epochs)]
        return [(one.seen_once, one.repeated, one.missing) for one in found]

    @property
    def _epochs(self) -> int:
        return max(int(entry.step) for entry in self.entries()) // REPORTS_PER_EPOCH


@contextmanager
def loop_run(stack: TrainStack, folder: Path, *, epochs: int, allowed: int, **fields: Any) -> Iterator[LoopRun]:
    """Start a job of the loop, which is cancelled if the body fails: it would keep its workers from the next test.

    `fields` are further ones of the specification.
    """
    folder.mkdir()
    allow(folder, allowed)
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(folder / "code", {"train.py": CODE}))
        config = {"epochs": epochs, "folder": str(folder)}
        fields = {"num_workers": 2, "max_failures": 100, "seed": 7, **fields}
        spec = mc.program_spec(bundle, "train:loop", config=config, dataset_version=VERSION, **fields)
        spec.program.hang_after.FromSeconds(HANG_AFTER_S)  # it stands at its gate until the test goes on
        run = LoopRun(stack, millrace, millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec), folder)
        try:
            yield run
        except BaseException:
            stack.client.cancel(run.job.name)
            raise


def allow(folder: Path, reports: int) -> None:
    """Let the loop send that many reports over all attempts."""
    written = folder / "allowed.new"
    written.write_text(str(reports))
    written.replace(folder / "allowed")


def assert_equal_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, optimizer and position are equal, bit for bit."""
    assert sorted(found) == sorted(expected)
    flat_found, flat_expected = dict(_flat(found)), dict(_flat(expected))
    assert flat_found.keys() == flat_expected.keys()
    for name, value in flat_expected.items():
        same = torch.equal(flat_found[name], value) if isinstance(value, torch.Tensor) else flat_found[name] == value
        assert same, f"{name} differs"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{name}[{number}]")
    else:
        yield name, value
