from __future__ import annotations

import numpy as np
import pytest

from inference_service.domain.signature import Signature, TensorSpec, outputs_wanted, rows_of
from inference_service.domain.tensors import WireTensor
from shared.errors import InvalidArgument

SIGNATURE = Signature(
    raw=(TensorSpec("image", "UINT8", (-1, 2, 2)),),
    prepared=TensorSpec("image", "FP32", (-1, 1, 2, 2)),
    outputs=(TensorSpec("logits", "FP32", (-1, 10)), TensorSpec("label", "INT64", (-1,))),
)


def image(
    name: str = "image", datatype: str = "UINT8", shape: tuple[int, ...] = (3, 2, 2), index: int = 0
) -> WireTensor:
    itemsize = 1 if datatype == "UINT8" else 4
    return WireTensor(f"inputs[{index}]", name, datatype, shape, bytes(abs(int(np.prod(shape))) * itemsize), {})


def test_raw_rows_and_prepared_tensors_are_told_apart() -> None:
    assert rows_of(SIGNATURE, [image()], 100).form == "raw"
    assert rows_of(SIGNATURE, [image(datatype="FP32", shape=(3, 1, 2, 2))], 100).form == "prepared"
    assert len(rows_of(SIGNATURE, [image()], 100)) == 3


@pytest.mark.parametrize(
    ("tensors", "field", "what"),
    [
        ([], "inputs", "'image' is missing"),
        ([image(name="picture")], "inputs[0].name", "'image'"),
        ([image(), image(index=1)], "inputs[1].name", "twice"),
        ([image(), image(name="other", index=1)], "inputs[1].name", "'image'"),
        ([image(datatype="FP32")], "inputs[0].shape", "FP32 [-1, 1, 2, 2]"),
        ([image(datatype="INT32", shape=(3, 2, 2))], "inputs[0].datatype", "UINT8 [-1, 2, 2]"),
        ([image(shape=(3, 2, 3))], "inputs[0].shape", "UINT8 [-1, 2, 2]"),
        ([image(shape=(2, 2))], "inputs[0].shape", "UINT8 [-1, 2, 2]"),
        ([image(shape=())], "inputs[0].shape", "UINT8 [-1, 2, 2]"),
        ([image(shape=(0, 2, 2))], "inputs[0].shape", "1 to 100 rows"),
        ([image(shape=(101, 2, 2))], "inputs[0].shape", "1 to 100 rows"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(tensors: list[WireTensor], field: str, what: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        rows_of(SIGNATURE, tensors, 100)
    assert refused.value.fields[0][0] == field
    assert what in refused.value.message


def test_outputs_come_in_the_order_asked_for_and_all_when_none_is() -> None:
    assert [output.name for output in outputs_wanted(SIGNATURE, ["label", "logits"])] == ["label", "logits"]
    assert outputs_wanted(SIGNATURE, []) == SIGNATURE.outputs


@pytest.mark.parametrize(
    ("requested", "field"), [(["score"], "outputs[0].name"), (["label", "label"], "outputs[1].name")]
)
def test_an_unknown_or_doubled_output_is_refused(requested: list[str], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        outputs_wanted(SIGNATURE, requested)
    assert refused.value.fields[0][0] == field


def test_a_signature_survives_the_log() -> None:
    assert Signature.from_record(SIGNATURE.as_record()) == SIGNATURE
