"""A script that makes a TorchTrainer and calls fit(), as a job on real Ray Train workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from millrace.train.v1 import resources_pb2 as res
from shared.checkpoint.registry import CheckpointRegistry
from tests.support.code_folders import write_files
from tests.support.ray_head import RayHead
from tests.support.training import State, TrainStack

pytestmark = pytest.mark.timeout(900)

# A module of the folder, a second run of the same name, and what a script does with results.
CELLS = """
import json
import os
import tempfile
import time

import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from steps import double

ray.init(ignore_reinit_error=True)


@ray.remote(num_cpus=0)
def task(value):
    return value + 1


def loop(config):
    rank = ray.train.get_context().get_world_rank()
    checkpoint = ray.train.get_checkpoint()
    begin = 0
    if checkpoint:
        with checkpoint.as_directory() as folder:
            begin = json.load(open(os.path.join(folder, "state.json")))["epoch"] + 1
    print(f"rank {rank} of {ray.train.get_context().get_world_size()} begins at epoch {begin}")
    for epoch in range(begin, config["epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "state.json"), "w") as file:
                json.dump({"epoch": epoch, "scale": config["scale"]}, file)
            ray.train.report(
                {"loss": double(1.0) / (epoch + 1), "epoch": epoch, "pid": os.getpid()},
                checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None,
            )
        time.sleep(config.get("pause_s", 0.0))


def trainer(name, **config):
    return TorchTrainer(
        loop,
        train_loop_config={"scale": 3, **config},
        scaling_config=ScalingConfig(num_workers=8, use_gpu=True),
        run_config=RunConfig(name=name, storage_path="/mnt/cluster_storage/training/"),
    )
"""
ONE_RUN = """
result = trainer("Digits_1", epochs=2).fit()
print("task", ray.get(task.remote(41)))
with result.checkpoint.as_directory() as folder:
    print("state", open(os.path.join(folder, "state.json")).read())
again = trainer("Digits_1", epochs=2).fit()
print("same", again.checkpoint == result.checkpoint, result.metrics["epoch"], list(result.metrics_dataframe["epoch"]))
print("private", [name for name in os.environ if name.startswith("MILLRACE_")])
"""
# Three runs, of which the last goes on with the first.
THREE_RUNS = """
first = trainer("first", epochs=2, pause_s=2.0).fit()
second = trainer(f"second-{time.time()}", epochs=4, pause_s=2.0).fit()
print("epochs of the second", [metrics["epoch"] for _, metrics in second.best_checkpoints])
further = trainer("first", epochs=4).fit()
print("epochs of the first", [metrics["epoch"] for _, metrics in further.best_checkpoints])
"""
STEPS = "def double(value):\n    return 2 * value\n"


def push(millrace: mc.Millrace, folder: Path, code: str, max_failures: int = 3, **config: object) -> res.TrainingJob:
    bundle = millrace.train.push_code(write_files(folder / "code", {"cells.py": CELLS + code, "steps.py": STEPS}))
    placement = res.Placement(gpus_per_worker=0)
    spec = mc.program_spec(
        bundle, "cells.py", config=config, num_workers=2, max_failures=max_failures, placement=placement
    )
    return millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)


def test_a_script_trains_and_reads_its_results(file_stack: TrainStack, tmp_path: Path) -> None:
    with mc.connect(train=file_stack.service.address) as millrace:
        job = push(millrace, tmp_path, ONE_RUN, scale=5)
        watch = file_stack.client.watch(job.name, timeout_s=600)
        watch.rest()
        logs = "".join(one.text for one in millrace.train.stream_logs(job.name))

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, (watch.jobs[-1].error, logs)
    assert watch.jobs[-1].failures == 0, watch.ends()
    entries = CheckpointRegistry(file_stack.store, job.name).entries()
    assert [(one.step, one.metrics["epoch"], one.fit) for one in entries] == [(1, 0, 1), (2, 1, 1)]
    assert watch.jobs[-1].latest_checkpoint == entries[-1].name
    assert "rank 1 of 2 begins at epoch 0" in logs
    assert "task 42" in logs
    assert f"state {json.dumps({'epoch': 1, 'scale': 5})}" in logs
    assert "same True 1 [0, 1]" in logs
    assert "private []" in logs
    matches = [re.fullmatch(r"cells\.py:\d+: (.*)", text) for text in watch.of("warning")]
    sentences = [one[1] for one in matches if one is not None]
    assert sentences.count("the job's num_workers 2 counts, and not ScalingConfig(num_workers=8)") == 1, sentences
    assert sentences.count("train_loop_config['scale'] is 5, by the job's configuration, and not 3") == 1, sentences


# Its own settings; the second attempt asks for more workers than the order of rows allows.
OWN_SETTINGS = """
import os
import ray.train
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = {folder!r}


def loop(config):
    for epoch in range(3):
        folder = os.path.join(os.environ["TMPDIR"], str(epoch))
        os.makedirs(folder, exist_ok=True)
        open(os.path.join(folder, "state"), "w").write("x")
        ray.train.report({{"score": -epoch}}, checkpoint=ray.train.Checkpoint.from_directory(folder))
    print(f"of {{ray.train.get_context().get_world_size()}}")
    if config.get("fails"):
        raise OSError("lost")


tries = len(os.listdir(FOLDER))
open(os.path.join(FOLDER, f"try-{{tries}}"), "w").close()
TorchTrainer(
    loop,
    train_loop_config={{"fails": {fails}}},
    torch_config=TorchConfig(timeout_s=77, init_method="tcp"),
    scaling_config=ScalingConfig(num_workers=3 if tries == 0 else 25, resources_per_worker={{"CPU": 0.25, "tape": 0}}),
    run_config=RunConfig(
        name="own",
        failure_config=FailureConfig(max_failures=5),
        checkpoint_config=CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score"),
    ),
).fit()
"""


def own_settings(stack: TrainStack, folder: Path, *, fails: bool) -> tuple[res.TrainingJob, list[str], str]:
    """The job of `OWN_SETTINGS` at its end, its warnings and its logs; the caller says nothing but `seed`."""
    tries = folder / "tries"
    tries.mkdir()
    code = write_files(folder / "code", {"cells.py": OWN_SETTINGS.format(folder=str(tries), fails=fails)})
    with mc.connect(train=stack.service.address) as millrace:
        spec = mc.program_spec(millrace.train.push_code(code), "cells.py", seed=3)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        watch = stack.client.watch(job.name, timeout_s=350)
        watch.rest()
        return watch.jobs[-1], watch.of("warning"), "".join(one.text for one in millrace.train.stream_logs(job.name))


# In `make test`: the script above, and tests/unit/train_service/program/test_overrides.py for each setting.
@pytest.mark.long
def test_a_scripts_own_settings_count_where_the_caller_left_them_open(file_stack: TrainStack, tmp_path: Path) -> None:
    job, warnings, logs = own_settings(file_stack, tmp_path, fails=False)

    assert job.state == State.STATE_SUCCEEDED, (job.error, logs)
    assert "of 3" in logs
    assert (job.spec.num_workers, job.spec.lanes, job.spec.max_failures) == (3, 24, 5)
    assert (job.spec.placement.cpus_per_worker, job.spec.placement.timeout.seconds) == (0.25, 77)
    assert dict(job.spec.placement.resources_per_worker) == {}
    assert (job.spec.checkpoints.keep_newest, job.spec.checkpoints.best_metric) == (1, "score")
    # The newest, and the best, which is the first.
    assert job.best_checkpoint != job.latest_checkpoint
    entries = CheckpointRegistry(file_stack.store, job.name).entries()
    assert [one.metrics["score"] for one in entries] == [0, -2]
    texts = [text.partition(": ")[2] for text in warnings]
    assert texts == ["TorchConfig(init_method='tcp') is not used: a job has no such setting"], texts


@pytest.mark.long
def test_a_script_that_asks_for_more_workers_keeps_the_order_of_its_rows(
    file_stack: TrainStack, tmp_path: Path
) -> None:
    job, _, _ = own_settings(file_stack, tmp_path, fails=True)

    assert job.state == State.STATE_FAILED
    assert "ScalingConfig(num_workers=25) is more than the 24 lanes that this job's first run began with" in (
        job.error.message
    )
    assert (job.attempt, job.failures, job.spec.num_workers) == (2, 1, 3)


@pytest.mark.long
@pytest.mark.parametrize(("entry", "fit"), [("cells.py", 1), ("cells:loop", 0)])
def test_in_local_mode_one_process_trains(file_stack: TrainStack, tmp_path: Path, entry: str, fit: int) -> None:
    # A module is imported before its job is made, where there is no cluster.
    code = CELLS + ONE_RUN if fit else CELLS.replace("ray.init(", "dict(")
    said = "    import logging; logging.getLogger('train_service').warning(\"a line of Millrace's own\")\n"
    code = code.replace("def loop(config):\n", f"def loop(config):\n{said}")
    with mc.connect(train=file_stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"cells.py": code, "steps.py": STEPS}))
        config = {"epochs": 3, "scale": 1}
        spec = mc.program_spec(bundle, entry, config=config, num_workers=0, max_failures=0)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        watch = file_stack.client.watch(job.name, timeout_s=600)
        watch.rest()
        logs = "".join(one.text for one in millrace.train.stream_logs(job.name))

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, (watch.jobs[-1].error, logs)
    entries = CheckpointRegistry(file_stack.store, job.name).entries()
    assert [(one.step, one.metrics["epoch"], one.fit) for one in entries] == [(1, 0, fit), (2, 1, fit), (3, 2, fit)]
    assert entries[-1].final
    assert logs.count("rank 0 of 1 begins at epoch 0") == 1
    assert logs.count("a line of Millrace's own") == 1, logs
    assert ("same True 2 [0, 1, 2]" in logs) == bool(fit)


@pytest.mark.chaos
def test_the_runs_of_a_script_go_on_over_kills_of_a_rank_the_script_and_the_attempt(
    file_stack: TrainStack, train_ray: RayHead, tmp_path: Path
) -> None:
    with mc.connect(train=file_stack.service.address) as millrace:
        job = push(millrace, tmp_path, THREE_RUNS)
        watch = file_stack.client.watch(job.name, timeout_s=600)
        watch.until("checkpoint_committed")
        os.kill(int(file_stack.client.checkpoints(job.name)[0].metrics["pid"]), signal.SIGKILL)
        watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step == 3)
        (script,) = script_processes()
        os.kill(script, signal.SIGKILL)
        watch.until("attempt_started", lambda event: event.attempt == 3)
        watch.until("checkpoint_committed")
        for pid in train_ray.processes("ray::AttemptActor.run"):
            os.kill(pid, signal.SIGKILL)
        watch.rest()
        logs = "".join(one.text for one in millrace.train.stream_logs(job.name))

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, (watch.jobs[-1].error, logs)
    assert watch.jobs[-1].failures == 3, watch.ends()
    assert script_processes() == []
    entries = CheckpointRegistry(file_stack.store, job.name).entries()
    of_fits = [(one.fit, one.metrics["epoch"]) for one in entries]
    assert of_fits == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3), (1, 2), (1, 3)]
    assert [one.step for one in entries] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "epochs of the second [0, 1, 2, 3]" in logs
    assert "epochs of the first [0, 1, 2, 3]" in logs


def script_processes() -> list[int]:
    """The pids of the processes that run scripts on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"train_service.attempt.script_process" in words:
                    found.append(int(entry.name))
    return found


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("1 / 0", "ZeroDivisionError at cells.py:{line} of the script: division by zero"),
        ("import sys; sys.exit(3)", "sys.exit(3) at cells.py:{line} of the script"),
        ("os._exit(0)", "os._exit(0) at cells.py:{line}"),
        ("os.kill(os.getpid(), 9)", "the process of cells.py ended by SIGKILL before the script's last line"),
        ("ray.train.get_context()", "RuntimeError at cells.py:{line} of the script: "),
    ],
)
def test_a_script_that_ends_wrongly_fails_its_job_by_its_line(
    file_stack: TrainStack, tmp_path: Path, end: str, text: str
) -> None:
    with mc.connect(train=file_stack.service.address) as millrace:
        job = push(millrace, tmp_path, end, max_failures=0)
    watch = file_stack.client.watch(job.name, timeout_s=600)
    watch.rest()

    assert watch.jobs[-1].state == State.STATE_FAILED
    assert text.format(line=CELLS.count("\n") + 1) in watch.jobs[-1].error.message


