"""A model of several inputs in serving: its signature, rows of several requests together, and refused requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference_service.deploy.rollout_driver import holdout_rows
from inference_service.domain.signature import RAW, Rows, Signature, WireTensor, datatype_of, rows_of
from inference_service.serve.replica import ModelReplica, ReplicaSpec
from inference_service.serve.served_model import ServedModel
from shared.checkpoint import load_checkpoint
from shared.errors import InvalidArgument
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.own_models import code_of_this_process
from tests.support.several_inputs import INPUTS, VERSION, arrays, commit_rows, logits_of, table, write_model

Array = np.ndarray[Any, Any]
CLOSE = 1e-5


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=(tmp_path / "store").as_uri()))


@pytest.fixture
def served(store: ObjectStore) -> Iterator[tuple[ServedModel, torch.nn.Module]]:
    with code_of_this_process():
        entry, module = write_model(store)
        yield ServedModel(load_checkpoint(store, entry.folder, entry.manifest_sha256)), module


def sent(inputs: dict[str, Array]) -> list[WireTensor]:
    return [
        WireTensor(f"inputs[{index}]", name, datatype_of(one.dtype) or "", one.shape, one.tobytes(), {})
        for index, (name, one) in enumerate(inputs.items())
    ]


def test_the_signature_has_a_tensor_for_each_column(served: tuple[ServedModel, torch.nn.Module]) -> None:
    signature = served[0].signature

    assert [(one.name, str(one)) for one in signature.raw] == [
        ("image", "UINT8 [-1, 6, 6]"),
        ("age", "FP64 [-1]"),
        ("smokes", "BOOL [-1]"),
        ("tokens", "INT32 [-1, 5]"),
    ]
    assert signature.prepared is None
    assert Signature.from_record(signature.as_record()) == signature


def test_rows_of_several_requests_are_answered_together_as_the_model_answers_them(
    served: tuple[ServedModel, torch.nn.Module],
) -> None:
    model, module = served
    model.warm_up(8)
    requests = [arrays(table(rows, seed=rows)) for rows in (1, 4, 3)]
    together = Rows.joined([rows_of(model.signature, sent(one), 8) for one in requests])

    logits, probabilities, labels = model.forward(together).checked()

    expected = np.concatenate([logits_of(module, one) for one in requests])
    np.testing.assert_allclose(logits, expected, atol=CLOSE)
    assert labels.tolist() == expected.argmax(1).tolist()
    assert probabilities.shape == expected.shape


def test_a_replica_loads_the_code_and_answers_rows_of_several_inputs(store: ObjectStore) -> None:
    with code_of_this_process():
        entry, module = write_model(store)
    spec = ReplicaSpec(
        store=store.settings,
        folder=entry.folder,
        manifest_sha256=entry.manifest_sha256,
        threads=1,
        max_batch_size=4,
        own_code=True,
    )
    inputs = arrays(table(3))

    with code_of_this_process():
        answered = asyncio.run(ModelReplica(spec).forward(Rows(RAW, inputs)))

    np.testing.assert_allclose(answered.arrays[0], logits_of(module, inputs), atol=CLOSE)


def test_only_the_rows_with_a_null_or_a_nan_are_refused(served: tuple[ServedModel, torch.nn.Module]) -> None:
    model, module = served
    inputs = arrays(table(6))
    inputs["age"][4] = np.nan
    flags = np.array([False, True, False, False, False, False])

    outputs = model.forward(Rows(RAW, inputs, {"smokes": flags}, requests=(6,)))

    assert sorted(outputs.refused) == [1, 4]
    assert "column 'smokes' is null" in outputs.refused[1]
    assert "tensor 'age': nan is not finite" in outputs.refused[4]
    good = [0, 2, 3, 5]
    np.testing.assert_allclose(outputs.arrays[0][good], logits_of(module, inputs)[good], atol=CLOSE)


@pytest.mark.parametrize(
    ("field", "said", "change"),
    [
        ("inputs", "tensor 'tokens' is missing", {"tokens": None}),
        ("inputs[1].shape", "tensor 'age' must have as many rows as 'image', 3", {"age": np.zeros(2)}),
        ("inputs[1].datatype", "tensor 'age': send FP64 [-1]", {"age": np.zeros(3, np.float32)}),
        ("inputs[3].shape", "tensor 'tokens': send INT32 [-1, 5]", {"tokens": np.zeros((3, 4), np.int32)}),
        ("inputs[4].name", "the model's inputs are 'image', 'age', 'smokes', 'tokens'", {"other": np.zeros(3)}),
    ],
)
def test_a_request_that_does_not_fit_is_refused_naming_the_tensor(
    served: tuple[ServedModel, torch.nn.Module], field: str, said: str, change: dict[str, Any]
) -> None:
    inputs = {name: one for name, one in {**arrays(table(3)), **change}.items() if one is not None}

    with pytest.raises(InvalidArgument) as refused:
        rows_of(served[0].signature, sent(inputs), 8)

    ((path, text),) = refused.value.fields
    assert path == field
    assert said in text


def test_a_comparison_takes_the_same_columns_of_a_version(
    served: tuple[ServedModel, torch.nn.Module], store: ObjectStore
) -> None:
    commit_rows(store)

    rows = holdout_rows(store, VERSION, "validation", 9, served[0].signature)

    expected = arrays(table(33, 1))
    assert (rows.form, sorted(rows.values)) == (RAW, sorted(INPUTS))
    assert all(np.array_equal(rows.values[name], expected[name][:9]) for name in INPUTS)
