"""NaN and infinities in rows of requests: null where that is meant, refused by name where nothing fills them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.torch import save

from inference_service.domain.signature import PREPARED, RAW, Rows
from inference_service.serve.preprocessing import REMEDY, Preprocessing
from inference_service.serve.served_model import ServedModel
from shared.checkpoint import CheckpointContent, nan_values
from shared.dataset_version.manifest import tensor_field
from shared.model_spec import ModelSpec
from shared.models import build_model
from tests.support.checkpoint_samples import content, stored_checkpoint
from tests.support.versions import columns_of

NAN, INF = np.nan, np.inf
COLUMNS = columns_of(pa.schema([("age", pa.float64()), ("fare", pa.float32()), ("half", pa.float16())]))
STEPS: list[dict[str, Any]] = [
    {"column": "age", "fillNulls": {"value": {"number": 29.5}}},
    {"column": "age", "standardize": {"mean": 30.0, "deviation": 2.0}},
    {"column": "half", "fillNulls": {"value": {"number": 1.0}}},
    {"concat": {"columns": ["age", "fare", "half"], "into": "x"}},
]
NONE_HAD_NAN = {"age": 0, "fare": 0, "half": 0}
MODEL = ModelSpec(builder="mlp", in_channels=3, num_classes=2, kwargs={"hidden": [4]})


def people(nan_counts: Mapping[str, int] | None = NONE_HAD_NAN, steps: Sequence[Any] = STEPS) -> CheckpointContent:
    return content(
        ingested=COLUMNS,
        transforms=[{"steps": list(steps)}],
        input_column="x",
        model=MODEL,
        nan_counts=nan_counts,
    )


def rows(age: Sequence[float], fare: Sequence[float] = (), null: Sequence[bool] = ()) -> Rows:
    values: dict[str, Any] = {
        "age": np.array(age, np.float64),
        "fare": np.array(fare or [1.0] * len(age), np.float32),
        "half": np.ones(len(age), np.float16),
    }
    return Rows(RAW, values, {"age": np.array(null)} if null else {})


@pytest.mark.parametrize("column", ["age", "half"])
def test_a_nan_where_training_had_none_gives_the_same_bits_as_null(column: str) -> None:
    given = Preprocessing(people())
    plain = rows([22.0, 40.0, 3.0])
    missing = np.array([False, True, False])
    holed = {**plain.values, column: np.where(missing, NAN, plain.values[column]).astype(plain.values[column].dtype)}

    as_null, *nothing_wrong = given.prepare(Rows(RAW, plain.values, {column: missing}))
    as_nan, *also_fine = given.prepare(Rows(RAW, holed))
    as_both, *_ = given.prepare(Rows(RAW, holed, {column: missing}))

    assert nothing_wrong == also_fine == [{}, {}]
    assert as_nan.tobytes() == as_both.tobytes() == as_null.tobytes()


@pytest.mark.parametrize(
    ("nan_counts", "why"),
    [
        ({**NONE_HAD_NAN, "age": 3}, "nan is not finite, and no step fills it"),
        ({"fare": 0}, "nan may mean null, and the checkpoint does not say"),
        (None, "nan may mean null, and the checkpoint does not say"),
    ],
    ids=["training had some", "nothing is known of the column", "a checkpoint of an earlier release"],
)
def test_a_nan_that_may_be_a_number_is_refused_with_its_row_and_tensor(
    nan_counts: Mapping[str, int] | None, why: str
) -> None:
    given = Preprocessing(people(nan_counts))

    prepared, refused, failed = given.prepare(rows([22.0, NAN, 3.0]))
    fine, *nothing_wrong = given.prepare(rows([22.0, 1.0, 3.0], null=[False, True, False]))

    assert [*refused] == [1]
    assert refused[1].startswith(f"tensor 'age': {why}")
    assert not failed
    assert nothing_wrong == [{}, {}]
    assert prepared[[0, 2]].tobytes() == fine[[0, 2]].tobytes()


def test_without_statistics_a_nan_is_refused_even_where_a_step_would_make_a_number_of_it() -> None:
    steps = [
        {"column": "age", "cast": {"arrowType": "string"}},
        {"column": "age", "oneHotEncode": {"categories": ["1"], "unknown": "UNKNOWN_VALUE_ENCODE"}},
        {"concat": {"columns": ["age"], "into": "x"}},
    ]
    _, refused, _ = Preprocessing(people(None, steps)).prepare(rows([1.0, NAN]))
    assert [*refused] == [1]
    _, refused, _ = Preprocessing(people({"age": 1}, steps)).prepare(rows([1.0, NAN]))
    assert not refused


def test_an_infinity_that_a_step_clips_is_answered() -> None:
    steps = [
        {"column": "age", "minMaxScale": {"min": 0.0, "max": 100.0, "clip": True}},
        {"concat": {"columns": ["age"], "into": "x"}},
    ]
    prepared, refused, _ = Preprocessing(people(steps=steps)).prepare(rows([50.0, INF, NAN]))
    assert prepared[:2].tolist() == [[0.5], [1.0]]
    assert [*refused] == [2]


def test_nan_that_no_step_fills_is_refused_with_every_row_and_other_requests_are_answered(tmp_path: Path) -> None:
    served = served_model(tmp_path, people())
    given = rows([22.0, INF, 3.0, 4.0, 5.0], [1.0, 1.0, NAN, -INF, 5.0])

    outputs = served.forward(given)
    alone = served.forward(given.slice(4, 5))

    assert dict(outputs.refused) == {
        1: f"tensor 'age': inf is not finite, and no step fills it{REMEDY}",
        2: f"tensor 'fare': nan is not finite, and no step fills it{REMEDY}",
        3: f"tensor 'fare': -inf is not finite, and no step fills it{REMEDY}",
    }
    assert not outputs.non_finite
    np.testing.assert_allclose(outputs.arrays[0][4:], alone.arrays[0], atol=1e-6)


def test_a_number_too_large_for_the_models_input_is_refused_too() -> None:
    _, refused, _ = Preprocessing(people()).prepare(rows([1e300, 2.0]))
    assert refused == {0: f"tensor 'age', 'fare', 'half': the steps make a NaN or an infinity of this row{REMEDY}"}


def test_the_prepared_input_is_looked_through_as_well_and_never_written_to() -> None:
    sent = np.array([[1, 2, 3], [1, NAN, 3], [INF, 2, 3]], np.float32)
    sent.setflags(write=False)

    prepared, refused, _ = Preprocessing(people()).prepare(Rows(PREPARED, {"x": sent}))

    assert refused == {
        1: f"tensor 'x': nan is not finite, and no step fills it{REMEDY}",
        2: f"tensor 'x': inf is not finite, and no step fills it{REMEDY}",
    }
    assert prepared.tolist() == [[1, 2, 3], [0, 0, 0], [0, 0, 0]]


def test_where_it_is_allowed_such_rows_are_answered_and_counted_and_a_nan_that_means_null_is_filled(
    tmp_path: Path,
) -> None:
    served = served_model(tmp_path, people(), allow_non_finite=True)

    outputs = served.forward(rows([22.0, NAN, 3.0], [1.0, 1.0, NAN]))

    assert not outputs.refused
    assert list(outputs.non_finite) == [2]
    assert np.isfinite(outputs.arrays[0][:2]).all()
    assert list(outputs.slice(1, 3).non_finite) == [1]
    old = served_model(tmp_path, people(None), allow_non_finite=True).forward(rows([22.0, NAN]))
    assert list(old.non_finite) == [1]


def test_answers_that_are_no_numbers_are_counted_also_of_rows_that_are(tmp_path: Path) -> None:
    weights = {name: value * NAN for name, value in build_model(MODEL).state_dict().items()}
    outputs = ServedModel(stored_checkpoint(tmp_path, people(), save(weights))).forward(rows([22.0, INF]))
    assert [*outputs.refused] == [1]
    assert list(outputs.non_finite) == [0]


def test_pixels_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = nan_values.finite_rows

    def watched(values: Any) -> Any:
        looked.append(len(values))
        return real(values)

    monkeypatch.setattr(nan_values, "finite_rows", watched)
    pixels = Preprocessing(content())
    floats = Preprocessing(
        content(ingested=columns_of(pa.schema([tensor_field("image", pa.float32(), (1, 4))])), transforms=[])
    )

    pixels.prepare(Rows(RAW, {"image": np.zeros((2, 28, 28), np.uint8)}))
    assert not looked
    _, refused, _ = floats.prepare(Rows(RAW, {"image": np.array([[[1, 2, 3, 4]], [[1, NAN, 3, 4]]], np.float32)}))
    assert looked == [2]
    assert refused == {1: f"tensor 'image': nan is not finite, and no step fills it{REMEDY}"}


def served_model(folder: Path, said: CheckpointContent, *, allow_non_finite: bool = False) -> ServedModel:
    return ServedModel(
        stored_checkpoint(folder, said, save(build_model(MODEL).state_dict())), allow_non_finite=allow_non_finite
    )
