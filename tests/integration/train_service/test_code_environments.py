"""A program whose bundle requires a package that the image lacks: checked and trained with it, on real workers."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from tests.support.code_folders import write_files
from tests.support.training import State, TrainStack
from tests.support.wheels import write_wheel

pytestmark = pytest.mark.timeout(400)

LOOP = """
import ray.train
import brought


def loop(config):
    assert brought.ANSWER == config["answer"]
    ray.train.report({"loss": 0.5})
"""
SCRIPT = """
import brought
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from train import loop

config = {"answer": brought.ANSWER}
TorchTrainer(loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=1)).fit()
"""


@pytest.mark.parametrize("entry", ["train:loop", pytest.param("script.py", marks=pytest.mark.long)])
def test_a_program_trains_with_a_package_that_only_its_bundle_brings(
    file_stack: TrainStack, environments: dict[str, str], tmp_path: Path, entry: str
) -> None:
    # Another version each time, so that no environment of an earlier test has it.
    answer = uuid.uuid4().int % 10**6
    wheels = Path(environments["UV_FIND_LINKS"])
    lock = write_wheel(wheels, "brought", f"1.{answer}", {"brought.py": f"ANSWER = {answer}\n"})
    code = write_files(tmp_path / "code", {"train.py": LOOP, "script.py": SCRIPT, "requirements.lock": f"{lock}\n"})
    with mc.connect(train=file_stack.service.address) as millrace:
        bundle, config = millrace.train.push_code(code), {"answer": answer}
        spec = mc.program_spec(bundle, entry, config=config, num_workers=1, max_failures=0)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        watch = file_stack.client.watch(job.name, timeout_s=300)
        watch.rest()
    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
