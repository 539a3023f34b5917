"""Rows as a dataset has them, of a table and of encoded photos, all the way from Triton's client to a replica."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from shared.checkpoint import CheckpointContent
from shared.model_spec import ModelSpec
from shared.models import build_model
from tests.integration.inference_service.checkpoints import write
from tests.integration.inference_service.conftest import Stack
from tests.integration.inference_service.tritonclient_scripts import run_triton_script
from tests.support.checkpoint_samples import content
from tests.support.versions import columns_of

CLASSES, SIDE = 3, 32
MODELS = {
    "table": ModelSpec(builder="mlp", in_channels=4, num_classes=CLASSES, kwargs={"hidden": [8]}),
    "photos": ModelSpec(builder="torchvision.shufflenet_v2_x0_5", in_channels=3, num_classes=CLASSES),
}
STEPS: dict[str, list[dict[str, Any]]] = {
    "table": [
        {"column": "mass", "fillNulls": {"value": {"number": 0.5}}},
        {"column": "kind", "oneHotEncode": {"categories": ["cat", "dog"], "unknown": "UNKNOWN_VALUE_ERROR"}},
        {"concat": {"columns": ["mass", "count", "kind"], "into": "x"}},
    ],
    "photos": [
        {"column": "photo", "decodeImage": {}},
        {"column": "photo", "resize": {"height": SIDE, "width": SIDE}},
        {"column": "photo", "toFloat": {}},
    ],
}
COLUMNS = {
    "table": pa.schema([("mass", pa.float64()), ("count", pa.int64()), ("kind", pa.string()), ("y", pa.int64())]),
    "photos": pa.schema([("photo", pa.binary()), ("y", pa.int64())]),
}
INPUT = {"table": "x", "photos": "photo"}


def photo(seed: int, kind: str) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


# By model and input, the datatype and a value a row.
ASKED: dict[str, dict[str, tuple[str, list[Any]]]] = {
    "table": {
        "mass": ("FP64", [0.25, 1e6, -3.0]),
        "mass.null": ("BOOL", [False, True, False]),
        "count": ("INT64", [1, 2, -7]),
        "kind": ("BYTES", [b"dog", b"cat", b"dog"]),
    },
    "photos": {"photo": ("BYTES", [photo(1, "PNG"), photo(2, "JPEG"), photo(3, "PNG")])},
}


def said(model: str) -> CheckpointContent:
    return content(
        training_job=f"trainingJobs/{model}",
        model=MODELS[model],
        ingested=columns_of(COLUMNS[model]),
        transforms=[{"steps": STEPS[model]}],
        input_column=INPUT[model],
    )


def module_of(model: str) -> torch.nn.Module:
    torch.manual_seed(3)
    return build_model(MODELS[model]).eval()


@pytest.fixture(scope="module")
def answered(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The logits that the real tritonclient got, by model."""
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    encoded = {
        model: {
            name: (datatype, [base64.b64encode(value).decode() if datatype == "BYTES" else value for value in values])
            for name, (datatype, values) in inputs.items()
        }
        for model, inputs in ASKED.items()
    }
    path.write_text(json.dumps(encoded))
    made = []
    try:
        for model in MODELS:
            job = f"trainingJobs/{model}"
            write(stack.store, job=job, weights=save(module_of(model).state_dict()), said=said(model))
            made.append(stack.client.deploy(model, job).name)
        seen: dict[str, Any] = run_triton_script("triton_rows.py", stack.service.address, str(path))
    finally:
        for name in made:
            stack.client.delete(name)
    return seen


def prepared(model: str) -> torch.Tensor:
    """What the steps make of the rows, without any code of theirs; the photos have their size already."""
    values = {name: given for name, (_, given) in ASKED[model].items()}
    if model == "photos":
        pixels = [np.asarray(Image.open(io.BytesIO(photo))) for photo in values["photo"]]
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous().float() / 255
    mass = [0.5 if null else value for value, null in zip(values["mass"], values["mass.null"], strict=True)]
    kinds = [[kind == b"cat", kind == b"dog"] for kind in values["kind"]]
    return torch.tensor([[m, n, *one] for m, n, one in zip(mass, values["count"], kinds, strict=True)])


@pytest.mark.parametrize("model", MODELS)
def test_raw_rows_are_answered_as_the_model_answers_what_its_steps_make_of_them(
    answered: dict[str, Any], model: str
) -> None:
    with torch.inference_mode():
        expected = module_of(model)(prepared(model)).numpy()
    np.testing.assert_allclose(answered[model], expected, rtol=0, atol=1e-4)
    assert len({tuple(row) for row in answered[model]}) == len(expected), "each row has an answer of its own"
