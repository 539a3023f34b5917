"""Where a rank computes, and how. No GPU is needed: what is set for one is looked at before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import pytest
import torch

from shared.storage import ObjectStore
from tests.unit.train_service.worker.test_loop import config_of
from train_service.learning.ranks import Ranks
from train_service.worker import loop


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """As they were, afterwards."""
    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils).deterministic
    before = (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, memory.fill_uninitialized_memory)
    with mock.patch.dict(os.environ):
        yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.deterministic, memory.fill_uninitialized_memory = before[1:]


def settings_before_the_model_is_built(store: ObjectStore, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    class Looking:
        def __init__(self, *_: object) -> None:
            found["algorithms"] = torch.are_deterministic_algorithms_enabled()
            found["cudnn"] = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
            found["cublas"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")

        def run(self) -> None:
            pass

    with mock.patch.object(loop, "Run", Looking):
        loop.train_loop(config_of(store, "trainingJobs/a"), Ranks(0, 1, torch.device(device)))
    return found


def test_a_rank_on_a_gpu_computes_deterministically(store: ObjectStore) -> None:
    assert settings_before_the_model_is_built(store, "cuda") == {
        "algorithms": True,
        "cudnn": (True, False),
        "cublas": ":4096:8",
    }


def test_a_rank_on_a_cpu_does_so_by_itself(store: ObjectStore) -> None:
    assert not settings_before_the_model_is_built(store, "cpu")["algorithms"]
