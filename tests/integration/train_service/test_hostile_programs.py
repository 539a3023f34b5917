"""What a clumsy or hostile training function does to its own run, on real workers, and how that ends."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from tests.support.code_folders import write_files
from tests.support.training import VERSION, State, TrainStack, Watch

pytestmark = [pytest.mark.timeout(900), pytest.mark.chaos]

# Rank 1 hangs after a report: in Python, with the interpreter held in C, and in a call that the other never makes.
HANGING = """
import ctypes
import time

import ray.train
import torch.distributed


def asleep():
    time.sleep(10**6)


def held():
    ctypes.PyDLL(None).sleep(10**6)


def alone():
    torch.distributed.barrier()


def loop(config):
    ray.train.report({"loss": 1.0})
    if ray.train.get_context().get_world_rank() == 1:
        globals()[config["hangs"]]()
    ray.train.report({"loss": 0.5})
"""
PRINTING = """
import os
import resource

import ray.train

LINE = "x" * 1023 + "\\n"


def loop(config):
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before = peak()
    for number in range(2**19):
        print(LINE, end="")
    for number in range(2**9):
        os.write(2, LINE.encode() * 2**10)
    assert peak() - before < 2**28, f"{peak() - before} bytes more"
    ray.train.report({"loss": 1.0})
"""
UNREPORTING = """
def loop(config):
    for _ in range(10**6):
        pass
"""
CONNECTING = """
import ray
import ray.train


def loop(config):
    ray.init()
    ray.train.report({"loss": 1.0})
    ray.shutdown()
"""


def ended(
    stack: TrainStack, folder: Path, source: str, workers: int = 1, hangs: str = "", hang_after_s: int = 0
) -> Watch:
    """How a job of that source went, without a second attempt."""
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(folder / "code", {"train.py": source}))
        spec = mc.program_spec(bundle, "train:loop", config={"hangs": hangs}, num_workers=workers, max_failures=0)
        if hang_after_s:
            spec.program.hang_after.FromSeconds(hang_after_s)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
    watch = stack.client.watch(job.name, timeout_s=600)
    watch.rest()
    return watch


def log_bytes(stack: TrainStack, job: str, rank: int) -> int:
    keys = [one.key for one in stack.store.list(f"{job}/logs/a00001/r{rank:04d}")]
    return sum(len(stack.store.get(key)) for key in keys)


def line_of(source: str, text: str) -> int:
    return source[: source.index(text)].count("\n") + 1


@pytest.mark.parametrize(
    ("hangs", "line"), [("asleep", "time.sleep"), ("held", "ctypes.PyDLL"), ("alone", "torch.distributed.barrier()")]
)
def test_a_rank_that_hangs_is_named_with_its_line(
    file_stack: TrainStack, tmp_path: Path, hangs: str, line: str
) -> None:
    watch = ended(file_stack, tmp_path, HANGING, 2, hangs, hang_after_s=30)
    assert watch.jobs[-1].state == State.STATE_FAILED
    message = watch.jobs[-1].error.message
    assert "rank 1 at step 0" in message, message
    assert f"(train.py:{line_of(HANGING, line)})" in message, message
    assert "stood still for more than 30 s" in message, message


def test_a_gigabyte_of_prints_is_cut_off_and_takes_no_memory(file_stack: TrainStack, tmp_path: Path) -> None:
    watch = ended(file_stack, tmp_path, PRINTING)
    job = watch.jobs[-1]
    assert job.state == State.STATE_SUCCEEDED, job.error
    assert 0 < log_bytes(file_stack, job.name, 0) < 80 * 2**20


def test_a_function_that_never_reports_has_succeeded_without_a_checkpoint(
    file_stack: TrainStack, tmp_path: Path
) -> None:
    watch = ended(file_stack, tmp_path, UNREPORTING)
    assert watch.jobs[-1].state == State.STATE_SUCCEEDED
    assert not watch.jobs[-1].best_checkpoint
    assert any("checkpoint" in one for one in watch.of("warning")), watch.events


def test_a_function_neither_begins_nor_ends_a_ray_of_its_own(file_stack: TrainStack, tmp_path: Path) -> None:
    watch = ended(file_stack, tmp_path, CONNECTING)
    assert watch.jobs[-1].state == State.STATE_FAILED
    line = line_of(CONNECTING, "ray.shutdown()")
    assert f"leave it out (rank 0 at train.py:{line})" in watch.jobs[-1].error.message
    log = file_stack.store.get(f"{watch.jobs[-1].name}/logs/a00001/r0000/00000000.txt").decode()
    assert "ray.init() in a training function does nothing" in log


# In Millrace's own loop: what it prints goes around Python, too.
LOUD_MODEL = """
import os

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(784, 10)

    def forward(self, images):
        if self.training and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            for _ in range(2**8):
                os.write(1, (b"x" * 1023 + b"\\n") * 2**10)
            os._exit(3)
        return self.linear(images.flatten(1))
"""


def test_a_model_in_millraces_loop_that_prints_and_exits_is_reported_by_its_line(
    file_stack: TrainStack, tmp_path: Path
) -> None:
    with mc.connect(train=file_stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"net.py": LOUD_MODEL}))
        spec = mc.training_spec(
            VERSION,
            model=mc.own_model(bundle, "net:Net"),
            transform=[mc.to_float()],
            epochs=1,
            global_batch_size=30,
            num_workers=2,
            max_failures=0,
        )
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        job = file_stack.client.finished(job.name)
    assert job.state == State.STATE_FAILED
    line = line_of(LOUD_MODEL, "os._exit")
    assert f"os._exit(3) on rank 1 at net.py:{line}" in job.error.message, job.error.message
    assert 0 < log_bytes(file_stack, job.name, 1) < 80 * 2**20
