"""How a rank computes on its device. No GPU is needed: what is set for one is looked at before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from shared.storage import ObjectStore
from tests.support.torch_settings import attention_kernels, kept_torch_settings
from tests.unit.train_service.worker.test_loop import SPEC, config_of
from train_service.domain.spec import DETERMINISTIC, FASTEST, FLOAT32, TF32, Acceleration, TrainingSpec
from train_service.learning.ranks import COMPILE_CACHE, Ranks, set_up_device
from train_service.worker import loop

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    with kept_torch_settings():
        yield


def settings_before_the_model_is_built(store: ObjectStore, device: torch.device, spec: TrainingSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}

    class Looking:
        def __init__(self, *_: object) -> None:
            found["algorithms"] = torch.are_deterministic_algorithms_enabled()
            found["cudnn"] = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
            found["cublas"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")

        def run(self) -> None:
            pass

    with mock.patch.object(loop, "Run", Looking):
        loop.train_loop(config_of(store, "trainingJobs/a", spec=spec), Ranks(0, 1, device))
    return found


def test_a_rank_on_a_gpu_computes_deterministically(store: ObjectStore) -> None:
    assert settings_before_the_model_is_built(store, GPU, SPEC) == {
        "algorithms": True,
        "cudnn": (True, False),
        "cublas": ":4096:8",
    }


def test_torch_uses_the_fastest_algorithms_on_request(store: ObjectStore) -> None:
    fastest = replace(SPEC, acceleration=Acceleration(algorithms=FASTEST))

    assert settings_before_the_model_is_built(store, GPU, fastest) == {
        "algorithms": False,
        "cudnn": (False, True),
        "cublas": None,
    }


def test_a_rank_on_a_cpu_does_so_by_itself(store: ObjectStore) -> None:
    assert not settings_before_the_model_is_built(store, CPU, SPEC)["algorithms"]


@pytest.mark.parametrize(
    ("algorithms", "allowed"), [(DETERMINISTIC, (False, False, False, True)), (FASTEST, (True, True, True, True))]
)
def test_fused_attention_is_only_for_the_fastest_algorithms(
    algorithms: str, allowed: tuple[bool, bool, bool, bool]
) -> None:
    """Its gradients are added up in any order as long as torch only warns of operations without a fixed one."""
    set_up_device(GPU, replace(SPEC, acceleration=Acceleration(algorithms=algorithms)), {})

    assert attention_kernels() == allowed


@pytest.mark.parametrize(("precision", "allowed"), [(FLOAT32, False), (TF32, True)])
def test_products_are_rounded_to_tf32_only_where_the_precision_says_so(precision: str, allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not allowed

    set_up_device(GPU, replace(SPEC, precision=precision), {})

    assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is allowed


def test_a_compiler_adds_up_the_same_way_each_time() -> None:
    import torch._inductor.config as inductor

    torch.use_deterministic_algorithms(False)
    assert not inductor.deterministic
    set_up_device(GPU, replace(SPEC, compile=True), {})
    assert inductor.deterministic


def test_compiled_code_is_kept_in_the_nodes_folder_unless_torch_has_one() -> None:
    compiled, given = replace(SPEC, compile=True), {COMPILE_CACHE: "/var/cache/compiled"}
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    os.environ["TRITON_CACHE_DIR"] = "/elsewhere"

    set_up_device(CPU, SPEC, given)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    set_up_device(CPU, compiled, given)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/var/cache/compiled"
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
