"""Models of tables and of numbers are served as those of images are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save

from inference_service.domain.signature import PREPARED, RAW, Rows
from inference_service.serve.served_model import ServedModel
from shared.checkpoint import CheckpointContent
from shared.errors import FailedPrecondition
from shared.model_spec import REGRESSION, ModelSpec
from shared.models import build_model
from tests.support.checkpoint_samples import content, stored_checkpoint
from tests.support.versions import columns_of

MLP = ModelSpec(builder="mlp", in_channels=3, num_classes=2, kwargs={"hidden": [4]})
COLUMNS = columns_of(pa.schema([("a", pa.float64()), ("b", pa.float32()), ("c", pa.int64()), ("y", pa.float64())]))
STEPS: list[dict[str, Any]] = [{"concat": {"columns": ["a", "b", "c"], "into": "x"}}]
RAW_ROWS = Rows(
    RAW,
    {"a": np.asarray([1.0, 2, 3]), "b": np.asarray([4, 5, 6], np.float32), "c": np.asarray([7, 8, 9], np.int64)},
)
VECTORS = np.asarray([[1, 4, 7], [2, 5, 8], [3, 6, 9]], np.float32)


def said(model: ModelSpec) -> CheckpointContent:
    return content(model=model, ingested=COLUMNS, transforms=[{"steps": STEPS}], input_column="x")


def served(folder: Path, model: ModelSpec) -> tuple[ServedModel, torch.nn.Module]:
    torch.manual_seed(3)
    module = build_model(model).eval()
    return ServedModel(stored_checkpoint(folder, said(model), save(module.state_dict()))), module


def test_a_classifier_of_a_table_answers_from_its_columns(tmp_path: Path) -> None:
    model, module = served(tmp_path, MLP)

    outputs = model.forward(RAW_ROWS)

    with torch.no_grad():
        logits = module(torch.from_numpy(VECTORS))
    assert [spec.name for spec in model.signature.raw] == ["a", "b", "c"]
    assert [spec.name for spec in model.signature.outputs] == ["logits", "probabilities", "label"]
    np.testing.assert_allclose(outputs.arrays[0], logits.numpy(), rtol=1e-6)
    assert outputs.arrays[2].tolist() == logits.argmax(1).tolist()
    assert sorted(model.warm_up(4)) == [1, 2, 4]


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_regression_answers_with_its_numbers_alone(outputs: int, tmp_path: Path) -> None:
    model, module = served(tmp_path, replace(MLP, num_classes=outputs, task=REGRESSION))

    answers = [model.forward(rows) for rows in (RAW_ROWS, Rows(PREPARED, {"x": VECTORS}))]

    with torch.no_grad():
        expected = module(torch.from_numpy(VECTORS)).numpy()
    assert [(spec.name, str(spec)) for spec in model.signature.outputs] == [("values", f"FP32 [-1, {outputs}]")]
    for answer in answers:
        assert len(answer.arrays) == 1
        np.testing.assert_allclose(answer.arrays[0], expected, rtol=1e-6)


def test_the_checkpoint_says_what_its_outputs_mean() -> None:
    manifest = said(replace(MLP, task=REGRESSION)).as_manifest()

    assert CheckpointContent.from_manifest(manifest).model.task == REGRESSION
    del manifest["model"]["task"]  # as older ones are
    assert CheckpointContent.from_manifest(manifest).model.task == "CLASSIFICATION"


def test_a_model_of_a_package_that_is_not_installed_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"does not load: model\.builder: 'theirs'") as refused:
        ServedModel(stored_checkpoint(tmp_path, said(replace(MLP, builder="theirs")), b""))

    assert refused.value.specific_reason == "MODEL_DOES_NOT_LOAD"
