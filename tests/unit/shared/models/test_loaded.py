"""A checkpoint's weights are read right into its model."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from shared.checkpoint import Checkpoint
from shared.checkpoint.format import WEIGHTS
from shared.checkpoint.reading import BLOCK_BYTES
from shared.errors import DataLoss, FailedPrecondition
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.models.loaded import LoadedModel, read_weights
from tests.support.checkpoint_samples import content, stored_checkpoint

# Its weights take several blocks.
MODEL = ModelSpec(builder="mlp", in_channels=1500, num_classes=2, kwargs={"hidden": [1000, 1000]})


def weights_of(spec: ModelSpec) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return build_model(spec).state_dict()


def checkpoint(folder: Path, weights: dict[str, Tensor]) -> Checkpoint:
    return stored_checkpoint(folder, content(model=MODEL), save(weights))


def test_a_model_has_the_bits_of_its_file_and_the_file_is_never_whole_in_memory(tmp_path: Path) -> None:
    large = replace(MODEL, in_channels=3000, kwargs={"hidden": [4000]})
    weights = weights_of(large)
    stored = stored_checkpoint(tmp_path, content(model=large), save(weights))
    tracemalloc.start()
    try:
        loaded = LoadedModel(stored)
        # torch's memory, which is the model's, is not traced: what is left are the ranges of the file.
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    read = loaded.module.state_dict()
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], one) for name, one in weights.items())
    # Four ranges are fetched at a time, and the next one is waited for.
    assert peak_bytes < 6 * BLOCK_BYTES < sum(one.nbytes for one in weights.values())


def test_weights_of_another_type_are_converted(tmp_path: Path) -> None:
    weights = {name: one.double() for name, one in weights_of(MODEL).items()}

    read = LoadedModel(checkpoint(tmp_path, weights)).module.state_dict()

    assert all(torch.equal(read[name], one.float()) for name, one in weights.items())


@pytest.mark.parametrize("change", ["shape", "missing", "unknown"])
def test_weights_of_another_model_are_refused(tmp_path: Path, change: str) -> None:
    weights = weights_of(MODEL)
    if change == "shape":
        weights["output.bias"] = torch.zeros(3)
    elif change == "missing":
        del weights["output.bias"]
    else:
        weights["more"] = torch.zeros(3)

    with pytest.raises(FailedPrecondition, match=r"does not load:[\s\S]*(output\.bias|more)"):
        LoadedModel(checkpoint(tmp_path, weights))


class WithExtraState(nn.Module):
    """As modules of some libraries: its state has a tensor whose length is known only when it is loaded."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.linear = nn.Linear(1500, 1000)
        self.extra = torch.zeros(extra)

    def get_extra_state(self) -> Tensor:
        return self.extra

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = state


def test_a_model_that_takes_state_of_another_length_has_all_of_its_weights(tmp_path: Path) -> None:
    weights = WithExtraState(3).state_dict()
    model = WithExtraState(1)

    read_weights(model, checkpoint(tmp_path, weights))

    assert torch.equal(model.linear.weight, weights["linear.weight"])
    assert torch.equal(model.extra, weights["_extra_state"])


def test_a_damaged_block_is_data_loss(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path, weights_of(MODEL))
    (file,) = stored.stored(WEIGHTS)
    path = tmp_path / file.key
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    with pytest.raises(DataLoss, match="digest"):
        LoadedModel(stored)
