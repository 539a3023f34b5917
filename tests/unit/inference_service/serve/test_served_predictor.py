"""A predictor of a user's bundle: what it declares, what it is given, and what becomes of its faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from inference_service.domain.deployment import Spec, check_spec
from inference_service.domain.signature import DATATYPES, FREE, NULLS, RAW, Rows, TensorSpec
from inference_service.serve.served_model import ServedPredictor
from shared import bundle_predictor
from shared.checkpoint.format import ProgramContent
from shared.durable import as_state
from shared.errors import FailedPrecondition, InvalidArgument

CONTENT = ProgramContent(
    training_job="trainingJobs/j",
    code_bundle="codeBundles/" + "a" * 64,
    entry="train:loop",
    report=1,
    epoch=0,
    seed=0,
    world_size=1,
    optimizer_steps=0,
    metrics={},
    files=(),
)


class Doubling:
    """Twice the numbers of each row, and their sum; refuses what is negative."""

    inputs: ClassVar[Any] = {"x": ("FP32", [2]), "n": (np.int64, [])}
    outputs: ClassVar[Any] = {"twice": ("FP32", [2]), "sum": ("float64", ())}

    def __init__(self, checkpoint_dir: str) -> None:
        assert isinstance(checkpoint_dir, str)
        self.seen: list[int] = []

    def predict(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(len(inputs["x"]))
        if (inputs["x"] < 0).any():
            raise ValueError("negative")
        inputs["x"] *= 2  # what it is given is its own
        return {"sum": inputs["x"].sum(1) + inputs["n"], "twice": inputs["x"], "more": 1}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServedPredictor]:
    """What makes a `ServedPredictor` of a class, as if the bundle held it."""

    def make(kind: type, entry: str = "") -> ServedPredictor:
        asked: list[str] = []

        def find(_bundle: str, entry: str) -> type:
            asked.append(entry)
            return kind

        monkeypatch.setattr(bundle_predictor, "find_entry", find)
        made = ServedPredictor(CONTENT, entry, Path("/checkpoint"))
        assert asked == [entry or "train:Predictor"]
        return made

    return make


def rows(x: list[list[float]], requests: tuple[int, ...] = ()) -> Rows:
    values = np.array(x, np.float32)
    values.setflags(write=False)
    return Rows(RAW, {"x": values, "n": np.arange(len(x))}, requests=requests)


def test_a_predictor_s_signature_is_what_the_predictor_declares(served: Any) -> None:
    signature = served(Doubling, "serve:Doubling").signature
    assert signature.raw == (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("n", "INT64", (-1,)))
    assert signature.outputs == (TensorSpec("twice", "FP32", (-1, 2)), TensorSpec("sum", "FP64", (-1,)))


def test_the_datatypes_are_those_of_the_protocol() -> None:
    assert {name: one.dtype for name, one in DATATYPES.items()} == bundle_predictor.DTYPES
    assert (FREE, NULLS) == (bundle_predictor.FREE, bundle_predictor.NULLS)


def test_a_batch_is_answered_in_the_order_of_the_outputs(served: Any) -> None:
    outputs = served(Doubling).forward(rows([[1, 2], [3, 4]]))
    twice, total = outputs.arrays
    assert twice.tolist() == [[2, 4], [6, 8]]
    assert total.tolist() == [6, 15]
    assert (twice.dtype, total.dtype) == (np.float32, np.float64)


def test_a_bad_request_of_a_batch_fails_alone(served: Any) -> None:
    predictor = served(Doubling)
    outputs = predictor.forward(rows([[1, 1], [-1, 1], [2, 2], [3, 3]], requests=(1, 2, 1)))
    assert sorted(outputs.failed) == [1, 2]
    assert outputs.failed[1].specific_reason == "ENTRY_FAILED"
    assert "ValueError: negative" in outputs.failed[1].message
    assert outputs.arrays[0][[0, 3]].tolist() == [[2, 2], [6, 6]]
    with pytest.raises(FailedPrecondition, match="negative"):
        predictor.forward(rows([[-1, 1]]))


def test_answers_that_are_not_finite_are_reported(served: Any) -> None:
    outputs = served(Doubling).forward(rows([[1, 1], [np.inf, 1]]))
    assert outputs.non_finite == (1,)


def test_a_predictor_is_warmed_up_with_zeros_or_with_its_example(served: Any) -> None:
    predictor = served(Doubling)
    assert set(predictor.warm_up(4)) == {1, 2, 4}
    assert sorted(predictor._predictor.made.seen) == [1, 1, 2, 2, 4, 4]

    class Ones(Doubling):
        example: ClassVar[Any] = {"x": [[1, 2]], "n": [1]}

        def predict(self, inputs: dict[str, Any]) -> dict[str, Any]:
            assert inputs["x"].tolist() == [[1, 2]] * len(inputs["x"])
            return super().predict(inputs)

    assert set(served(Ones).warm_up(2)) == {1, 2}

    class NoZeros(Doubling):
        def predict(self, _inputs: dict[str, Any]) -> dict[str, Any]:
            raise ValueError("zeros")

    with pytest.raises(FailedPrecondition, match=r"before the first request; give it an attribute `example`"):
        served(NoZeros).warm_up(2)


def test_rows_of_any_size_and_bytes_are_taken(served: Any) -> None:
    class Lengths:
        inputs: ClassVar[Any] = {"text": ("BYTES", []), "free": ("FP32", [None])}
        outputs: ClassVar[Any] = {"length": ("INT32", [])}

        def __init__(self, _: str) -> None: ...

        def predict(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return {"length": np.array([len(text) for text in inputs["text"]]) + inputs["free"].shape[1]}

    predictor = served(Lengths)
    assert set(predictor.warm_up(1)) == {1}
    given = Rows(RAW, {"text": np.array([b"abc"], object), "free": np.zeros((1, 5), np.float32)})
    assert predictor.forward(given).arrays[0].tolist() == [8]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inputs": {}}, "needs inputs"),
        ({"outputs": None}, "needs outputs"),
        ({"inputs": {"x": "FP32"}}, "no pair"),
        ({"inputs": {"x": ("FP33", [1])}}, "none of BOOL"),
        ({"inputs": {"x": ("FP32", [0])}}, "no shape"),
        ({"inputs": {"x.null": ("FP32", [1])}}, "no name"),
        ({"predict": None}, "no method predict"),
    ],
)
def test_a_predictor_that_does_not_say_what_it_takes_is_refused(
    served: Any, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(FailedPrecondition, match=text) as refused:
        served(type("Bad", (Doubling,), changes))
    assert refused.value.specific_reason == "BAD_PREDICTOR"


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([1], "instead of a dict"),
        ({"twice": np.zeros((1, 2))}, "not the output 'sum'"),
        ({"twice": np.zeros((1, 3)), "sum": np.zeros(1)}, r"\[1, 3\] instead of \[1, 2\]"),
        ({"twice": np.zeros((2, 2)), "sum": np.zeros(2)}, r"\[2, 2\] instead of \[1, 2\]"),
        ({"twice": np.array([["a", "b"]]), "sum": np.zeros(1)}, "is not FP32"),
    ],
)
def test_outputs_that_are_not_as_declared_are_refused(served: Any, made: Any, text: str) -> None:
    kind = type("Bad", (Doubling,), {"predict": lambda *_: made})
    with pytest.raises(FailedPrecondition, match=text):
        served(kind).forward(rows([[1, 2]]))


def test_an_error_of_making_the_predictor_is_an_error_of_the_deployment(served: Any) -> None:
    class Exits(Doubling):
        def __init__(self, _: str) -> None:
            raise SystemExit(3)

    with pytest.raises(FailedPrecondition, match="SystemExit: 3"):
        served(Exits)


@pytest.mark.parametrize("predictor", ["serve", "serve:", ":Predictor", "serve:a b", "../serve:A"])
def test_a_malformed_entry_is_refused(predictor: str) -> None:
    limits: dict[str, Any] = dict.fromkeys(
        ("num_replicas", "threads_per_replica", "max_batch_size", "max_queued_rows"), 0
    )
    good = check_spec(checkpoint="trainingJobs/j", max_batch_delay_s=None, predictor="a.serve:A.B", **limits)
    assert Spec.from_record(as_state(good)).predictor == "a.serve:A.B"
    with pytest.raises(InvalidArgument, match=r"spec\.predictor"):
        check_spec(checkpoint="trainingJobs/j", max_batch_delay_s=None, predictor=predictor, **limits)


def test_a_script_is_no_module_of_a_predictor_and_is_not_run_to_find_one() -> None:
    with pytest.raises(FailedPrecondition, match=r"cells\.py .* is a script") as refused:
        ServedPredictor(replace(CONTENT, entry="cells.py"), "", Path("/checkpoint"))
    assert refused.value.specific_reason == "BAD_PREDICTOR"
