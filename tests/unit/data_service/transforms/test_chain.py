"""A chain makes what is asked of it out of as few columns as it can, and ends even where Python cannot end it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from data_service.transforms.passes import StepChain
from shared.transforms.batch import ScalarType, Schema
from shared.transforms.pipeline import Pipeline

GIVEN: Schema = {name: ScalarType(pa.int64()) for name in ("a", "b", "c")}

HANGING = """
import itertools, sys
import pyarrow as pa
from data_service.transforms import passes
from data_service.transforms.passes import plan_parts
from data_service.transforms.passes import VersionRows
from data_service.transforms.passes import FitPart
from shared.dataset_version import VersionReader, load_version
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.transforms.pipeline import Pipeline
from shared.transforms.batch import ScalarType
from tests.support.transforming import SOURCE, commit_tables

def hang(batch):
    if len(batch):
        sum(itertools.repeat(0))  # in C, with the interpreter's lock held, and deaf to signals
    return batch

sys.modules["hanging"] = sys.modules["__main__"]
# A tenth of a second in all over rows, and a minute to ask the function for its columns.
passes.GRACE_S = -59.9
hangs = {"custom": {"function": "hanging:hang", "columns": ["a"], "timeoutS": 60}}
given = {"a": ScalarType(pa.int64())}
"""
APPLYING = """
made = passes.StepChain.towards(Pipeline.from_config({"steps": [hangs]}), given, None)
made.apply({"a": pa.array([1])})
"""
FITTING = """
settings = StoreSettings(url=sys.argv[1])
table = pa.table({"a": [1, 2]})
commit_tables(open_store(settings), {"train": table})
version = load_version(open_store(settings), SOURCE)
(part,) = plan_parts(VersionReader(open_store(settings), version), table.schema)
fitter = Pipeline.from_config({"steps": [hangs, {"column": "a", "standardize": {}}]}).fitter(given)
FitPart(VersionRows(settings, version, None, 1024), fitter, "train", ["a"])(part)
"""


def test_only_what_the_outputs_and_filters_need_is_read() -> None:
    steps = [{"filter": {"expression": "a > 1"}}, {"column": "b", "cast": {"arrowType": "string"}}]
    pipeline = Pipeline.from_config({"steps": steps})
    assert StepChain.towards(pipeline, GIVEN, None).reads == ["a", "b", "c"]
    assert StepChain.towards(pipeline, GIVEN, ["b"]).reads == ["a", "b"]
    counting = StepChain.towards(pipeline, GIVEN, [])
    assert counting.reads == ["a"]
    _, left = counting.apply({"a": pa.array([1, 2, 3])})
    assert left is not None
    assert left.tolist() == [1, 2]


def test_a_filter_that_drops_no_row_is_recognized() -> None:
    chain = StepChain.towards(Pipeline.from_config({"steps": []}), GIVEN, ["c"])
    batch, left = chain.apply({"c": pa.array([5])})
    assert (batch["c"].to_pylist(), left) == ([5], None)


@pytest.mark.parametrize("doing", [APPLYING, FITTING], ids=["applying", "fitting"])
def test_a_function_that_hangs_with_the_interpreters_lock_ends_its_process(doing: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", HANGING + doing, tmp_path.as_uri()]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
