"""Two runs on the GPUs of a node that dies and comes back: one waits for them, the other may go on on CPUs meanwhile.

The GPUs are logical ones of Ray: a module that each of its processes imports first has workers compute on the CPU.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from millrace.train.v1 import resources_pb2 as res
from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.ray_head import ray_head, ray_node
from tests.support.training import State, digits_spec, train_stack
from tests.support.waiting import wait_until

NO_REAL_GPUS = """
import importlib.abc, importlib.util, sys

NAME = "ray.air._internal.device_manager"

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_without_gpus(module):
            load(module)
            module.SUPPORTED_ACCELERATOR_TORCH_DEVICE_MANAGER["GPU"] = module.CPUTorchDeviceManager

        spec.loader.exec_module = load_without_gpus
        return spec

sys.meta_path.insert(0, Finder())
"""

pytestmark = [pytest.mark.timeout(1200), pytest.mark.chaos]


def long_spec(fallback: bool) -> res.TrainingSpec:
    spec = digits_spec(epochs=5000, num_workers=1, checkpoint_every_steps=10)
    # nccl would want GPUs that compute.
    spec.placement.backend = "gloo"
    spec.placement.allow_cpu_fallback = fallback
    return spec


def test_a_run_whose_gpus_are_lost_waits_for_them_or_goes_on_on_cpus_as_its_specification_says(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(NO_REAL_GPUS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "first"), *sys.path]))
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    with (
        ray_head(num_cpus=2) as head,
        ExitStack() as nodes,
        train_stack(settings, head.address, tmp_path) as stack,
    ):
        gpus = nodes.enter_context(ray_node(head, "gpus", num_cpus=2, num_gpus=2))
        staying, moving = (stack.client.create(long_spec(fallback)) for fallback in (False, True))
        watches = [stack.client.watch(job.name, timeout_s=1100) for job in (staying, moving)]
        for watch in watches:
            watch.until("checkpoint_committed")
        assert [stack.client.get(job.name).device for job in (staying, moving)] == [res.DEVICE_GPU] * 2
        gpus.kill()
        faults.add("SIGKILL node", "training", "file")

        moved = watches[1].until("device_changed").device_changed
        assert (moved.before, moved.device) == (res.DEVICE_GPU, res.DEVICE_CPU)
        watches[1].until("attempt_started")
        watches[1].until("checkpoint_committed")
        assert stack.client.get(moving.name).device == res.DEVICE_CPU
        wait_until(lambda: "1 GPU" in stack.client.get(staying.name).waiting_for, "the run to say what it waits for")
        waiting = stack.client.get(staying.name)
        assert (waiting.state, waiting.device) == (State.STATE_RECOVERING, res.DEVICE_GPU)
        assert "allow_cpu_fallback" in waiting.waiting_for

        nodes.enter_context(ray_node(head, "more-gpus", num_cpus=2, num_gpus=2))
        assert watches[1].until("device_changed").device_changed.device == res.DEVICE_GPU
        saved = watches[1].of("checkpoint_committed")[-1]
        begun = watches[1].until("attempt_started").attempt_started
        assert (begun.step, begun.checkpoint) == (saved.step, saved.name), "it moves at a committed checkpoint"
        watches[0].until("attempt_started")
        assert [stack.client.get(job.name).device for job in (staying, moving)] == [res.DEVICE_GPU] * 2
        assert watches[0].of("device_changed") == []
        for watch, job in zip(watches, (staying, moving), strict=True):
            stack.client.cancel(job.name)
            watch.rest()
