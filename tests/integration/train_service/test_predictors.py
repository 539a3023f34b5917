"""The whole way of the documents' example: trained by its own loop, deployed by its predictor, asked, rolled out."""

from __future__ import annotations

import re
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace_client as mc
from millrace_client import errors
from tests.integration.inference_service.client import environment
from tests.integration.train_service.test_programs import EXTENDING, example
from tests.support.code_folders import write_files
from tests.support.ray_head import RayHead
from tests.support.service_process import running_service
from tests.support.training import State, TrainStack
from tests.support.wheels import write_wheel

pytestmark = pytest.mark.timeout(900)


# The predictor where none is named; it refuses some requests.
STRICT = """

from serve import Predictor as Documented


class Predictor(Documented):
    def predict(self, inputs):
        assert (inputs["numbers"] < 100).all(), "too large"
        return super().predict(inputs)
"""


def predictor() -> str:
    """That of the documents."""
    blocks = re.findall(r"```python\n(.*?)```", EXTENDING.read_text(), re.DOTALL)
    (code,) = [one for one in blocks if "class Predictor" in one]
    return str(code)


def local(folder: Path, code: Path, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the same class answers in this process."""
    sys.path.append(str(code))
    try:
        from serve import Predictor  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(code))
    answer: np.ndarray[Any, Any] = Predictor(str(folder)).predict({"numbers": numbers})["total"]
    return answer


@pytest.mark.long
def test_a_programs_checkpoint_is_served_by_the_predictor_of_its_bundle(
    file_stack: TrainStack, train_ray: RayHead, tmp_path: Path
) -> None:
    stack = file_stack
    code = write_files(tmp_path / "code", {"train.py": example() + STRICT, "serve.py": predictor()})
    job_id = f"j{uuid.uuid4().hex[:12]}"
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(code)
        config = {"lr": 0.05, "epochs": 2}
        spec = mc.program_spec(bundle, "train:train_loop_per_worker", config=config, num_workers=2)
        job = millrace.train.create_training_job(job_id, spec)
    watch = stack.client.watch(job.name, timeout_s=600)
    watch.rest()
    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
    first, second = stack.client.checkpoints(job.name)

    numbers = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    environ = {**environment(stack.store.settings, train_ray.address), "MILLRACE_OWN_CODE": "trusted"}
    log = tmp_path / "inference.log"
    with (
        running_service("inference_service", environ, log) as service,
        mc.connect(train=stack.service.address, inference=service.address) as millrace,
    ):
        expected = {}
        for one in (first, second):
            millrace.train.download_checkpoint(one.name, tmp_path / one.name)
            expected[one.name] = local(tmp_path / one.name, code, numbers)
        assert not np.array_equal(expected[first.name], expected[second.name])

        # With what the module of the program calls its predictor.
        made = millrace.deployments.create_deployment("totals", first.name).wait()
        assert made.lineage.code_bundle == bundle.name
        answer = millrace.inference.infer("totals", {"numbers": numbers})
        assert np.array_equal(answer.outputs["total"], expected[first.name])
        assert (answer.lineage.checkpoint, answer.lineage.code_bundle) == (first.name, bundle.name)
        assert answer.lineage.checkpoint_sha256 == first.manifest_sha256
        with pytest.raises(errors.FailedPrecondition, match=r"train\.py:\d+: AssertionError: too large"):
            millrace.inference.infer("totals", {"numbers": numbers + 1000})
        with pytest.raises(errors.InvalidArgument, match="numbers"):
            millrace.inference.infer("totals", {"numbers": numbers[:, :3]})

        rolled = millrace.deployments.rollout("deployments/totals", second.name, steps=[(100, 0.1)]).wait()
        assert rolled.lineage.checkpoint == second.name
        answer = millrace.inference.infer("totals", {"numbers": numbers})
        assert np.array_equal(answer.outputs["total"], expected[second.name])
        assert answer.lineage.checkpoint == second.name

        with pytest.raises(errors.FailedPrecondition, match="serve:Missing"):
            millrace.deployments.create_deployment("none", first.name, predictor="serve:Missing").wait()
        for name in ("deployments/totals", "deployments/none"):
            millrace.deployments.delete_deployment(name)


# Trained and served with a package that only the bundle's lock names.
BROUGHT_LOOP = """
import os
import tempfile

import brought
import ray.train


def loop(config):
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "factor.txt"), "w") as file:
            file.write(str(brought.FACTOR))
        ray.train.report({"loss": 0.5}, checkpoint=ray.train.Checkpoint.from_directory(folder))
"""
BROUGHT_PREDICTOR = """
import os

import brought


class Predictor:
    inputs = {"numbers": ("FP32", [2])}
    outputs = {"scaled": ("FP32", [2])}

    def __init__(self, checkpoint_dir):
        with open(os.path.join(checkpoint_dir, "factor.txt")) as file:
            assert int(file.read()) == brought.FACTOR

    def predict(self, inputs):
        return {"scaled": inputs["numbers"] * brought.FACTOR}
"""


@pytest.mark.long
def test_a_predictor_is_served_with_a_package_that_only_its_bundle_brings(
    file_stack: TrainStack, train_ray: RayHead, environments: dict[str, str], tmp_path: Path
) -> None:
    stack, factor = file_stack, 2 + uuid.uuid4().int % 1000
    # Another version each time, so that no environment of an earlier test has it.
    wheels = Path(environments["UV_FIND_LINKS"])
    lock = write_wheel(wheels, "brought", f"2.{factor}", {"brought.py": f"FACTOR = {factor}\n"})
    files = {"train.py": BROUGHT_LOOP, "serve.py": BROUGHT_PREDICTOR, "requirements.lock": f"{lock}\n"}
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", files))
        spec = mc.program_spec(bundle, "train:loop", num_workers=1, max_failures=0)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
    watch = stack.client.watch(job.name, timeout_s=600)
    watch.rest()
    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]

    environ = {**environment(stack.store.settings, train_ray.address), "MILLRACE_OWN_CODE": "trusted"}
    numbers = np.arange(6, dtype=np.float32).reshape(3, 2)
    with (
        running_service("inference_service", environ, tmp_path / "inference.log") as service,
        mc.connect(train=stack.service.address, inference=service.address) as millrace,
    ):
        made = millrace.deployments.create_deployment("scaled", job.name, predictor="serve:Predictor").wait()
        assert made.lineage.code_bundle == bundle.name
        answer = millrace.inference.infer("scaled", {"numbers": numbers})
        assert np.array_equal(answer.outputs["scaled"], numbers * factor)
        millrace.deployments.delete_deployment("deployments/scaled")
