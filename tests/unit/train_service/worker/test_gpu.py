"""A GPU's metrics are there where there is one, and can be read."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from train_service.worker.loop import GpuMeter

GPU = torch.device("cuda", 0)


def test_a_cpu_has_none() -> None:
    assert GpuMeter(torch.device("cpu"), lambda _: 1.0, lambda _: 1.0).values() == {}


def test_of_a_gpu_memory_and_utilization_are_reported() -> None:
    meter = GpuMeter(GPU, lambda device: 1e9 + (device.index or 0), lambda _: 87.0)

    assert meter.values() == {"gpu_memory_bytes": 1e9, "gpu_utilization": 0.87}


def test_utilization_is_not_asked_for_at_every_step() -> None:
    readings = iter([10.0, 20.0])
    meter = GpuMeter(GPU, lambda _: 0.0, lambda _: next(readings))

    assert [meter.values()["gpu_utilization"] for _ in range(3)] == [0.1] * 3


def test_a_gpu_that_does_not_report_its_utilization_ends_no_run() -> None:
    """As a part of one, which NVML does not measure."""
    asked = []

    def refuse(device: torch.device) -> float:
        asked.append(device)
        raise RuntimeError("not supported")

    meter = GpuMeter(GPU, lambda _: 5.0, refuse)

    assert [meter.values() for _ in range(3)] == [{"gpu_memory_bytes": 5.0}] * 3
    assert len(asked) == 1


def test_utilization_is_reported_only_where_nvidia_ml_py_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 50)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter(GPU, lambda _: 5.0).values() == {"gpu_memory_bytes": 5.0}

    there = ModuleType("pynvml")
    there.__spec__ = ModuleSpec("pynvml", None)
    monkeypatch.setitem(sys.modules, "pynvml", there)
    assert GpuMeter(GPU, lambda _: 5.0).values() == {"gpu_memory_bytes": 5.0, "gpu_utilization": 0.5}
