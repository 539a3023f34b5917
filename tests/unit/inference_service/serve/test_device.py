"""A replica's model is where Ray put the replica."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
import torch

from inference_service.serve.served_model import assigned_device
from shared.errors import FailedPrecondition
from tests.support.torch_settings import kept_torch_settings


def given(monkeypatch: pytest.MonkeyPatch, gpus: list[str], *, usable: bool) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": gpus})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)


def test_without_a_gpu_of_its_own_it_is_on_the_cpu_though_the_node_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, [], usable=True)
    assert assigned_device() == torch.device("cpu")


def test_with_one_it_is_there_under_the_only_number_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, ["3"], usable=True)
    assert assigned_device() == torch.device("cuda", 0)


def test_a_model_on_a_gpu_computes_in_full_float32_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, ["3"], usable=True)
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    with kept_torch_settings():
        cudnn.allow_tf32 = matmul.allow_tf32 = True

        assigned_device()

        assert (cudnn.allow_tf32, matmul.allow_tf32) == (False, False)


def test_one_that_torch_cannot_use_is_no_reason_to_go_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, ["3"], usable=False)
    with pytest.raises(FailedPrecondition, match=r"GPU 3 .* gpus_per_replica=0"):
        assigned_device()
