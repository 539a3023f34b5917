"""Files of tensors: what others read from them is what was put in, whatever happens to the originals."""

from __future__ import annotations

import io
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from train_service.checkpoints.tensor_files import DTYPES, NEST, TensorFile, put_together, take_apart

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
tensors = st.sampled_from(list(DTYPES)).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape).to(dtype))
)
nests = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def nest_file(nest: Any) -> bytes:
    found, form = take_apart(nest)
    return bytes(TensorFile().fill(found, {NEST: form}))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@given(nests)
def test_nested_state_comes_back_as_it_was(nest: Any) -> None:
    assert same(nest, put_together(nest_file(nest)))


def test_the_library_of_the_format_reads_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(3), nn.Linear(2, 2))

    read = safetensors.torch.load(bytes(TensorFile().fill(model.state_dict())))

    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(value, read[name]) for name, value in model.state_dict().items())


def test_a_filled_buffer_stays_while_training_goes_on_and_is_filled_anew() -> None:
    weight = torch.arange(4.0)
    file = TensorFile()
    first = bytes(file.fill({"w": weight}))
    weight += 1
    second = file.fill({"w": weight})

    assert safetensors.torch.load(first)["w"].tolist() == [0, 1, 2, 3]
    assert safetensors.torch.load(bytes(second))["w"].tolist() == [1, 2, 3, 4]
    other = file.fill({"w": weight, "b": torch.zeros(2, dtype=torch.int64)})
    assert safetensors.torch.load(bytes(other))["b"].tolist() == [0, 0]
    assert bytes(file.fill({"w": torch.arange(4.0)})) == first


def test_a_file_is_laid_out_once_though_its_metadata_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[TensorFile] = []
    lay_out = TensorFile._lay_out

    def noted(self: TensorFile, *given: Any) -> None:
        laid_out.append(self)
        lay_out(self, *given)

    monkeypatch.setattr(TensorFile, "_lay_out", noted)
    file, weight = TensorFile(), torch.arange(4.0)
    for step in range(50):
        metadata = {"lr": repr(0.1 / (step + 1)), "history": "x" * step}
        found = bytes(file.fill({"w": weight, "s": torch.tensor(step)}, metadata))
        assert found == bytes(TensorFile().fill({"w": weight, "s": torch.tensor(step)}, metadata))
    assert laid_out.count(file) == 1


def test_metadata_that_outgrow_their_room_are_given_more() -> None:
    file = TensorFile()
    for size in (1, 10_000, 100, 30_000):
        found = file.fill({"w": torch.arange(4.0)}, {"history": "x" * size})
        assert bytes(found) == bytes(TensorFile().fill({"w": torch.arange(4.0)}, {"history": "x" * size}))
        assert safetensors.torch.load(bytes(found))["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_the_state_of_an_optimizer_comes_back(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    back = put_together(nest_file(optimizer.state_dict()))

    assert same(optimizer.state_dict(), back)
    kind(model.parameters(), lr=0.1).load_state_dict(back)  # type: ignore[call-arg]


def test_an_unsupported_value_is_refused_before_anything_is_written() -> None:
    with pytest.raises(TypeError, match="BytesIO"):
        take_apart({"state": io.BytesIO()})
    with pytest.raises(TypeError, match="complex64"):
        TensorFile().fill({"w": torch.zeros(1, dtype=torch.complex64)})
