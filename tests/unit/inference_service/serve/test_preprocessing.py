"""From a request's rows to the model's input; the rows that it cannot be made of are told one by one."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from inference_service.domain.signature import PREPARED, RAW, Rows, TensorSpec
from inference_service.serve.preprocessing import Preprocessing
from shared.checkpoint import CheckpointContent
from shared.dataset_version.manifest import Column
from shared.errors import FailedPrecondition, Internal, InvalidArgument
from shared.transforms.steps.custom import DEFAULT_TIMEOUT_S
from tests.support import custom_functions
from tests.support.checkpoint_samples import content
from tests.support.cpu_time import cpu_at_most
from tests.support.versions import columns_of
from tests.unit.shared.transforms.samples import fitted, pipeline


def said(columns: list[Column], *steps: dict[str, Any], input_column: str = "x") -> CheckpointContent:
    """A checkpoint whose version was made by the first of these steps, and whose training did the others."""
    transforms = [{"steps": [*steps[:1]]}, {"steps": [*steps[1:]]}]
    return content(ingested=columns, transforms=transforms, input_column=input_column)


PHOTOS = columns_of(pa.schema([("photo", pa.binary()), ("label", pa.int64()), ("taken", pa.timestamp("us"))]))
TABLE = columns_of(
    pa.schema([("a", pa.float64()), ("s", pa.string()), ("label", pa.int64()), ("price", pa.decimal128(9, 2))])
)

CONCAT_A: dict[str, Any] = {"concat": {"columns": ["a"], "into": "x"}}


def photos() -> Preprocessing:
    steps: list[dict[str, Any]] = [
        {"column": "photo", "decodeImage": {}},
        {"column": "photo", "resize": {"height": 4, "width": 5}},
        {"column": "photo", "toFloat": {}},
    ]
    return Preprocessing(said(PHOTOS, *steps, input_column="photo"))


def table() -> Preprocessing:
    steps: list[dict[str, Any]] = [
        {"column": "s", "oneHotEncode": {"categories": ["ja", "nein"], "unknown": "UNKNOWN_VALUE_ERROR"}},
        {"concat": {"columns": ["a", "s"], "into": "x"}},
    ]
    return Preprocessing(said(TABLE, *steps))


def png(shade: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (6, 6), (shade, shade, shade)).save(data, "PNG")
    return data.getvalue()


def objects(*items: bytes) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def test_raw_rows_have_a_tensor_for_each_column_that_the_input_is_made_of() -> None:
    assert [(spec.name, str(spec)) for spec in photos().raw] == [("photo", "BYTES [-1]")]
    assert [(spec.name, str(spec)) for spec in table().raw] == [("a", "FP64 [-1]"), ("s", "BYTES [-1]")]
    assert photos().prepared == TensorSpec("photo", "FP32", (-1, 3, 4, 5))
    assert table().prepared == TensorSpec("x", "FP32", (-1, 3))


def test_a_checkpoint_of_one_tensor_column_looks_on_the_wire_as_its_column() -> None:
    one = Preprocessing(content())

    assert [(spec.name, str(spec), spec.nullable) for spec in one.raw] == [("image", "UINT8 [-1, 28, 28]", False)]
    assert one.prepared == TensorSpec("image", "FP32", (-1, 1, 28, 28))


TEXTS = ["a good film", "", "a bad film of 東京", "a good film " * 800_000]


def texts() -> tuple[Preprocessing, np.ndarray[Any, Any]]:
    """What serves a model of tokens, and what a version of these texts holds for its training."""
    learning: dict[str, Any] = {"column": "s", "tokenize": {"vocabularySize": 280, "maxLength": 16}}
    learnt = fitted(pipeline(learning), {"s": pa.array(TEXTS)})
    (tokenize,) = learnt.config["steps"]
    concat = {"concat": {"columns": ["input_ids", "attention_mask"], "into": "x"}}
    prepared = pipeline(tokenize, concat)({"s": pa.array(TEXTS)})["x"]
    return Preprocessing(said(TABLE, tokenize, concat)), prepared


def test_texts_get_the_bits_that_training_got_cut_and_padded() -> None:
    serving, trained = texts()

    together, refused, failed = serving.prepare(Rows(RAW, {"s": objects(*map(str.encode, TEXTS))}))
    alone = [serving.prepare(Rows(RAW, {"s": objects(text.encode())}))[0] for text in TEXTS]

    assert [(spec.name, str(spec)) for spec in serving.raw] == [("s", "BYTES [-1]")]
    assert (refused, failed) == ({}, {})
    assert together.shape == (4, 32)
    assert together.tobytes() == b"".join(one.tobytes() for one in alone) == trained.tobytes()


def test_a_text_that_is_no_utf_8_is_refused_alone() -> None:
    serving, trained = texts()

    prepared, refused, _ = serving.prepare(Rows(RAW, {"s": objects(TEXTS[0].encode(), b"\xff", TEXTS[2].encode())}))

    assert list(refused) == [1]
    assert "'s'" in refused[1]
    assert prepared[[0, 2]].tobytes() == trained[[0, 2]].tobytes()


def test_an_image_that_does_not_decode_is_refused_alone() -> None:
    rows = Rows(RAW, {"photo": objects(png(10), b"no image", png(30))})

    prepared, refused, _ = photos().prepare(rows)

    assert list(refused) == [1]
    assert refused[1].startswith("tensor 'photo': ")
    for row, shade in ((0, 10), (2, 30)):
        alone, none, _ = photos().prepare(Rows(RAW, {"photo": objects(png(shade))}))
        assert not none
        assert prepared[row].tobytes() == alone[0].tobytes()
        assert np.unique(prepared[row]).tolist() == [np.float32(shade) / np.float32(255)]
    assert not prepared[1].any()


def jpeg_that_claims(width: int, height: int) -> bytes:
    """A small file whose header names another size."""
    data = io.BytesIO()
    Image.new("RGB", (6, 6)).save(data, "JPEG")
    small = data.getvalue()
    size = small.index(b"\xff\xc0") + 5  # the frame's header: length, precision, then height and width
    return small[:size] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + small[size + 4 :]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.timed
def test_an_image_of_a_hundred_megapixels_is_refused_before_it_is_decoded() -> None:
    with cpu_at_most(0.5):  # decoding it takes more
        _, refused, _ = photos().prepare(Rows(RAW, {"photo": objects(jpeg_that_claims(10_000, 10_000), png(3))}))
        assert [*refused] == [0]
        assert "tensor 'photo': " in refused[0]
        assert "10000×10000 pixels; use fewer than 100,000,000" in refused[0]


def large(megapixels: int) -> bytes:
    data = io.BytesIO()
    Image.new("L", (megapixels * 1000, 1000), megapixels).save(data, "PNG")
    return data.getvalue()


def test_images_that_are_too_many_pixels_to_lie_side_by_side_are_prepared_one_by_one_to_the_same_bits() -> None:
    rows = Rows(RAW, {"photo": objects(*[large(9)] * 4, png(7))})
    tracemalloc.start()  # which sees numpy's memory
    prepared, refused, failed = photos().prepare(rows)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not refused
    assert not failed
    assert peak_bytes < 110e6  # three bytes a pixel, and not of all 36 megapixels
    for row in range(5):
        assert prepared[row].tobytes() == photos().prepare(rows.slice(row, row + 1))[0][0].tobytes()


@pytest.mark.timed
def test_a_request_of_too_many_pixels_is_refused_before_they_are_decoded_and_others_in_its_batch_are_not() -> None:
    data = large(50)
    with cpu_at_most(0.5):  # decoding them takes more
        whole = Rows.joined([Rows(RAW, {"photo": objects(png(7))}), Rows(RAW, {"photo": objects(*[data] * 4)})])
        prepared, refused, failed = photos().prepare(whole)
    assert [*refused] == [4]
    assert refused[4].startswith("tensor 'photo': ")
    assert "200,000,000 pixels together; send at most 150,000,000" in refused[4]
    assert not failed
    assert prepared[0].tobytes() == photos().prepare(Rows(RAW, {"photo": objects(png(7))}))[0][0].tobytes()


def test_dates_that_python_does_not_have_are_refused_as_any_other_value() -> None:
    columns = columns_of(pa.schema([("d", pa.date32()), ("label", pa.int64())]))
    steps: list[dict[str, Any]] = [
        {"column": "d", "cast": {"arrowType": arrow_type}} for arrow_type in ("timestamp[ns]", "int64", "double")
    ]
    dates = Preprocessing(said(columns, *steps, {"concat": {"columns": ["d"], "into": "x"}}))

    prepared, refused, failed = dates.prepare(Rows(RAW, {"d": np.array([2**31 - 1, 1], np.int32)}))

    assert [*refused] == [0]
    assert refused[0].startswith("tensor 'd': 'd' is ")
    assert not failed
    assert prepared[1].tolist() == [np.float32(86_400e9)]


def test_nan_is_refused_for_an_integer_and_nowhere_else() -> None:
    given = Rows(RAW, {"a": np.array([1.0, np.nan, -np.inf, 2.0])})
    whole = Preprocessing(said(TABLE, {"column": "a", "cast": {"arrowType": "int64"}}, CONCAT_A))

    prepared, refused, failed = whole.prepare(given)

    assert [*refused] == [1, 2]
    assert all(one.startswith("tensor 'a': ") for one in refused.values())
    assert not failed
    assert prepared[[0, 3]].tolist() == [[1], [2]]
    prepared, refused, failed = Preprocessing(said(TABLE, CONCAT_A), allow_non_finite=True).prepare(given)
    assert not refused
    assert not failed
    assert np.isnan(prepared[1])


def test_an_unexpected_failure_is_the_error_of_its_row_alone(caplog: pytest.LogCaptureFixture) -> None:
    made = Preprocessing(said(TABLE, CONCAT_A))
    apply = made._apply

    def failing(rows: Rows) -> Any:
        if (rows.values["a"] == 13).any():
            raise OverflowError("13")
        return apply(rows)

    made._apply = failing  # type: ignore[method-assign]

    prepared, refused, failed = made.prepare(Rows(RAW, {"a": np.array([1.0, 13.0, 2.0])}))

    assert prepared.tolist() == [[1], [0], [2]]
    assert not refused
    assert [*failed] == [1]
    assert isinstance(failed[1], Internal)
    assert "OverflowError: 13" in caplog.text


def test_one_row_that_is_bad_is_refused() -> None:
    prepared, refused, _ = photos().prepare(Rows(RAW, {"photo": objects(b"")}))

    assert list(refused) == [0]
    assert prepared.shape == (1, 3, 4, 5)


def test_a_refused_row_names_the_tensors_that_the_step_works_on() -> None:
    rows = Rows(
        RAW,
        {"a": np.array([1.0, 2.0, 3.0, 4.0]), "s": objects(b"ja", b"vielleicht", b"\xff", b"nein")},
        {"a": np.array([True, False, False, False])},
    )

    prepared, refused, _ = table().prepare(rows)

    assert sorted(refused) == [0, 1, 2]
    assert refused[0].startswith("tensor 'a', 's': ")  # concat: one of both is null
    assert refused[1].startswith("tensor 's': ")
    assert refused[2].startswith("tensor 's' ")
    assert prepared[3].tolist() == [4, 0, 1]


def test_prepared_rows_go_as_they_are() -> None:
    given = np.random.default_rng(1).random((2, 3), np.float32)

    prepared, refused, _ = table().prepare(Rows(PREPARED, {"x": given}))

    assert prepared is given
    assert not refused


def test_a_column_that_cannot_be_sent_is_refused_where_the_input_needs_it_and_only_there() -> None:
    assert table().raw  # `price` is a decimal, too, and not needed
    cast: dict[str, Any] = {"column": "price", "cast": {"arrowType": "double"}}
    with pytest.raises(FailedPrecondition, match="column 'price'"):
        Preprocessing(said(TABLE, cast, {"concat": {"columns": ["price"], "into": "x"}}))


def test_steps_that_do_not_fit_the_ingested_columns_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="no column 'b'"):
        Preprocessing(said(TABLE, {"concat": {"columns": ["b"], "into": "x"}}))
    with pytest.raises(FailedPrecondition, match="not float32"):
        Preprocessing(said(TABLE, {"rename": {"columns": {"a": "x"}}}))


@pytest.mark.parametrize("allowed", [(), ("os:getcwd",)])
def test_a_function_that_the_operator_does_not_allow_is_never_called(allowed: tuple[str, ...]) -> None:
    custom = {"custom": {"function": "tests.unit.inference_service.test_preprocessing:explode", "columns": ["a"]}}

    with pytest.raises(FailedPrecondition) as refused:
        Preprocessing(said(TABLE, custom, {"concat": {"columns": ["a"], "into": "x"}}), allowed)

    assert refused.value.specific_reason == "CUSTOM_FUNCTION_NOT_ALLOWED"


def explode(_: pa.RecordBatch) -> pa.RecordBatch:
    raise AssertionError("it was called")


def test_rows_that_are_tried_one_by_one_are_progress_and_a_batch_in_one_go_is_none() -> None:
    moves: list[int] = []

    def note_progress() -> None:
        moves.append(len(moves))

    photos().prepare(Rows(RAW, {"photo": objects(png(1), png(2))}), note_progress)
    assert moves == []
    photos().prepare(Rows(RAW, {"photo": objects(png(1), b"no image", png(2))}), note_progress)
    assert len(moves) == 3


def tries_of(made: Preprocessing) -> list[Rows]:
    """The rows of each try from here on."""
    tries, apply = list[Rows](), made._apply

    def noted(part: Rows) -> Any:
        tries.append(part)
        return apply(part)

    made._apply = noted  # type: ignore[method-assign, assignment]
    return tries


def test_a_few_bad_rows_of_a_large_batch_of_a_table_cost_few_calls_more() -> None:
    rows, bad = 256, {0: b"vielleicht", 130: b"\xff", 255: b"maybe"}
    words = objects(*[bad.get(row, b"nein") for row in range(rows)])
    made = table()
    tries = tries_of(made)

    prepared, refused, failed = made.prepare(Rows(RAW, {"a": np.arange(256.0), "s": words}))

    assert [*refused] == [*bad]
    assert not failed
    assert len(tries) <= 1 + len(bad) * 2 * int(np.log2(rows))
    good = np.array([row not in bad for row in range(rows)])
    assert prepared[good].tolist() == [[row, 0, 1] for row in range(rows) if row not in bad]
    assert not prepared[~good].any()


def test_a_large_batch_of_bad_rows_costs_hardly_more_than_a_call_for_each() -> None:
    rows, made = 256, table()
    tries = tries_of(made)

    _, refused, failed = made.prepare(Rows(RAW, {"a": np.arange(256.0), "s": objects(*[b"maybe"] * rows)}))

    assert [*refused] == [*range(rows)]
    assert not failed
    assert len(tries) <= rows + 6 * int(np.log2(rows))


# By itself, and beside a row that fails before the function is called.
@pytest.mark.parametrize(("bad", "times"), [({}, 2), ({31: b"maybe"}, 3)])
def test_a_row_that_a_custom_function_never_ends_with_is_not_tried_in_each_half(
    bad: dict[int, bytes], times: int
) -> None:
    function, rows, endless = f"{custom_functions.MODULE}:hanging", 32, custom_functions.POISON
    steps: list[dict[str, Any]] = [
        {"column": "s", "oneHotEncode": {"categories": ["ja", "nein"], "unknown": "UNKNOWN_VALUE_ERROR"}},
        {"custom": {"function": function, "columns": ["a"], "timeoutS": 0.5}},
        {"concat": {"columns": ["a", "s"], "into": "x"}},
    ]
    made = Preprocessing(said(TABLE, *steps), [function])
    tries = tries_of(made)
    words = objects(*[bad.get(row, b"nein") for row in range(rows)])

    prepared, refused, failed = made.prepare(Rows(RAW, {"a": np.arange(float(rows)), "s": words}))

    assert sorted(refused) == [endless, *bad]
    assert "took longer than 0.5 s" in refused[endless]
    assert not failed
    good = [row for row in range(rows) if row not in refused]
    assert prepared[good].tolist() == [[row, 0, 1] for row in good]
    assert sum(endless in one.values["a"] for one in tries) == times


def test_custom_functions_may_take_as_long_as_they_were_given() -> None:
    function = f"{custom_functions.MODULE}:raising"
    steps: list[dict[str, Any]] = [
        {"custom": {"function": function, "columns": ["a"], **timeout}} for timeout in ({"timeoutS": 5}, {})
    ]
    concat = {"concat": {"columns": ["a"], "into": "x"}}
    assert Preprocessing(said(TABLE, *steps, concat), [function]).custom_s == 5 + DEFAULT_TIMEOUT_S
    assert Preprocessing(said(TABLE, concat)).custom_s == 0
