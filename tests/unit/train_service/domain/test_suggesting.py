"""The rules of a suggested specification: what they choose, what they leave as it was given, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared.errors import FailedPrecondition, InvalidArgument
from tests.support.cpu_time import cpu_at_most
from train_service.domain.suggesting import ColumnFacts, Suggestion, VersionFacts, suggest

NAME = "datasets/d/versions/v1"
ROWS = 1000
SPLITS = {"train": 800, "validation": 200}


def number(name: str, **facts: Any) -> ColumnFacts:
    usual = {"rows": ROWS, "distinct": 700, "mean": 40.0, "deviation": 9.0, "least": 0.0, "most": 90.0}
    return ColumnFacts(**{"name": name, "kind": "number", **usual, **facts})


def integer(name: str, *values: int, **facts: Any) -> ColumnFacts:
    known = {"values": values, "distinct": len(values), "least": min(values), "most": max(values)} if values else {}
    return number(name, **{"kind": "integer", **known, **facts})


def text(name: str, *values: str, **facts: Any) -> ColumnFacts:
    return ColumnFacts(
        **{"name": name, "kind": "text", "rows": ROWS, "values": values or None, "distinct": len(values), **facts}
    )


def pixels(*shape: int, **facts: Any) -> ColumnFacts:
    usual = {"rows": ROWS, "mean": 33.3285, "deviation": 78.5655}
    return ColumnFacts(**{"name": "image", "kind": "tensor", "dtype": "uint8", "shape": shape, **usual, **facts})


def digit(**facts: Any) -> ColumnFacts:
    return integer("label", *range(10), **facts)


SPECIES = text("species", "Adelie", "Chinstrap", "Gentoo")
FEATURES = ColumnFacts(name="features", kind="tensor", dtype="float32", shape=(7,), rows=ROWS)


def suggested(*columns: ColumnFacts, splits: dict[str, int] = SPLITS, size_bytes: int = 0, **given: Any) -> Suggestion:
    facts = VersionFacts(name=NAME, columns=columns, splits=splits, size_bytes=size_bytes)
    return suggest(facts, given, lambda _: (5,))


def ops(made: Suggestion) -> list[str]:
    assert made.preparation is not None
    return [next(key for key in step if key != "column") for step in made.preparation.steps]


def refused(*columns: ColumnFacts, **given: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        suggested(*columns, **given)
    return caught.value


def test_digits_are_classified_by_a_resnet_on_pixels_normalised_by_their_own_statistics() -> None:
    made = suggested(pixels(28, 28), digit(), splits={"train": 6000, "test": 1000, "validation": 1000})
    assert made.preparation is None
    spec = made.spec
    assert spec["model"] == {"builder": "torchvision.resnet18", "in_channels": 1, "num_classes": 10}
    assert spec["transform"]["steps"] == [{"to_float": {}}, {"normalize": {"mean": [0.1307], "std": [0.3081]}}]
    assert (spec["task"], spec["label_column"], spec["input_column"]) == ("TASK_CLASSIFICATION", "label", "image")
    assert (spec["train_split"], spec["validation_split"]) == ("train", "validation")
    assert (spec["epochs"], spec["global_batch_size"]) == (4, 64)


def test_encoded_photos_are_decoded_resized_and_normalised() -> None:
    photos = ColumnFacts(name="image", kind="bytes", rows=80)
    label = ColumnFacts(
        name="label", kind="integer", value_names=("ants", "bees"), rows=80, distinct=2, least=0, most=1
    )
    made = suggested(photos, label, splits={"train": 60, "val": 20})
    steps = [next(iter(step)) for step in made.spec["transform"]["steps"]]
    assert steps == ["decode_image", "resize", "random_flip", "to_float", "normalize"]
    assert made.spec["validation_split"] == "val"
    assert made.spec["model"]["in_channels"] == 3
    assert next(one.value for one in made.choices if one.field == "model.num_classes") == "2 (ants, bees)"


def test_images_that_are_larger_than_the_rows_need_are_resized() -> None:
    made = suggested(pixels(480, 640, 3), digit())
    assert made.spec["transform"]["steps"][0] == {"resize": {"height": 64, "width": 64}}
    assert made.spec["model"]["in_channels"] == 3


def test_a_table_is_prepared_and_the_answer_says_what_to_ask_again() -> None:
    made = suggested(
        SPECIES,
        text("island", "Biscoe", "Dream", "Torgersen"),
        number("bill_length_mm", nulls=2),
        integer("passengers", *range(7)),
        text("sex", "FEMALE", "MALE", nulls=11),
        integer("row_id", distinct=ROWS, least=1, most=ROWS),
        text("note", distinct=990),
        text("zone", distinct=194),
        number("nothing", nulls=ROWS, distinct=0),
        number("broken", nans=3),
        text("same", "x"),
        ColumnFacts(name="seen", kind="time", rows=ROWS, distinct=900),
        splits={"train": 344},
    )
    assert made.preparation is not None
    assert list(made.preparation.steps) == [
        {"column": "species", "ordinal_encode": {"categories": ["Adelie", "Chinstrap", "Gentoo"]}},
        {"column": "island", "one_hot_encode": {"unknown": "UNKNOWN_VALUE_ENCODE"}},
        {"column": "bill_length_mm", "fill_nulls": {"statistic": "STATISTIC_MEDIAN"}},
        {"column": "bill_length_mm", "standardize": {}},
        {"column": "passengers", "standardize": {}},
        {"column": "sex", "one_hot_encode": {"unknown": "UNKNOWN_VALUE_ENCODE"}},
        {"concat": {"columns": ["island", "bill_length_mm", "passengers", "sex"], "into": "features"}},
    ]
    assert made.preparation.shares == {"train": 0.8, "validation": 0.2}
    assert made.preparation.fit_split == "train"
    assert "transform" not in made.spec
    assert "in_channels" not in made.spec["model"]
    left_out = [one for one in made.choices if one.value.startswith("without ")]
    assert {name for one in left_out for name in one.value.removeprefix("without ").split(", ")} == {
        *("row_id", "note", "zone", "nothing", "broken", "same", "seen")
    }
    assert all(one.reason.endswith(".") for one in made.choices)


def test_the_prepared_version_gets_the_rest_without_another_preparation() -> None:
    source = (SPECIES, number("mass"), text("id_text", distinct=990))
    first = suggested(*source, splits={"train": 344})
    species = integer("species", 0, 1, 2, value_names=("Adelie", "Chinstrap", "Gentoo"))
    second = suggested(FEATURES, species, source[2], splits={"train": 275, "validation": 69}, **first.spec)
    assert second.preparation is None
    assert second.spec["model"] == {
        "builder": "mlp",
        "kwargs": {"hidden": [64, 32]},
        "in_channels": 7,
        "num_classes": 3,
    }
    assert {one.field for one in second.choices} == {"model.in_channels", "model.num_classes"}
    assert "transform" not in second.spec


def test_the_same_preparation_has_the_same_request_id_and_another_one_another() -> None:
    one, same, other = (suggested(SPECIES, number(name), splits={"train": 344}).preparation for name in ("a", "a", "b"))
    assert one
    assert same
    assert other
    assert one.request_id == same.request_id != other.request_id
    assert one.request_id[14] == "4"


def test_numbers_that_need_nothing_are_put_together_in_training() -> None:
    made = suggested(number("a", mean=0.0, deviation=1.0), FEATURES_OF_2, digit())
    assert made.preparation is None
    assert made.spec["transform"]["steps"] == [{"concat": {"columns": ["a", "pair"], "into": "features"}}]
    assert made.spec["model"]["in_channels"] == 3


FEATURES_OF_2 = ColumnFacts(name="pair", kind="tensor", dtype="float32", shape=(2,), rows=ROWS)


def test_a_quantity_is_a_regression_with_a_scaled_target() -> None:
    made = suggested(number("distance"), number("fare", distinct=220), splits={"train": 6433})
    assert made.spec["task"] == "TASK_REGRESSION"
    assert made.spec["target_scaling"] == "TARGET_SCALING_STANDARD"
    assert made.spec["metrics"] == ["mae", "rmse", "r2"]
    assert ops(made) == ["standardize", "concat"]


@pytest.mark.parametrize(
    ("label", "steps"),
    [
        (integer("target", 0, 1, 2), []),
        (integer("target", 3, 4, 8), [{"column": "target", "ordinal_encode": {"categories": ["3", "4", "8"]}}]),
        (
            text("target", "no", "yes", nulls=4),
            [
                {"filter": {"expression": 'col("target") is not None'}},
                {"column": "target", "ordinal_encode": {"categories": ["no", "yes"]}},
            ],
        ),
        (
            number("target", distinct=2, values=(0.0, 1.0), nans=1),
            [
                {"filter": {"expression": 'col("target") is not None and not is_nan(col("target"))'}},
                {"column": "target", "cast": {"arrow_type": "int64"}},
                {"column": "target", "ordinal_encode": {"categories": ["0", "1"]}},
            ],
        ),
        (
            ColumnFacts(name="target", kind="boolean", rows=ROWS, distinct=2, values=(False, True)),
            [{"column": "target", "ordinal_encode": {"categories": ["false", "true"]}}],
        ),
        (text("target", distinct=400), [{"column": "target", "ordinal_encode": {}}]),
    ],
)
def test_labels_become_classes_from_0_up(label: ColumnFacts, steps: list[Any]) -> None:
    made = suggested(label, FEATURES)
    assert made.spec["task"] == "TASK_CLASSIFICATION"
    assert (list(made.preparation.steps) if made.preparation else []) == steps


@pytest.mark.parametrize(
    ("columns", "label"),
    [
        ([number("class"), number("fare"), number("a")], "class"),
        ([integer("survived", 0, 1), number("fare"), number("a")], "survived"),
        ([number("a"), text("kind", "x", "y"), text("name", distinct=900)], "kind"),
        ([number("Target"), text("kind", "x", "y")], "Target"),
    ],
)
def test_the_label_is_found_by_its_name_or_as_the_only_one_of_few_values(
    columns: list[ColumnFacts], label: str
) -> None:
    assert suggested(*columns).spec["label_column"] == label


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([text("a", "x", "y"), text("b", "x", "y"), number("c")], "a, b may be it"),
        ([number("label"), number("target")], "label, target may be it"),
        ([number("one"), number("other")], "one, other are there"),
        ([], "import one"),
    ],
)
def test_a_label_that_is_not_clear_is_asked_for_with_its_candidates(columns: list[ColumnFacts], expected: str) -> None:
    error = refused(*columns, FEATURES)
    assert error.metadata["field"] == "spec.label_column"
    assert expected in error.message
    assert not columns or "--label-column" in error.message


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (text("label", "same"), "one value in all rows"),
        (text("label", distinct=12_000), "at most 10,000 classes"),
        (number("label", nulls=ROWS, distinct=0), "no value in any row"),
        (text("label", distinct=3, values=("a", "b", "c")), "cannot be learnt"),
    ],
)
def test_a_label_that_nothing_can_be_learnt_of_is_refused(label: ColumnFacts, expected: str) -> None:
    given = {"task": "TASK_REGRESSION"} if "cannot" in expected else {}
    error = refused(label, FEATURES, label_column="label", **given)
    assert expected in error.message
    assert error.metadata["field"] == "spec.label_column"


def test_a_version_without_statistics_of_its_label_is_refused() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        suggested(text("label", known=False, rows=0), FEATURES)
    assert caught.value.specific_reason == "NO_STATISTICS"


def test_a_table_that_leaves_nothing_to_learn_from_is_refused_with_the_reasons() -> None:
    error = refused(SPECIES, text("note", distinct=990), number("nothing", nulls=ROWS))
    assert "no column is left" in error.message
    assert "note: nearly each row has its own value" in error.message


@pytest.mark.parametrize(
    ("splits", "given", "field"),
    [
        ({"train": 10}, {"train_split": "fit"}, "spec.train_split"),
        ({"train": 10}, {"validation_split": "validation"}, "spec.validation_split"),
        ({"a": 10, "b": 10}, {}, "spec.train_split"),
        ({"train": 1}, {}, "spec.train_split"),
    ],
)
def test_a_split_that_is_missing_or_empty_is_refused(splits: dict[str, int], given: Any, field: str) -> None:
    assert refused(SPECIES, number("a"), splits=splits, **given).metadata["field"] == field


@pytest.mark.parametrize(
    ("splits", "size_bytes", "validation", "divided"),
    [
        ({"train": 800, "test": 200}, 0, "test", False),
        ({"all": 800}, 0, "validation", True),
        ({"train": 9}, 0, None, False),
        ({"train": 800}, 11 * 2**30, None, False),
    ],
)
def test_validation_rows_are_found_or_divided_off(
    splits: dict[str, int], size_bytes: int, validation: str | None, divided: bool
) -> None:
    made = suggested(FEATURES, digit(), splits=splits, size_bytes=size_bytes)
    assert made.spec.get("validation_split") == validation
    assert bool(made.preparation) is divided
    assert ("early_stopping" in made.spec) is bool(validation)


def test_given_fields_win_and_are_not_reported_as_choices() -> None:
    given: dict[str, Any] = {
        "label_column": "kind",
        "epochs": 3,
        "model": {"builder": "torchvision.resnet34", "num_classes": 12},
        "optimizer": {"name": "SGD", "learning_rate": 0.5},
        "transform": {"steps": [{"column": "image", "to_float": {}}]},
        "seed": "7",
    }
    made = suggested(pixels(28, 28), digit(), integer("kind", 0, 1), **given)
    assert made.spec["model"] == {"builder": "torchvision.resnet34", "num_classes": 12, "in_channels": 5}
    others = given.keys() - {"model", "optimizer"}
    assert {name: made.spec[name] for name in others} == {name: given[name] for name in others}
    assert made.spec["optimizer"].items() >= given["optimizer"].items()
    chosen = {one.field for one in made.choices}
    assert not chosen & {"label_column", "epochs", "model.builder", "optimizer.name", "transform"}


@pytest.mark.parametrize("label", [digit(), number("fare")])
def test_a_model_of_ones_own_is_left_what_its_code_may_bring(label: ColumnFacts) -> None:
    made = suggested(FEATURES, label, model={"entry": "net:build", "code_bundle": "codeBundles/x"})

    assert "builder" not in made.spec["model"]
    assert made.spec["model"]["in_channels"] == 7
    left = {"optimizer", "loss", "metrics", "early_stopping", "target_scaling"}
    assert not left & made.spec.keys()


def test_a_run_of_few_epochs_is_not_stopped_early() -> None:
    assert "early_stopping" not in suggested(FEATURES, digit(), epochs=5).spec
    assert suggested(FEATURES, digit(), epochs=6).spec["early_stopping"] == {"patience": 5}
    given = suggested(FEATURES, digit(), epochs=3, early_stopping={"min_delta": 0.1}).spec
    assert given["early_stopping"] == {"min_delta": 0.1, "patience": 5}


def test_early_stopping_that_was_given_without_patience_is_none() -> None:
    first = suggested(SPECIES, number("a"), splits={"train": 344}, early_stopping={})
    assert first.spec["early_stopping"] == {}, "so that the second answer knows it, too"
    assert "early_stopping" not in suggested(FEATURES, digit(), early_stopping={}).spec


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_the_batch_has_rows_for_each_worker_in_each_step(workers: int) -> None:
    size = suggested(FEATURES, digit(), splits={"train": 300, "validation": 20}, num_workers=workers).spec[
        "global_batch_size"
    ]
    assert 2 * workers <= size <= 300


@pytest.mark.timed
def test_five_thousand_columns_that_need_no_step_are_put_together_soon() -> None:
    columns = [number(f"column{index}", mean=0.0, deviation=1.0) for index in range(5000)]
    with cpu_at_most(2):
        made = suggested(digit(), *columns)
    assert made.spec["model"]["in_channels"] == 5000


def test_an_input_that_no_model_reads_is_refused_before_anything_is_prepared() -> None:
    error = refused(SPECIES, number("a"), splits={"train": 344}, input_column="a")
    assert error.metadata["field"] == "spec.input_column"


def test_a_model_is_as_wide_as_a_given_transform_makes_its_input() -> None:
    given = {"steps": [{"concat": {"columns": ["a"], "into": "all"}}]}
    made = suggested(SPECIES, number("a"), splits={"train": 344}, transform=given)
    assert ops(made) == ["ordinal_encode"], "the label alone"
    assert "about 5 numbers" in next(one.reason for one in made.choices if one.field == "model.kwargs")


def test_rows_without_a_label_do_not_count_for_the_batch() -> None:
    label = text("label", "a", "b", rows=20, nulls=14)
    spec = suggested(label, FEATURES, splits={"train": 16, "validation": 4}).spec
    assert spec["global_batch_size"] == 2


@pytest.mark.timed
def test_five_thousand_columns_are_judged_soon_and_within_the_steps_that_a_transform_has() -> None:
    columns = [number(f"column{index}", nulls=index % 2) for index in range(5000)]
    with cpu_at_most(2):
        made = suggested(SPECIES, *columns)
    assert made.preparation is not None
    assert len(made.preparation.steps) <= 256
    assert len(made.choices) < 40
    assert any("4," in one.value and "at most 256 steps" in one.reason for one in made.choices)


def test_a_language_model_predicts_the_tokens_of_its_input_and_needs_no_label() -> None:
    ids = ColumnFacts(name="input_ids", kind="tensor", dtype="int64", shape=(32,), rows=ROWS, known=False)
    transform = {"steps": [{"concat": {"columns": ["input_ids", "attention_mask"], "into": "x"}}]}
    model = {"builder": "transformers.causal_lm", "in_channels": 64, "num_classes": 32}

    spec = suggested(ids, replace(ids, name="attention_mask"), digit(), transform=transform, model=model).spec

    assert (spec["task"], spec["label_column"]) == ("TASK_REGRESSION", "input_ids")
    assert (spec["loss"], spec["metrics"]) == ({"name": "next_token"}, ["perplexity"])
    assert spec["target_scaling"] == "TARGET_SCALING_NONE"
    assert spec["model"] == model


def test_a_model_of_several_inputs_gets_all_but_their_transform() -> None:
    columns = (pixels(28, 28), number("age"), text("sex", "f", "m"), digit())

    made = suggested(*columns, model={"entry": "net:Both"}, input_columns=["image", "age"])

    assert made.preparation is None
    assert {"transform", "input_column"}.isdisjoint(made.spec)
    assert (made.spec["input_columns"], made.spec["label_column"]) == (["image", "age"], "label")
    assert made.spec["model"] == {"entry": "net:Both", "num_classes": 10}
    assert made.spec["epochs"] == suggested(pixels(28, 28), digit(), model={"entry": "net:build"}).spec["epochs"]


def test_no_input_of_a_model_of_several_inputs_is_suggested_as_its_label() -> None:
    columns = (pixels(28, 28), text("sex", "f", "m"), text("outcome_of_visit", "ill", "well"))

    made = suggested(*columns, model={"entry": "net:Both"}, input_columns=["image", "sex"])

    assert made.spec["label_column"] == "outcome_of_visit"


def test_several_inputs_without_an_own_model_are_refused_by_field() -> None:
    with pytest.raises(InvalidArgument) as refused:
        suggested(number("age"), number("size"), digit(), input_columns=["age", "size"])
    assert refused.value.fields[0][0] == "spec.input_columns"
