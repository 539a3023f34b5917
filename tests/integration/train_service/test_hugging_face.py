"""`transformers.Trainer` in a user's own training function, on two real Ray Train workers."""

from __future__ import annotations

import json
import os
import re
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from safetensors.torch import load as load_tensors

import millrace_client as mc
from shared.checkpoint.format import load_program_checkpoint, read_program_file
from shared.checkpoint.registry import CheckpointEntry, CheckpointRegistry
from shared.storage import ObjectStore
from shared.transforms import arrow_schema, table_of
from tests.support.code_folders import write_files
from tests.support.training import State, TrainStack
from tests.support.transforming import commit_tables
from tests.unit.shared.transforms.samples import fitted, pipeline, schema_of_batch

pytestmark = pytest.mark.timeout(900)

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
# Rank 0 takes long to write a checkpoint's last files, while rank 1 has written its own; each report names its process.
PACED = """
import os
import time

import ray.train
import transformers
from hf import train_loop_per_worker, train_on_shard

report = ray.train.report
save = transformers.Trainer._save_optimizer_and_scheduler


def report_with_pid(metrics, **how):
    print("reports step", metrics.get("step"))
    report({**metrics, "pid": os.getpid()}, **how)


def save_slowly(trainer, folder):
    if trainer.args.should_save:
        time.sleep(0.5)
    save(trainer, folder)


def loop(config):
    ray.train.report = report_with_pid
    transformers.Trainer._save_optimizer_and_scheduler = save_slowly
    if config.get("on_shard"):
        train_on_shard(config)
    else:
        train_loop_per_worker(config)
"""
WRITTEN = {"optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"}


def example() -> str:
    """The training functions of the documents."""
    return "\n".join(one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Bert" in one)


@contextmanager
def stale_checkpoint() -> Iterator[None]:
    """What a lost attempt of a later step left in the example's `output_dir` on this node."""
    step = 90_000 + os.getpid()  # another run of the tests may be at work on this machine
    folder = Path(f"/tmp/hf-output/checkpoint-{step}")
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    try:
        yield
    finally:
        (folder / "trainer_state.json").unlink()
        folder.rmdir()


def commit_texts(store: ObjectStore, name: str, rows: int) -> None:
    """A version of as many texts as tokens, labelled by whether they are about a good film."""
    texts = [f"a {'good' if row % 3 else 'bad'} film of {row} minutes" for row in range(rows)]
    step = {"column": "text", "tokenize": {"vocabularySize": 320, "maxLength": 16}}
    batch = {"text": pa.array(texts), "labels": pa.array([int(row % 3 > 0) for row in range(rows)])}
    learnt = fitted(pipeline(step), batch)
    schema = arrow_schema(learnt.output(schema_of_batch(batch)))
    commit_tables(store, {"train": table_of(learnt(batch), schema)}, name)


def create(stack: TrainStack, folder: Path, dataset_version: str = "", **config: Any) -> str:
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(folder / "code", {"hf.py": example(), "paced.py": PACED}))
        spec = mc.program_spec(bundle, "paced:loop", config=config, dataset_version=dataset_version, num_workers=2)
        return millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec).name


def files_of(store: ObjectStore, entry: CheckpointEntry) -> dict[str, bytes]:
    """The checkpoint's files by path; raises where a digest does not hold."""
    content = load_program_checkpoint(store, entry.folder, entry.manifest_sha256)
    return {one.path: b"".join(read_program_file(store, entry.folder, one)) for one in content.files}


def assert_whole(store: ObjectStore, entry: CheckpointEntry, step: int, weights: str) -> None:
    """That the checkpoint is that of `step`, and has each file of both ranks."""
    files = files_of(store, entry)
    assert entry.metrics["step"] == step
    assert json.loads(files["checkpoint/trainer_state.json"])["global_step"] == step
    assert {f"checkpoint/{name}" for name in WRITTEN | {weights}} <= files.keys()
    assert load_tensors(files[f"checkpoint/{weights}"])