@pytest.mark.chaos
def test_an_error_of_a_script_that_a_second_attempt_repeats_is_the_last(file_stack: TrainStack, tmp_path: Path) -> None:
    with mc.connect(train=file_stack.service.address) as millrace:
        job = push(millrace, tmp_path, "1 / 0", max_failures=5)
    watch = file_stack.client.watch(job.name, timeout_s=600)
    watch.rest()

    ended = watch.jobs[-1]
    assert (ended.state, ended.attempt) == (State.STATE_FAILED, 2)
    assert "ended with the same error at the same line" in ended.error.message


# The skill page's snippet, on a loop that learns in no time.
TUNED = """
import json
import os
import tempfile

import ray.train
from ray import tune
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config):
    for epoch in range(config["epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "state.json"), "w") as file:
                json.dump(config, file)
            ray.train.report(
                {"eval_loss": config["lr"] * config["batch_size"] / (epoch + 1), "epoch": epoch},
                checkpoint=ray.train.Checkpoint.from_directory(folder),
            )


trainer = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=1))
tuner = tune.Tuner(
    trainer,
    param_space={
        "train_loop_config": {
            "lr": tune.loguniform(1e-5, 1e-3),
            "batch_size": tune.choice([16, 32, 64]),
            "epochs": 3,
        },
    },
    tune_config=tune.TuneConfig(
        num_samples=SAMPLES,
        metric="eval_loss",
        mode="min",
        scheduler=tune.schedulers.ASHAScheduler(max_t=3, grace_period=1),
    ),
)
results = tuner.fit()
best = results.get_best_result()
with best.checkpoint.as_directory() as folder:
    state = json.load(open(os.path.join(folder, "state.json")))
print("trials", len(results), results.num_errors, state == best.config["train_loop_config"], best.metrics["epoch"])
print("samples", len(results.get_dataframe()), min(results.get_dataframe()["eval_loss"]) <= best.metrics["eval_loss"])
"""


