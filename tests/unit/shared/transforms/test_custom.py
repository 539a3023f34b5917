"""Functions of an operator's own: only those allowed, checked by what they return, and told by name when they fail."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pyarrow as pa
import pytest

from millrace.common.v1 import transform_pb2
from shared.errors import InvalidArgument, error_from_record
from shared.transforms import Batch, Pipeline, RowError, TensorType
from tests.unit.shared.transforms.samples import pipeline, schema_of_batch

MODULE = "tests.unit.shared.transforms.custom_functions"
ROWS: Batch = {"a": pa.array([1, 2]), "x": pa.array([3, None]), "t": np.arange(4, dtype=np.float32).reshape(2, 2)}


def custom(name: str, *columns: str, timeout_s: float = 0) -> Pipeline:
    return pipeline({"custom": {"function": f"{MODULE}:{name}", "columns": columns or ("x",), "timeoutS": timeout_s}})


def test_the_columns_of_a_custom_step_replace_its_input_columns() -> None:
    made = custom("doubled", "x", "t")(ROWS)

    assert list(made) == ["a", "x", "t"]
    assert made["x"].to_pylist() == [6, None]
    assert made["t"].tolist() == [[0, 2], [4, 6]]


def test_new_columns_are_known_before_any_row_and_lists_become_tensors() -> None:
    built = custom("halves_as_lists", "a")

    announced = built.output(schema_of_batch(ROWS))

    assert list(announced) == ["half", "x", "t"]
    assert announced["half"] == TensorType("float64", (1,))
    assert built(ROWS)["half"].tolist() == [[0.5], [1.0]]
    assert built.serving(["half"], schema_of_batch(ROWS)).reads(["half"], schema_of_batch(ROWS)) == ["a"]
    assert built.has_custom


def test_only_functions_on_the_list_are_taken_where_there_is_a_list() -> None:
    step = transform_pb2.Custom(function=f"{MODULE}:doubled", columns=["x"])
    transform = transform_pb2.Transform(steps=[transform_pb2.TransformStep(custom=step)])

    assert Pipeline.from_proto(transform, custom_allowed={f"{MODULE}:doubled"}).has_custom
    for allowed in ((), {"os:system"}):
        with pytest.raises(InvalidArgument, match="is not allowed here") as refused:
            Pipeline.from_proto(transform, custom_allowed=allowed)
        assert refused.value.fields[0][0] == "transform.steps[0].custom.function"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("one_row_less", "returned 1 rows for 2"),
        ("another_type", "x: int32 of these rows and x: int64 of none"),
        ("never_null", "has nulls in 'x', and declares it as a column without"),
        ("raising", "raised KeyError: 'no such thing'"),
    ],
)
def test_a_result_that_is_wrong_for_these_rows_is_reported_by_step_and_function(name: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{MODULE}:{name} .*{why}") as refused:
        custom(name)(ROWS)

    assert refused.value.fields[0][0] == "transform.steps[0]"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_batch", "returned a dict, not a pyarrow.RecordBatch"),
        ("no_column", "returned no column"),
        ("nested", "a version cannot keep"),
        ("missing", "cannot be imported"),
        ("NOT_A_FUNCTION", "is no function"),
    ],
)
def test_a_function_that_is_wrong_for_all_rows_is_refused_before_any(name: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        custom(name).output(schema_of_batch(ROWS))


def test_a_column_that_is_there_already_is_not_made_again() -> None:
    with pytest.raises(InvalidArgument, match="which there is already"):
        custom("named_age", "x").output(schema_of_batch({**ROWS, "age": ROWS["a"]}))


@pytest.mark.parametrize("function", ["", "os", "os:", ":system", "os.system", "os:system:x", "os:sys tem", "../x:y"])
def test_a_name_that_is_no_function_of_a_module_is_refused(function: str) -> None:
    with pytest.raises(InvalidArgument, match="module:function"):
        pipeline({"custom": {"function": function, "columns": ["x"]}})


def test_a_function_that_does_not_end_is_stopped() -> None:
    with pytest.raises(InvalidArgument, match=r"stuck took longer than 0\.2 s for 2 rows"):
        custom("stuck", timeout_s=0.2)(ROWS)


def test_in_other_threads_a_function_that_took_too_long_is_refused_once_it_ends() -> None:
    refused: list[InvalidArgument] = []

    def call() -> None:
        try:
            custom("slow", timeout_s=0.01)(ROWS)
        except InvalidArgument as error:
            refused.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

    assert "took longer than 0.01 s" in str(refused[0])


def test_a_timer_that_was_running_goes_on() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    before = signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        custom("doubled")(ROWS)
        left_s, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 50 < left_s <= 100
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_a_row_error_keeps_its_row_over_pickling_and_is_an_invalid_argument_in_a_log() -> None:
    import pickle

    error = RowError("transform.steps[1]", 4, "'x' is null")

    again = pickle.loads(pickle.dumps(error))

    assert (again.path, again.row, again.problem, str(again)) == (error.path, 4, "'x' is null", str(error))
    assert type(error_from_record(error.as_record())) is InvalidArgument
