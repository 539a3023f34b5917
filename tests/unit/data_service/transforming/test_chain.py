"""A chain makes what is asked of it out of as few columns as it can, and ends even where Python cannot end it."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa

from data_service.transforming.chain import Chain
from shared.transforms.pipeline import Pipeline
from shared.transforms.schema import ScalarType, Schema

GIVEN: Schema = {name: ScalarType(pa.int64()) for name in ("a", "b", "c")}

HANGING = """
import itertools, sys
import pyarrow as pa
from data_service.transforming import chain
from shared.transforms.pipeline import Pipeline
from shared.transforms.schema import ScalarType

def hang(batch):
    if len(batch):
        sum(itertools.repeat(0))  # in C, with the interpreter's lock held, and deaf to signals
    return batch

sys.modules["hanging"] = sys.modules["__main__"]
chain.GRACE_S = 0.1
steps = [{"custom": {"function": "hanging:hang", "columns": ["a"], "timeoutS": 0.1}}]
made = chain.Chain.towards(Pipeline.from_config({"steps": steps}), {"a": ScalarType(pa.int64())}, None)
made.apply({"a": pa.array([1])})
"""


def test_only_what_the_outputs_and_filters_need_is_read() -> None:
    steps = [{"filter": {"expression": "a > 1"}}, {"column": "b", "cast": {"arrowType": "string"}}]
    pipeline = Pipeline.from_config({"steps": steps})
    assert Chain.towards(pipeline, GIVEN, None).reads == ["a", "b", "c"]
    assert Chain.towards(pipeline, GIVEN, ["b"]).reads == ["a", "b"]
    counting = Chain.towards(pipeline, GIVEN, [])
    assert counting.reads == ["a"]
    _, left = counting.apply({"a": pa.array([1, 2, 3])})
    assert left is not None
    assert left.tolist() == [1, 2]


def test_all_rows_left_is_told_apart() -> None:
    chain = Chain.towards(Pipeline.from_config({"steps": []}), GIVEN, ["c"])
    batch, left = chain.apply({"c": pa.array([5])})
    assert (batch["c"].to_pylist(), left) == ([5], None)


def test_a_function_that_hangs_with_the_interpreters_lock_ends_its_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