@pytest.mark.long
def test_a_tuner_in_a_script_is_a_sweep(file_stack: TrainStack, tmp_path: Path) -> None:
    samples = 2
    with mc.connect(train=file_stack.service.address) as millrace:
        code = TUNED.replace("SAMPLES", str(samples))
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"cells.py": code}))
        job_id = f"j{uuid.uuid4().hex[:12]}"
        spec = mc.program_spec(bundle, "cells.py", num_workers=1, max_failures=0)
        job = millrace.train.create_training_job(job_id, spec)
        watch = file_stack.client.watch(job.name, timeout_s=600)
        watch.rest()
        logs = "".join(one.text for one in millrace.train.stream_logs(job.name))
        assert watch.jobs[-1].state == State.STATE_SUCCEEDED, (watch.jobs[-1].error, logs)
        sweep = millrace.train.get_sweep(f"sweeps/{job_id}-sweep")

    assert f"trials {samples} 0 True" in logs, logs
    assert f"samples {samples} True" in logs
    assert len(sweep.trials) == samples
    assert all(one.parameters["program.config.batch_size"].number_value in (16, 32, 64) for one in sweep.trials)
    assert min(one.best_value for one in sweep.trials) == next(
        one.best_value for one in sweep.trials if one.training_job == sweep.best_training_job
    )
    assert all(1 <= one.epochs_done <= 3 for one in sweep.trials)
