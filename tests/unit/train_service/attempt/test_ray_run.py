"""What Ray Train is told of a run."""

from __future__ import annotations

import pytest

from train_service.attempt.ray_run import backend_of
from train_service.domain.spec import Placement
from train_service.placement import Size


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [(0.0, "gloo"), (0.5, "gloo"), (1.0, "nccl"), (2.0, "nccl")],
)
def test_ranks_that_may_share_a_gpu_are_not_tied_together_by_nccl_which_would_refuse_them(
    gpus: float, backend: str
) -> None:
    bundle = {"CPU": 1.0, **({"GPU": gpus} if gpus else {})}

    assert backend_of(Placement(gpus_per_worker=gpus), Size(2, bundle)) == backend


def test_a_backend_that_is_asked_for_is_taken() -> None:
    assert backend_of(Placement(backend="gloo"), Size(2, {"CPU": 1.0, "GPU": 1.0})) == "gloo"
