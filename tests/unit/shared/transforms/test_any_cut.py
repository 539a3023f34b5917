"""The promise of all steps: a row comes out with the same bits in a batch of any size, in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.transforms import Batch, RowKeys, arrow_schema, table_of
from shared.transforms.batch import row_count
from shared.transforms.pipeline import STEPS
from tests.unit.shared.transforms.samples import (
    bits,
    cut,
    fitted,
    joined_bits,
    people,
    pipeline,
    schema_of_batch,
)

ROWS = 23
PEOPLE = people(ROWS)
MANY = people(1000, seed=1)
ROW_IDS = np.arange(100, 100 + ROWS, dtype=np.int64)

DECODE: dict[str, Any] = {"column": "png", "decodeImage": {}}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "to_float": [{"column": "gray", "toFloat": {}}, {"column": "colour", "toFloat": {}}],
    "normalize": [
        {"column": "colour", "toFloat": {}},
        {"column": "colour", "normalize": {"mean": [0.1, 0.5, 0.4], "std": [0.3, 0.2, 0.9]}},
    ],
    "select": [{"select": {"columns": ["vector", "age"]}}],
    "drop": [{"drop": {"columns": ["vector", "png"]}}],
    "rename": [{"rename": {"columns": {"age": "visits", "visits": "age"}}}],
    "cast": [
        {"column": "digits", "cast": {"arrowType": "int16"}},
        {"column": "visits", "cast": {"arrowType": "float"}},
    ],
    "filter": [{"filter": {"expression": "age * 2 - visits > 70 or city in ['Ulm'] and not member"}}],
    "fill_nulls": [
        {"column": "age", "fillNulls": {"statistic": "STATISTIC_MEAN"}},
        {"column": "visits", "fillNulls": {"statistic": "STATISTIC_MEDIAN"}},
        {"column": "city", "fillNulls": {"statistic": "STATISTIC_MODE"}},
    ],
    "standardize": [{"column": "age", "standardize": {}}, {"column": "visits", "standardize": {}}],
    "min_max_scale": [{"column": "age", "minMaxScale": {"clip": True}}, {"column": "weight", "minMaxScale": {}}],
    "ordinal_encode": [{"column": "city", "ordinalEncode": {}}, {"column": "member", "ordinalEncode": {}}],
    "one_hot_encode": [{"column": "city", "oneHotEncode": {}}, {"column": "visits", "oneHotEncode": {}}],
    "bucketize": [
        {"column": "age", "bucketize": {"boundaries": [0, 18, 65.5]}},
        {"column": "visits", "bucketize": {"boundaries": [-1.5, 2]}},
    ],
    "concat": [{"concat": {"columns": ["vector", "gray", "weight"], "into": "all", "keep": True}}],
    "decode_image": [DECODE],
    "resize": [
        {"column": "gray", "resize": {"height": 5, "width": 11}},
        {"column": "colour", "resize": {"height": 3, "shorterSideOnly": True}},
        DECODE,
        {"column": "png", "resize": {"height": 6, "shorterSideOnly": True}},
    ],
    "center_crop": [
        {"column": "gray", "centerCrop": {"height": 4, "width": 12}},
        DECODE,
        {"column": "png", "centerCrop": {"height": 9, "width": 9}},
    ],
    "grayscale": [{"column": "colour", "grayscale": {}}, DECODE, {"column": "png", "grayscale": {}}],
    "random_crop": [
        {"column": "gray", "randomCrop": {"height": 7, "width": 7, "padding": 2}},
        DECODE,
        {"column": "png", "randomCrop": {"height": 6, "width": 15}},
    ],
    "random_flip": [
        {"column": "colour", "randomFlip": {"horizontalProbability": 0.5, "verticalProbability": 0.5}},
        DECODE,
        {"column": "png", "randomFlip": {"horizontalProbability": 0.5}},
    ],
    "random_rotation": [
        {"column": "gray", "randomRotation": {"degrees": 30}},
        {"column": "colour", "randomRotation": {"degrees": 180}},
        DECODE,
        {"column": "png", "randomRotation": {"degrees": 10}},
    ],
    "color_jitter": [
        {"column": "gray", "colorJitter": {"brightness": 0.5, "contrast": 0.5}},
        {"column": "colour", "colorJitter": {"brightness": 0.2, "contrast": 1, "saturation": 0.7}},
        DECODE,
        {"column": "png", "colorJitter": {"contrast": 0.3}},
    ],
    "custom": [
        {
            "custom": {
                "function": "tests.unit.shared.transforms.custom_functions:doubled",
                "columns": ["vector", "visits"],
            }
        }
    ],
    "tokenize": [
        {"column": "city", "fillNulls": {"value": {"text": ""}}},
        {"column": "city", "tokenize": {"vocabularySize": 290, "maxLength": 8}},
    ],
    "a table for a linear model": [
        {"filter": {"expression": "age > 5 and digits != '7'"}},
        {"column": "digits", "cast": {"arrowType": "double"}},
        {"column": "age", "fillNulls": {"statistic": "STATISTIC_MEAN"}},
        {"column": "age", "standardize": {}},
        {"column": "visits", "fillNulls": {"value": {"integer": 0}}},
        {"column": "visits", "minMaxScale": {}},
        {"column": "city", "oneHotEncode": {"unknown": "UNKNOWN_VALUE_ENCODE"}},
        {"concat": {"columns": ["age", "visits", "city", "digits", "vector"], "into": "features"}},
        {"select": {"columns": ["features", "member"]}},
    ],
    "images for a network": [
        DECODE,
        {"column": "png", "resize": {"height": 12, "shorterSideOnly": True}},
        {"column": "png", "randomCrop": {"height": 10, "width": 10, "padding": 1}},
        {"column": "png", "randomFlip": {"horizontalProbability": 0.5}},
        {"column": "png", "randomRotation": {"degrees": 15}},
        {"column": "png", "colorJitter": {"brightness": 0.2, "contrast": 0.2, "saturation": 0.2}},
        {"column": "png", "toFloat": {}},
        {"column": "png", "normalize": {"mean": [0.5], "std": [0.25]}},
    ],
}
BUILT = {name: fitted(pipeline(*steps), MANY) for name, steps in CHAINS.items()}


def test_every_step_is_among_those_tried() -> None:
    tried = {step.op for built in BUILT.values() for step in built.steps}

    assert tried == set(STEPS)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", BUILT)
def test_a_row_by_itself_gets_the_bits_that_it_gets_among_others(name: str, training: bool) -> None:
    keys = RowKeys(7, 3, ROW_IDS) if training else None
    together = BUILT[name](PEOPLE, keys)

    alone = [
        BUILT[name](row, RowKeys(7, 3, ROW_IDS[index : index + 1]) if training else None)
        for index, row in enumerate(cut(PEOPLE, range(1, ROWS)))
    ]

    assert joined_bits(alone) == bits(together)


@settings(max_examples=20)
@given(name=st.sampled_from(sorted(BUILT)), places=st.lists(st.integers(0, ROWS), max_size=4), seed=st.integers(0, 99))
def test_any_cut_into_batches_gives_the_same_bits(name: str, places: list[int], seed: int) -> None:
    keys = RowKeys(seed, 0, ROW_IDS)
    together = BUILT[name](PEOPLE, keys)

    parts = [
        BUILT[name](part, RowKeys(seed, 0, ids))
        for part, ids in zip(cut(PEOPLE, places), np.split(ROW_IDS, sorted(places)), strict=True)
    ]

    assert joined_bits(parts) == bits(together)


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("rows", [0, 1, ROWS])
def test_a_steps_batch_has_the_schema_that_output_announced(name: str, rows: int) -> None:
    announced = BUILT[name].output(schema_of_batch(PEOPLE))

    made = BUILT[name](cut(PEOPLE, [rows])[0])

    found = schema_of_batch(made)
    assert list(found) == list(announced)
    assert [str(one) for one in found.values()] == [str(one) for one in announced.values()]
    fixed = {column: one for column, one in announced.items() if "?" not in str(one)}
    table = table_of(made, arrow_schema(fixed))
    assert table.num_rows == row_count(made)


@pytest.mark.parametrize("name", BUILT)
def test_the_batch_that_was_given_stays_as_it_was(name: str) -> None:
    before: Batch = dict(PEOPLE)
    given_bits = bits(PEOPLE)

    BUILT[name](PEOPLE, RowKeys(1, 1, ROW_IDS))

    assert bits(PEOPLE) == given_bits
    assert list(before) == list(PEOPLE)


@pytest.mark.parametrize("name", BUILT)
def test_the_frozen_config_builds_a_pipeline_that_gives_the_same_bits(name: str) -> None:
    import json

    frozen = json.loads(json.dumps(BUILT[name].config))

    read = type(BUILT[name]).from_config(frozen)

    assert read.steps == BUILT[name].steps
    assert read.config == BUILT[name].config
    assert read.unfitted == []
    assert bits(read(PEOPLE)) == bits(BUILT[name](PEOPLE))
