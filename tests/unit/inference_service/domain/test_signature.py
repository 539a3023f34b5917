from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from inference_service.domain.signature import (
    Signature,
    TensorSpec,
    WireTensor,
    check_answer_fits,
    outputs_wanted,
    rows_of,
)
from shared.errors import InvalidArgument
from tests.support.cpu_time import cpu_at_most

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


def test_raw_rows_and_prepared_tensors_are_distinguished() -> None:
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


PEOPLE = Signature(
    raw=(
        TensorSpec("age", "FP64", (-1,), nullable=True),
        TensorSpec("name", "BYTES", (-1,), nullable=True),
        TensorSpec("x", "FP32", (-1, 2)),
    ),
    prepared=TensorSpec("features", "FP32", (-1, 4)),
    outputs=SIGNATURE.outputs,
)


def person(index: int, name: str, rows: int = 2) -> WireTensor:
    datatype, shape, data = {
        "age": ("FP64", (rows,), np.arange(float(rows)).tobytes()),
        "name": ("BYTES", (rows,), b"".join(b"\x01\0\0\0" + b"abc"[row : row + 1] for row in range(rows))),
        "x": ("FP32", (rows, 2), np.zeros((rows, 2), np.float32).tobytes()),
        "age.null": ("BOOL", (rows,), bytes([0, 1, 0][:rows])),
        "x.null": ("BOOL", (rows,), bytes(rows)),
        "features": ("FP32", (rows, 4), np.ones((rows, 4), np.float32).tobytes()),
    }[name]
    return WireTensor(f"inputs[{index}]", name, datatype, shape, data, {})


def people(*names: str) -> list[WireTensor]:
    return [person(index, name) for index, name in enumerate(names)]


def test_raw_rows_of_several_columns_come_in_any_order() -> None:
    rows = rows_of(PEOPLE, people("x", "name", "age"), 100)

    assert (rows.form, len(rows), set(rows.values), rows.nulls) == ("raw", 2, {"age", "name", "x"}, {})
    assert rows.values["name"].tolist() == [b"a", b"b"]


def test_nulls_of_a_column_are_sent_beside_it() -> None:
    rows = rows_of(PEOPLE, people("age.null", "age", "name", "x"), 100)

    assert set(rows.values) == {"age", "name", "x"}
    assert {name: flags.tolist() for name, flags in rows.nulls.items()} == {"age": [False, True]}


def test_a_column_whose_name_is_that_of_anothers_nulls_is_a_column() -> None:
    clash = Signature(
        (TensorSpec("age", "FP64", (-1,), nullable=True), TensorSpec("age.null", "BOOL", (-1,), nullable=True)),
        PEOPLE.prepared,
        (),
    )

    rows = rows_of(clash, people("age", "age.null"), 100)

    assert (set(rows.values), rows.nulls) == ({"age", "age.null"}, {})


def test_the_prepared_input_may_have_a_name_that_no_column_has() -> None:
    rows = rows_of(PEOPLE, people("features"), 100)

    assert (rows.form, set(rows.values)) == ("prepared", {"features"})


@pytest.mark.parametrize(
    ("tensors", "field", "what"),
    [
        ([], "inputs", "the model's inputs are 'age', 'name', 'x'"),
        (people("age", "x"), "inputs", "'name' is missing"),
        (people("age", "name", "x", "age"), "inputs[3].name", "twice"),
        (people("age", "name", "x", "x.null"), "inputs[3].name", "the model's inputs are"),
        (people("features", "age", "name", "x"), "inputs[0].name", "raw rows or the prepared input"),
        ([person(0, "age"), person(1, "name", 3), person(2, "x")], "inputs[1].shape", "as many rows as 'age', 2"),
        ([*people("age", "name", "x"), person(3, "age.null", 1)], "inputs[3].shape", "as many rows as 'age', 2"),
    ],
)
def test_raw_rows_that_do_not_fit_are_refused_by_name(tensors: list[WireTensor], field: str, what: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        rows_of(PEOPLE, tensors, 100)
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
    for one in (SIGNATURE, PEOPLE):
        assert Signature.from_record(json.loads(json.dumps(one.as_record()))) == one


def test_a_signature_of_an_earlier_release_offers_the_names_that_its_log_has() -> None:
    classifier = replace(
        PEOPLE,
        outputs=(TensorSpec("logits", "FP32", (-1, 2), class_names=("no", "yes")), TensorSpec("label", "INT64", (-1,))),
    )
    read = Signature.from_record(classifier.as_record())
    assert [one.name for one in read.offered] == ["logits", "label", "label_name"]
    assert [one.name for one in outputs_wanted(read, [])] == ["logits", "label"]
    assert outputs_wanted(read, ["label_name"])[0].class_names == ("no", "yes")
    assert PEOPLE.offered == PEOPLE.outputs


@pytest.mark.timed
def test_strings_are_looked_at_only_after_their_number() -> None:
    strings = Signature((TensorSpec("s", "BYTES", (-1,)),), TensorSpec("x", "FP32", (-1, 2)), ())
    many = 1_000_000
    for tensor in (
        WireTensor("inputs[0]", "s", "BYTES", (many,), bytes(4 * many), {}),
        WireTensor("inputs[0]", "s", "BYTES", (many,), None, {"bytes_contents": [b""] * many}),
    ):
        with cpu_at_most(0.02), pytest.raises(InvalidArgument, match="1 to 100 rows"):
            rows_of(strings, [tensor], 100)


def test_rows_know_about_what_they_take_in_memory() -> None:
    assert rows_of(SIGNATURE, [image()], 100).size_bytes == 12
    assert rows_of(SIGNATURE, [image(datatype="FP32", shape=(3, 1, 2, 2))], 100).size_bytes == 48
    strings = Signature((TensorSpec("s", "BYTES", (-1,)),), TensorSpec("x", "FP32", (-1, 2)), ())
    raw = b"\x03\0\0\0abc" + b"\x64\0\0\0" + bytes(100)
    assert rows_of(strings, [WireTensor("inputs[0]", "s", "BYTES", (2,), raw, {})], 9).size_bytes == len(raw)
    typed = {"bytes_contents": [b"abc", bytes(100)]}
    assert rows_of(strings, [WireTensor("inputs[0]", "s", "BYTES", (2,), None, typed)], 9).size_bytes == 103


def test_an_answer_beyond_the_bound_is_refused_with_the_rows_that_would_fit() -> None:
    logits, label = SIGNATURE.outputs
    assert (logits.row_bytes, label.row_bytes, SIGNATURE.answer_row_bytes) == (40, 8, 48)
    check_answer_fits([logits, label], 2, 96)
    with pytest.raises(InvalidArgument, match=r"144 bytes for 3 rows.*send at most 2 rows, or ask for fewer outputs"):
        check_answer_fits([logits, label], 3, 100)
    with pytest.raises(InvalidArgument, match="an answer may have 47; ask for fewer outputs") as refused:
        check_answer_fits([logits, label], 1, 47)
    assert refused.value.fields[0][0] == "outputs"
    check_answer_fits([label], 1, 47)
