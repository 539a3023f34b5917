"""What a program's process is given: an environment without keys, seeds, captured output, and announced exits."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from train_service.domain.watchdog import line_in_bundle
from train_service.program.worker_setup import (
    HIDDEN_VARIABLES,
    OptimizerSteps,
    drop_hidden_variables,
    line_of,
    seed_everything,
)
from train_service.worker.user_process import exits_announced


def test_variables_that_are_hidden_are_gone_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HIDDEN_VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the user's own, set since")
    drop_hidden_variables()
    assert [name for name in HIDDEN_VARIABLES if name in os.environ] == ["AWS_ACCESS_KEY_ID"]


def test_seeds_depend_on_the_job_the_report_and_the_rank_alone() -> None:
    def draws(*seeds: int) -> tuple[float, float, float]:
        seed_everything(*seeds)
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    assert draws(7, 3, 0) == draws(7, 3, 0)
    assert len({draws(7, 3, 0), draws(7, 3, 1), draws(7, 4, 0), draws(8, 3, 0)}) == 4


def test_steps_of_every_optimizer_count_on_from_those_before() -> None:
    counts: list[int] = []
    steps = OptimizerSteps(10, counts.append)
    try:
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            parameter = torch.nn.Parameter(torch.ones(1))
            optimizer = kind([parameter], lr=0.1)
            parameter.grad = torch.ones(1)
            optimizer.step()
    finally:
        steps.remove()
    assert (steps.count, counts) == (12, [11, 12])


def test_an_error_is_reported_by_the_innermost_line_of_the_bundle(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "train.py"
    path.parent.mkdir()
    path.write_text("import json\n\ndef loop():\n    json.loads('{')\n")
    names: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    loop = names["loop"]
    assert callable(loop)
    with pytest.raises(ValueError, match="Expecting") as raised:
        loop()
    assert line_of(raised.value, tmp_path) == "deep/train.py:4"
    assert line_of(ValueError("elsewhere"), tmp_path) == ""


def test_a_hang_is_reported_by_the_line_of_the_bundle() -> None:
    digest = "ab" * 32
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 3 in wait\n\n'
        'Thread 0x2 (most recent call first):\n  File "/usr/lib/time.py", line 9 in sleep\n'
        f'  File "/tmp/millrace-0/code/{digest}/sub/train.py", line 42 in step\n'
        f'  File "/tmp/millrace-0/code/{digest}/sub/train.py", line 7 in loop\n'
        '  File "/w/train_service/program/worker.py", line 90 in run_program\n'
    )
    assert line_in_bundle(stacks, digest) == "sub/train.py:42"
    assert line_in_bundle(stacks, "cd" * 32) == ""


CHILD = """
import logging, os, sys
from shared.logging_and_tracing import configure_logging, flush_logs
from train_service.worker.user_process import captured_output, exits_announced

said = []
configure_logging("train-worker", "INFO")
with captured_output(said.append):
    print("from Python")
    logging.info("from the log, within")
    os.write(1, b"from a descriptor\\n")
    os.system("echo from a child >&2")
    os.write(2, b"x" * 10_000_000)
text = b"\\n".join(said)
assert b"from Python" in text and b"from a descriptor" in text and b"from a child" in text
assert text.count(b"x") >= 10_000_000, text.count(b"x")
assert text.count(b"from Python") == 1 and b"from the log" not in text
logging.info("from the log, behind"); flush_logs()
print("and out again")
with exits_announced(lambda status, where: print(status, where.rpartition("/")[2], flush=True)):
    os._exit(0)
"""


def test_output_of_any_language_is_captured_and_an_exit_is_announced_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=environ)
    assert ended.stdout.splitlines() == ["and out again", "0 child.py:21"], ended.stderr
    assert "from a" not in ended.stderr
    assert [line.count("from the log") for line in ended.stderr.splitlines()] == [1, 1]


TWICE = """
import os
from train_service.worker.user_process import exits_announced

with exits_announced(lambda _, where: print("outer", where.rpartition("/")[2], flush=True)):
    with exits_announced(lambda _, where: print("inner", where.rpartition("/")[2], flush=True)):
        os._exit(0)
"""


def test_an_exit_is_announced_once_with_the_line_that_called_it(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(TWICE)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=environ)
    assert ended.stdout.splitlines() == ["inner child.py:7"], ended.stderr


def test_a_forked_child_ends_without_announcing_it() -> None:
    announced: list[int] = []
    with exits_announced(lambda status, _: announced.append(status)):
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        _, status = os.waitpid(pid, 0)
    # A child that announced its end would have done so in its own memory, and taken its time: it leaves at once.
    assert os.waitstatus_to_exitcode(status) == 7
    assert announced == []


def test_a_forked_child_does_not_use_its_parents_connection() -> None:
    reading, writing = os.pipe()

    def announce(_status: int, _where: str) -> None:
        os.write(writing, b"x")

    with exits_announced(announce):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)
