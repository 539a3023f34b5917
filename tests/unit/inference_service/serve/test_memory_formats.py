"""Which layout in memory a model's batches have, and that answers are the same in both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import save

from inference_service.serve import served_model
from inference_service.serve.served_model import MemoryFormats, Run
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.models.loaded import LoadedModel
from tests.integration.inference_service.checkpoints import content, make_module
from tests.support.checkpoint_samples import stored_checkpoint

IMAGE = (1, 28, 28)
# Of the logits, beside the largest one: kernels of another layout add in another order.
TOLERANCE = 1e-5

Seconds = Callable[[Run, NDArray[Any]], float]


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    return LoadedModel(stored_checkpoint(tmp_path, content(0.9), save(make_module().state_dict())))


def taking(model: LoadedModel, usual_s: float, others_s: dict[int, float]) -> Seconds:
    """As if a batch took so long: as rows come, and by its size with channels last."""
    return lambda run, inputs: usual_s if run is model else others_s[len(inputs)]


def test_each_batch_size_has_the_layout_that_is_clearly_faster_for_it(model: LoadedModel) -> None:
    run = MemoryFormats(model)
    run.choose_fastest(IMAGE, [1, 2, 4, 6], taking(model, 1.0, {1: 0.5, 2: 0.95, 4: 1.5, 6: 0.8}))
    # 6 rows are the largest batch, of the bucket that goes up to 8.
    assert run.channels_last == {1, 8}


def test_answers_are_equal_in_both_layouts_within_a_hundred_thousandth(model: LoadedModel) -> None:
    run = MemoryFormats(model)
    run.choose_fastest(IMAGE, [1, 2, 4, 8], taking(model, 1.0, dict.fromkeys([1, 2, 4, 8], 0.5)))
    rows = np.random.default_rng(0).normal(size=(8, *IMAGE)).astype(np.float32)
    for size in range(1, 9):
        eager, answered = ([np.asarray(one, np.float64) for one in given(rows[:size])] for given in (model, run))
        np.testing.assert_allclose(answered[0], eager[0], rtol=0, atol=TOLERANCE * np.abs(eager[0]).max())
        np.testing.assert_allclose(answered[1], eager[1], rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(answered[2], eager[2])


def test_sizes_for_whose_trial_no_time_is_left_are_laid_out_as_the_largest_that_was_tried(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 1.0, served_model.TRIED_FOR_S + 1, served_model.TRIED_FOR_S + 2])
    monkeypatch.setattr(served_model, "time", SimpleNamespace(monotonic=lambda: next(now)))
    run = MemoryFormats(model)
    run.choose_fastest(IMAGE, [1, 2, 4], taking(model, 1.0, {1: 0.5}))
    assert run.channels_last == {1, 2, 4}


def test_weights_that_do_not_move_are_there_only_once(model: LoadedModel) -> None:
    other = model.channels_last()
    moved = {name for name, one in other.module.named_parameters() if one is not model.module.get_parameter(name)}
    assert moved == {name for name, one in model.module.named_parameters() if one.dim() == 4}


def test_a_model_without_convolutions_has_no_second_layout(tmp_path: Path) -> None:
    of_table = ModelSpec(builder="mlp", in_channels=3, num_classes=2)
    weights = save(build_model(of_table).state_dict())
    run = MemoryFormats(LoadedModel(stored_checkpoint(tmp_path, replace(content(0.9), model=of_table), weights)))
    run.choose_fastest((3,), [1, 2], lambda *_: pytest.fail("it was tried"))
    assert run.channels_last == frozenset()
