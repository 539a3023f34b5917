"""A service learns in a process of its own what columns an operator's function makes."""

from __future__ import annotations

import os
import threading
import time

import pyarrow as pa
import pytest

from shared.errors import InvalidArgument, ResourceExhausted
from shared.transforms import TensorType
from shared.transforms.steps import custom as custom_child
from shared.transforms.steps.custom import functions_in_children
from tests.unit.shared.transforms.samples import schema_of_batch
from tests.unit.shared.transforms.test_custom import MODULE, ROWS, custom

GIVEN = schema_of_batch(ROWS)


def test_columns_are_those_that_the_function_makes_here() -> None:
    for name, columns in (("doubled", ("x", "t")), ("halves_as_lists", ("a",))):
        here = custom(name, *columns).output(GIVEN)
        with functions_in_children():
            assert custom(name, *columns).output(GIVEN) == here
    assert here["half"] == TensorType("float64", (1,))


def test_the_function_runs_in_another_process_once_for_each_set_of_types() -> None:
    with functions_in_children():
        made = custom("pid_as_name").output(GIVEN)
        assert custom("pid_as_name").output(GIVEN) == made
    assert f"pid_{os.getpid()}" in custom("pid_as_name").output(GIVEN)
    assert f"pid_{os.getpid()}" not in made


def test_prints_and_leftovers_of_the_function_are_no_part_of_its_answer() -> None:
    started = time.monotonic()
    with functions_in_children():
        assert custom("chatty").output(GIVEN) == GIVEN
    assert time.monotonic() - started < 60  # the process that it left goes on for 90 s


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("always_raising", "raised KeyError: 'nothing at all'"),
        ("always_hanging", r"took longer than 0\.5 s for 0 rows"),
        ("deaf", r"was stopped: no answer for 0 rows within 4\.5 s"),
        ("always_crashing", "ended its process for 0 rows, with SIGSEGV"),
        ("leaving", "ended its process for 0 rows, with exit status 3"),
        ("no_batch", "returned a dict, not a pyarrow.RecordBatch"),
        ("nested", "returned what a version cannot keep"),
    ],
)
def test_a_function_that_fails_is_refused_by_step_and_cause(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "deaf":
        monkeypatch.setattr(custom_child, "START_LIMIT_S", 4.0)
    refused: list[InvalidArgument] = []

    def ask() -> None:
        with functions_in_children(), pytest.raises(InvalidArgument, match=f"{MODULE}:{name} {why}") as caught:
            custom(name, timeout_s=0.5 if name in ("always_hanging", "deaf") else 60.0).output(GIVEN)
        refused.append(caught.value)

    # As a server does, where no signal interrupts.
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(240)

    assert [path for path, _ in refused[0].fields] == ["transform.steps[0]"]


def test_a_module_that_is_not_there_is_refused_by_its_field() -> None:
    with functions_in_children(), pytest.raises(InvalidArgument, match="cannot be imported") as refused:
        custom("missing").output(GIVEN)
    assert refused.value.fields[0][0] == "transform.steps[0].custom.function"


def test_no_more_than_a_few_functions_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_child, "START_LIMIT_S", 0.01)
    monkeypatch.setattr(custom_child, "_children", threading.BoundedSemaphore(1))
    with custom_child._children, pytest.raises(ResourceExhausted, match="try again later"):
        custom_child.infer_schema(f"{MODULE}:doubled", pa.schema([("x", pa.int64())]), 1)
