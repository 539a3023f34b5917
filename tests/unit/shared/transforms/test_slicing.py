"""Columns on their way through a pipeline: which come out, what they need, and what serving keeps of the steps."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from millrace.common.v1 import transform_pb2
from shared.errors import InvalidArgument
from shared.transforms import Batch, Pipeline, RowKeys, ScalarType, Schema
from tests.support.cpu_time import cpu_at_most
from tests.unit.shared.transforms.samples import bits, fitted, people, pipeline, schema_of_batch

FUNCTIONS = "tests.unit.shared.transforms.custom_functions"
PEOPLE = people(12)
SCHEMA = schema_of_batch(PEOPLE)

CHAIN = fitted(
    pipeline(
        {"filter": {"expression": "age is None or age > -1000"}},
        {"column": "age", "fillNulls": {"statistic": "STATISTIC_MEDIAN"}},
        {"column": "age", "standardize": {}},
        {"column": "city", "oneHotEncode": {}},
        {"drop": {"columns": ["vector"]}},
        {"concat": {"columns": ["age", "city"], "into": "vector"}},
        {"column": "visits", "fillNulls": {"value": {"integer": 0}}},
        {"rename": {"columns": {"visits": "label", "weight": "visits"}}},
        {"column": "png", "decodeImage": {}},
        {"column": "png", "randomCrop": {"height": 8, "width": 8}},
        {"column": "png", "randomFlip": {"horizontalProbability": 1}},
        {"select": {"columns": ["label", "vector", "visits", "png", "gray"]}},
    ),
    PEOPLE,
)


def asked(transform: dict[str, Any]) -> Pipeline:
    """As a request has it."""
    return Pipeline.from_proto(json_format.ParseDict(transform, transform_pb2.Transform()))


def ops(built: Pipeline) -> list[str]:
    return [step.op for step in built.steps]


@pytest.mark.parametrize(
    ("outputs", "reads", "served", "steps"),
    [
        (["gray"], ["age", "gray"], ["gray"], ["select"]),
        (
            ["vector"],
            ["age", "city"],
            ["age", "city"],
            ["select", "fill_nulls", "standardize", "one_hot_encode", "concat"],
        ),
        (["label"], ["age", "visits"], ["visits"], ["select", "fill_nulls", "rename"]),
        (["visits"], ["age", "weight"], ["weight"], ["select", "rename"]),
        (["png"], ["age", "png"], ["png"], ["select", "decode_image", "center_crop"]),
    ],
)
def test_serving_keeps_only_what_makes_the_outputs_of_single_rows(
    outputs: list[str], reads: list[str], served: list[str], steps: list[str]
) -> None:
    serving = CHAIN.serving(outputs, SCHEMA)

    assert CHAIN.reads(outputs, SCHEMA) == reads  # with what the filter reads
    assert serving.reads(outputs, SCHEMA) == served
    assert ops(serving) == steps
    assert not serving.drops_rows
    assert not serving.has_augmentations


@pytest.mark.parametrize(
    "outputs", [["vector"], ["png", "label"], ["visits", "gray", "vector"], ["gray"], ["label", "visits"]]
)
def test_served_rows_get_the_bits_of_prepared_ones(outputs: list[str]) -> None:
    prepared = CHAIN(PEOPLE)
    serving = CHAIN.serving(outputs, SCHEMA)
    needed = {name: PEOPLE[name] for name in serving.reads(outputs, SCHEMA)}

    for rows in (needed, PEOPLE):
        made = serving(rows)
        assert list(made) == outputs
        assert bits(made) == bits({name: prepared[name] for name in outputs})
    assert serving.output(SCHEMA) == {name: CHAIN.output(SCHEMA)[name] for name in outputs}


def test_the_served_pipeline_survives_its_config_and_pickling() -> None:
    serving = CHAIN.serving(["vector", "png"], SCHEMA)

    for again in (Pipeline.from_config(serving.config), pickle.loads(pickle.dumps(serving))):
        assert again.steps == serving.steps
        assert bits(again(PEOPLE)) == bits(serving(PEOPLE))


def test_names_that_are_taken_away_and_given_again_do_not_meet() -> None:
    built = pipeline(
        {"concat": {"columns": ["x", "z"], "into": "both", "keep": True}},
        {"drop": {"columns": ["x"]}},
        {"rename": {"columns": {"y": "x"}}},
        {"concat": {"columns": ["z"], "into": "unused"}},
        {"rename": {"columns": {"x": "z"}}},
    )
    rows: Batch = {name: pa.array([float(place)]) for place, name in enumerate("xyz")}
    prepared = built(rows)

    for outputs in (["both", "z"], ["z", "both"], ["z"], ["both"], ["unused"]):
        made = built.serving(outputs, schema_of_batch(rows))(rows)
        assert bits(made) == bits({name: prepared[name] for name in outputs})


NAMES = ["a", "b", "c", "d"]
COLUMN_STEPS = st.one_of(
    st.permutations(NAMES).flatmap(
        lambda names: st.integers(1, 4).map(lambda end: {"select": {"columns": names[:end]}})
    ),
    st.sampled_from(NAMES).map(lambda name: {"drop": {"columns": [name]}}),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), min_size=1, max_size=2).map(
        lambda pairs: {"rename": {"columns": dict(pairs)}}
    ),
    st.tuples(
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), st.sampled_from(NAMES), st.booleans()
    ).map(lambda made: {"concat": {"columns": made[0], "into": made[1], "keep": made[2]}}),
    st.sampled_from(NAMES).map(lambda name: {"column": name, "minMaxScale": {"min": 1, "max": 3}}),
    st.sampled_from(NAMES).map(lambda name: {"filter": {"expression": f"{name} > -1e300"}}),
)


@given(steps=st.lists(COLUMN_STEPS, max_size=8), data=st.data())
def test_any_slice_of_any_chain_makes_the_bits_of_the_whole(steps: list[dict[str, Any]], data: st.DataObject) -> None:
    rows: Batch = {name: pa.array(np.arange(3.0) + place) for place, name in enumerate(NAMES)}
    schema = schema_of_batch(rows)
    chain: list[dict[str, Any]] = []
    for step in steps:  # those that fit
        try:
            pipeline(*chain, step).output(schema)
            chain.append(step)
        except InvalidArgument:
            continue
    built = pipeline(*chain)
    prepared = built(rows)
    outputs = data.draw(st.lists(st.sampled_from(sorted(prepared)), min_size=1, unique=True))

    serving = built.serving(outputs, schema)
    reads = serving.reads(outputs, schema)
    made = serving({name: rows[name] for name in reads})

    assert set(reads) <= set(built.reads(outputs, schema))
    assert bits(made) == bits({name: prepared[name] for name in outputs})
    assert list(made) == outputs


@pytest.mark.parametrize("ask", ["reads", "serving"])
def test_an_output_that_is_not_made_is_refused(ask: str) -> None:
    with pytest.raises(InvalidArgument, match="makes no column 'weight', only label, vector"):
        getattr(CHAIN, ask)(["weight"], SCHEMA)


def test_one_pipeline_after_another_is_both() -> None:
    first = pipeline({"column": "x", "cast": {"arrowType": "double"}})
    second = Pipeline.from_config({"steps": [{"standardize": {"mean": 1, "deviation": 2}}]}, "x")

    both = first.then(second)

    rows: Batch = {"x": pa.array([1, 5])}
    assert both(rows)["x"].to_pylist() == [0.0, 2.0]
    assert Pipeline.from_config(both.config).steps == both.steps  # each step names its column


def test_columns_are_selected_dropped_and_renamed_in_order() -> None:
    schema: Schema = {name: ScalarType(pa.int64()) for name in "abcd"}

    assert list(pipeline({"select": {"columns": ["d", "a"]}}).output(schema)) == ["d", "a"]
    assert list(pipeline({"drop": {"columns": ["b", "d"]}}).output(schema)) == ["a", "c"]
    assert list(pipeline({"rename": {"columns": {"a": "x", "b": "a", "c": "b"}}}).output(schema)) == [
        "x",
        "a",
        "b",
        "d",
    ]


@pytest.mark.parametrize(
    ("step", "at", "why"),
    [
        ({"select": {"columns": ["a", "q"]}}, "select.columns[1]", "no column 'q'; there are a, b"),
        ({"drop": {"columns": ["q"]}}, "drop.columns[0]", "no column 'q'"),
        ({"drop": {"columns": ["a", "b"]}}, "", "leaves no column"),
        ({"rename": {"columns": {"q": "r"}}}, "rename.columns", "no column 'q'"),
        ({"rename": {"columns": {"a": "b"}}}, "rename.columns", "two columns would be named 'b'"),
        ({"rename": {"columns": {"a": "c", "b": "c"}}}, "rename.columns", "two columns would be named 'c'"),
        ({"rename": {"columns": {"a": "_row_id"}}}, "", "must not be named '_row_id'"),
        ({"rename": {"columns": {"a": ""}}}, "", "must not be named ''"),
        ({"rename": {"columns": {"a": "x\0y"}}}, "", r"column 'x\\x00y' has a zero byte"),
        ({"rename": {"columns": {"a": "é" * 513}}}, "", "name of 1026 bytes; at most 1024"),
        ({"concat": {"columns": ["a", "b"], "into": "x\0y"}}, "", "zero byte"),
        ({"concat": {"columns": ["a", "b"], "into": "x" * 1025}}, "", "name of 1025 bytes"),
        ({"custom": {"function": f"{FUNCTIONS}:named_with_zero", "columns": ["a"]}}, "", "zero byte"),
        ({"custom": {"function": f"{FUNCTIONS}:named_at_length", "columns": ["a"]}}, "", "name of 100000 bytes"),
        ({"custom": {"function": f"{FUNCTIONS}:very_many", "columns": ["a"]}}, "", "10002 columns"),
    ],
)
def test_columns_that_are_not_there_or_would_not_be_are_refused(step: dict[str, Any], at: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as refused:
        asked({"steps": [step]}).output({"a": ScalarType(pa.int64()), "b": ScalarType(pa.int64())})

    assert refused.value.fields[0][0] == ".".join(filter(None, ["transform.steps[0]", at]))


@pytest.mark.parametrize(
    ("step", "at"),
    [
        ({"select": {}}, "select.columns"),
        ({"select": {"columns": ["a", "b", "a"]}}, "select.columns[2]"),
        ({"drop": {}}, "drop.columns"),
        ({"rename": {}}, "rename.columns"),
        ({"column": "a", "drop": {"columns": ["a"]}}, "column"),
    ],
)
def test_a_step_of_columns_that_makes_no_sense_is_refused(step: dict[str, Any], at: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pipeline(step)

    assert refused.value.fields[0][0] == f"transform.steps[0].{at}"


@pytest.mark.parametrize("op", ["select", "drop", "concat", "custom", "rename"])
@pytest.mark.timed
def test_a_step_of_very_many_columns_is_refused_by_their_number_and_soon(op: str) -> None:
    names = [f"c{number}" for number in range(100_000)]
    columns = dict.fromkeys(names, "x") if op == "rename" else names
    others = {"concat": {"into": "x"}, "custom": {"function": "module:function"}}.get(op, {})
    transform = json_format.ParseDict({"steps": [{op: {"columns": columns, **others}}]}, transform_pb2.Transform())
    with cpu_at_most(0.5), pytest.raises(InvalidArgument, match="100000: name at most 10000") as refused:
        Pipeline.from_proto(transform)
    assert refused.value.fields[0][0] == f"transform.steps[0].{op}.columns"


@pytest.mark.parametrize("name", ["x" * 1100, "a\0b"], ids=["long", "zero byte"])
def test_a_recorded_name_on_the_way_that_no_request_may_have_any_more_still_works(name: str) -> None:
    config = {"steps": [{"rename": {"columns": {"a": name}}}, {"rename": {"columns": {name: "b"}}}]}
    schema: Schema = {"a": ScalarType(pa.int64())}
    recorded = Pipeline.from_config(config)

    assert list(recorded.output(schema)) == ["b"]
    assert recorded.reads(["b"], schema) == ["a"]
    serving = recorded.then(Pipeline([])).serving(["b"], schema)
    assert serving({"a": pa.array([1])})["b"].to_pylist() == [1]
    with pytest.raises(InvalidArgument, match=r"transform.steps\[0\]"):
        asked(config).output(schema)


def test_recorded_steps_of_very_many_columns_still_work() -> None:
    names = [f"c{number}" for number in range(10_001)]
    schema: Schema = {name: ScalarType(pa.int64()) for name in ("a", *names)}
    for op in ("select", "drop"):
        made = Pipeline.from_config({"steps": [{op: {"columns": names}}]}).output(schema)
        assert list(made) == (names if op == "select" else ["a"])
    renamed = {name: f"{name}x" for name in names}
    assert len(Pipeline.from_config({"steps": [{"rename": {"columns": renamed}}]}).output(schema)) == 10_002


@pytest.mark.parametrize("op", ["select", "drop", "rename"])
@pytest.mark.timed
def test_a_step_of_as_many_columns_as_a_version_may_have_is_soon_checked(op: str) -> None:
    schema: Schema = {f"c{number}": ScalarType(pa.int64()) for number in range(10_000)}
    columns = {name: f"{name}x" for name in schema} if op == "rename" else list(schema)[1:]
    with cpu_at_most(0.5):
        assert len(pipeline({op: {"columns": columns}}).output(schema)) in (1, 9_999, 10_000)


@pytest.mark.timed
def test_two_of_very_many_columns_that_would_have_one_name_are_found_soon() -> None:
    schema: Schema = {f"c{number}": ScalarType(pa.int64()) for number in range(10_000)}
    columns = {name: f"{name}x" for name in schema} | {"c9999": "c0x"}
    with cpu_at_most(0.5), pytest.raises(InvalidArgument, match="two columns would be named 'c0x'"):
        pipeline({"rename": {"columns": columns}}).output(schema)


def test_at_most_256_steps_are_taken() -> None:
    step = {"column": "a", "cast": {"arrowType": "int64"}}

    assert len(pipeline(*[step] * 256).steps) == 256
    with pytest.raises(InvalidArgument, match="at most 256") as refused:
        pipeline(*[step] * 257)
    assert refused.value.fields[0][0] == "transform.steps"


def test_keys_follow_the_rows_that_a_filter_keeps() -> None:
    steps = [{"column": "gray", "randomFlip": {"horizontalProbability": 0.5, "verticalProbability": 0.5}}]
    keep = np.arange(12) % 3 == 1
    rows: Batch = {"gray": PEOPLE["gray"], "keep": pa.array(keep)}
    ids = np.arange(50, 62, dtype=np.int64)

    filtered = pipeline({"filter": {"expression": "keep"}}, *steps)(rows, RowKeys(1, 2, ids))

    # At the same place in the pipeline, the rows by themselves.
    alone = pipeline({"filter": {"expression": "True"}}, *steps)(
        {"gray": PEOPLE["gray"][keep]}, RowKeys(1, 2, ids[keep])
    )
    assert filtered["gray"].tobytes() == alone["gray"].tobytes()