def test_each_checkpoint_is_whole_and_of_the_step_that_its_metrics_say(file_stack: TrainStack, tmp_path: Path) -> None:
    with stale_checkpoint():
        name = create(file_stack, tmp_path, steps=4, save_steps=2, lora_rank=4)
        job = file_stack.client.finished(name)

    assert job.state == State.STATE_SUCCEEDED, job
    entries = CheckpointRegistry(file_stack.store, name).entries()
    assert len(entries) == 2
    for entry, step in zip(entries, (2, 4), strict=True):
        assert_whole(file_stack.store, entry, step, "adapter_model.safetensors")


@pytest.mark.chaos
@pytest.mark.parametrize(("lora_rank", "weights"), [(0, "model.safetensors"), (4, "adapter_model.safetensors")])
def test_a_run_that_lost_a_rank_ends_with_the_weights_of_one_that_did_not(
    file_stack: TrainStack, tmp_path: Path, lora_rank: int, weights: str
) -> None:
    steps = list(range(2, 21, 2))
    config: dict[str, Any] = {"steps": steps[-1], "save_steps": 2, "lora_rank": lora_rank}
    store, client = file_stack.store, file_stack.client
    with stale_checkpoint():
        undisturbed = create(file_stack, tmp_path, **config)
        killed = create(file_stack, tmp_path, **config)
        watch = client.watch(killed, timeout_s=600)
        watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step >= 2)
        pids = {int(one.metrics["pid"]) for one in client.checkpoints(killed)}
        (pid,) = pids
        os.kill(pid, signal.SIGKILL)
        watch.rest()
        assert client.finished(undisturbed).state == State.STATE_SUCCEEDED

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
    assert watch.jobs[-1].failures == 1, watch.ends()
    _, resumed = watch.of("attempt_started")
    assert resumed.step >= 2
    entries = CheckpointRegistry(store, killed).entries()
    assert len(entries) == len(steps)
    for entry, step in zip(entries, steps, strict=True):
        assert_whole(store, entry, step, weights)
    said = store.get(f"{killed}/logs/a00002/r0000/00000000.txt").decode()
    assert f"reports step {steps[resumed.step]}\n" in said
    (last,) = CheckpointRegistry(store, undisturbed).entries()[-1:]
    path = f"checkpoint/{weights}"
    assert files_of(store, entries[-1])[path] == files_of(store, last)[path]


@pytest.mark.chaos
def test_rows_of_a_version_reach_the_trainer_in_their_order_over_a_kill(file_stack: TrainStack, tmp_path: Path) -> None:
    store, client, version, rows = file_stack.store, file_stack.client, "datasets/texts/versions/v1", 160
    commit_texts(store, version, rows)
    # Two passes of ten steps each: 160 rows in batches of 8 on two workers.
    config: dict[str, Any] = {"steps": 20, "save_steps": 2, "on_shard": True}
    undisturbed = create(file_stack, tmp_path, version, **config)
    killed = create(file_stack, tmp_path, version, **config)
    watch = client.watch(killed, timeout_s=600)
    watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step >= 2)
    os.kill(int(client.checkpoints(killed)[0].metrics["pid"]), signal.SIGKILL)
    watch.rest()

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
    assert watch.jobs[-1].failures == 1, watch.ends()
    assert client.finished(undisturbed).state == State.STATE_SUCCEEDED
    path = "checkpoint/model.safetensors"
    last, expected = (CheckpointRegistry(store, name).entries()[-1] for name in (killed, undisturbed))
    assert last.metrics["step"] == expected.metrics["step"] == 20
    assert files_of(store, last)[path] == files_of(store, expected)[path]
    with mc.connect(train=file_stack.service.address) as millrace:
        for epoch in range(2):
            found = millrace.train.get_coverage(undisturbed, epoch)
            assert (found.seen_once, found.repeated, found.missing) == (rows, 0, 0)
