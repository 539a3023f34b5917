"""Whether a specification fits the version that it names."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shared.dataset_version import DatasetVersion
from shared.dataset_version.manifest import REPORT, Attachment, Column, Manifest, Split, sha256_hex
from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from shared.transforms import TensorSpec
from train_service.domain.spec import REGRESSION, LossSpec, TrainingSpec
from train_service.loading.preprocessing import (
    Preprocessing,
    check_classes,
    check_finite,
    check_fits,
    class_names,
    steps_of_run,
    with_defaults,
)


def tensor(value_type: str, *shape: int) -> str:
    """As Arrow spells it."""
    return f"extension<arrow.fixed_shape_tensor[value_type={value_type}, shape={list(shape)}]>"


COLUMNS = [
    Column(name="image", arrow_type=tensor("uint8", 28, 28), shape=[28, 28]),
    Column(name="prepared", arrow_type=tensor("float", 1, 28, 28), shape=[1, 28, 28]),
    Column(name="precise", arrow_type=tensor("double", 1, 28, 28), shape=[1, 28, 28]),
    Column(name="coarse", arrow_type=tensor("halffloat", 1, 28, 28), shape=[1, 28, 28]),
    Column(name="vector", arrow_type=tensor("float", 6), shape=[6]),
    Column(name="one", arrow_type=tensor("float", 1), shape=[1]),
    Column(name="flag", arrow_type="bool", shape=[]),
    Column(name="label", arrow_type="int64", shape=[]),
    Column(name="small_label", arrow_type="uint8", shape=[]),
    Column(name="name", arrow_type="string", shape=[]),
    Column(name="share", arrow_type="double", shape=[]),
    Column(name="photo", arrow_type="binary", shape=[]),
    Column(name="when", arrow_type="timestamp[us]", shape=[]),
]


def version(**rows: int) -> DatasetVersion:
    splits, first = [], 0
    for name, count in rows.items():
        splits.append(Split(name=name, first_row_id=first, row_count=count))
        first += count
    return DatasetVersion("datasets/d/versions/v", Manifest(columns=COLUMNS, splits=splits, files=[]), "00", "folder")


V = version(train=1000, validation=100)
SPEC = TrainingSpec(
    dataset_version="datasets/d/versions/v",
    model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
    transform={"steps": [{"toFloat": {}}]},
    epochs=1,
    global_batch_size=64,
)
PREPARED = replace(SPEC, transform={})
LONG = "x" * 1100
LONG_NAMED: tuple[dict[str, Any], ...] = (
    {"toFloat": {}},
    {"rename": {"columns": {"image": LONG}}},
    {"rename": {"columns": {LONG: "image"}}},
)


def test_the_models_input_is_one_row_prepared() -> None:
    assert check_fits(SPEC, V) == TensorSpec("image", "float32", (1, 28, 28))


def test_a_column_that_holds_prepared_floats_needs_no_transform() -> None:
    assert check_fits(replace(PREPARED, input_column="prepared"), V) == TensorSpec("prepared", "float32", (1, 28, 28))


def test_classes_are_called_what_the_version_calls_its_labels() -> None:
    named = [
        replace(column, value_names=["ants", "bees", "wasps"]) if column.name == "label" else column
        for column in COLUMNS
    ]
    there = replace(V, manifest=replace(V.manifest, columns=named))
    two = replace(SPEC, model=replace(SPEC.model, num_classes=2))

    assert class_names(SPEC, there) == ("ants", "bees", "wasps")
    assert class_names(two, there) == ("ants", "bees")
    assert class_names(replace(SPEC, task=REGRESSION), there) == class_names(SPEC, V) == ()


def steps(*given: dict[str, Any]) -> dict[str, Any]:
    return {"steps": list(given)}


DECODE: dict[str, Any] = {"column": "photo", "decodeImage": {"mode": "MODE_GRAY"}}
RESIZE: dict[str, Any] = {"column": "photo", "resize": {"height": 20, "width": 30}}
TO_FLOAT: dict[str, Any] = {"column": "photo", "toFloat": {}}


def test_the_models_input_may_be_made_of_encoded_images() -> None:
    photos = replace(SPEC, input_column="photo", transform=steps(DECODE, RESIZE, TO_FLOAT))

    assert check_fits(photos, V) == TensorSpec("photo", "float32", (1, 20, 30))


def test_the_models_input_may_be_a_column_that_the_transform_makes() -> None:
    renamed = steps({"rename": {"columns": {"image": "x"}}}, {"column": "x", "toFloat": {}})

    assert check_fits(replace(SPEC, input_column="x", transform=renamed), V) == TensorSpec("x", "float32", (1, 28, 28))


@pytest.mark.parametrize("label", ["label", "small_label"])
def test_labels_are_integers_of_any_width(label: str) -> None:
    check_fits(replace(SPEC, label_column=label), V)


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("train_split", replace(SPEC, train_split="absent")),
        ("validation_split", replace(SPEC, validation_split="absent")),
        ("input_column", replace(SPEC, input_column="absent")),
        ("transform.steps[0]", replace(SPEC, input_column="label")),
        ("transform.steps[0]", replace(SPEC, input_column="name")),
        ("transform", replace(PREPARED, input_column="name")),
        ("label_column", replace(SPEC, label_column="absent")),
        ("label_column", replace(SPEC, label_column="image")),
        ("label_column", replace(SPEC, label_column="name")),
        ("label_column", replace(SPEC, label_column="share")),
        ("label_column", replace(SPEC, label_column="when")),
        ("transform", PREPARED),
        ("transform", replace(PREPARED, input_column="precise")),
        ("transform", replace(PREPARED, input_column="coarse")),
        ("transform", replace(SPEC, model=replace(SPEC.model, in_channels=3))),
        ("transform.steps[0]", replace(SPEC, input_column="prepared")),
        (
            "transform.steps[1]",
            replace(SPEC, transform=steps({"toFloat": {}}, {"filter": {"expression": "label > 1"}})),
        ),
        ("transform.steps[0]", replace(SPEC, transform=steps({"column": "share", "standardize": {}}, {"toFloat": {}}))),
        ("transform.steps[1].column", replace(SPEC, transform=steps({"toFloat": {}}, {"column": "no", "toFloat": {}}))),
        ("transform", replace(SPEC, transform=steps({"drop": {"columns": ["image"]}}))),
        ("transform.steps[1]", replace(SPEC, transform=steps(*LONG_NAMED))),
        ("transform", replace(SPEC, input_column="photo", transform=steps(DECODE))),
        ("transform.steps[1]", replace(SPEC, input_column="photo", transform=steps(DECODE, TO_FLOAT))),
        ("input_column", replace(SPEC, input_column="x", transform=steps(DECODE, {"column": "x", "toFloat": {}}))),
        ("input_column", replace(SPEC, input_column="x", transform={})),
        ("global_batch_size", replace(SPEC, global_batch_size=1001)),
    ],
)
def test_a_version_that_does_not_fit_is_refused_by_its_field(path: str, spec: TrainingSpec) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_fits(spec, V)

    assert [field for field, _ in refused.value.fields] == [f"spec.{path}"]


VECTORS = replace(PREPARED, input_column="vector", model=ModelSpec(builder="mlp", in_channels=6, num_classes=10))
NUMBERS = replace(
    VECTORS,
    task=REGRESSION,
    loss=LossSpec(name="mse"),
    label_column="share",
    model=replace(VECTORS.model, num_classes=1),
)


def test_an_mlp_takes_vectors() -> None:
    assert check_fits(VECTORS, V) == TensorSpec("vector", "float32", (6,))


def test_a_model_of_a_package_takes_any_shape_that_begins_with_its_channels() -> None:
    ours = replace(VECTORS, model=replace(VECTORS.model, builder="ours"))

    assert check_fits(ours, V).shape == (6,)
    images = replace(ours, input_column="prepared", model=replace(ours.model, in_channels=1))
    assert check_fits(images, V).shape == (1, 28, 28)


@pytest.mark.parametrize(
    ("label", "outputs"), [("share", 1), ("label", 1), ("small_label", 1), ("one", 1), ("vector", 6)]
)
def test_labels_of_a_regression_are_numbers_one_for_each_output(label: str, outputs: int) -> None:
    check_fits(replace(NUMBERS, label_column=label, model=replace(NUMBERS.model, num_classes=outputs)), V)


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("transform", replace(VECTORS, model=replace(VECTORS.model, in_channels=7))),
        ("transform", replace(VECTORS, input_column="prepared", model=replace(VECTORS.model, in_channels=1))),
        ("transform", replace(VECTORS, model=replace(VECTORS.model, builder="torchvision.resnet18"))),
        ("transform", replace(VECTORS, model=replace(VECTORS.model, builder="ours", in_channels=7))),
        ("label_column", replace(NUMBERS, label_column="name")),
        ("label_column", replace(NUMBERS, label_column="when")),
        ("label_column", replace(NUMBERS, label_column="flag")),
        ("label_column", replace(NUMBERS, label_column="image")),
        ("label_column", replace(NUMBERS, label_column="vector")),
        ("label_column", replace(NUMBERS, model=replace(NUMBERS.model, num_classes=2))),
    ],
)
def test_vectors_and_numbers_that_do_not_fit_are_refused_by_their_field(path: str, spec: TrainingSpec) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_fits(spec, V)

    assert [field for field, _ in refused.value.fields] == [f"spec.{path}"]


def test_steps_are_counted_over_all_epochs() -> None:
    assert steps_of_run(replace(SPEC, epochs=3), V) == 3 * 16


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_empty_split_is_refused(split: str) -> None:
    rows: dict[str, Any] = {"train": 1000, "validation": 100} | {split: 0}
    empty = version(**rows)

    with pytest.raises(InvalidArgument) as refused:
        check_fits(replace(SPEC, validation_split="validation"), empty)

    assert split.removesuffix("_split") in str(refused.value) or "0 rows" in str(refused.value)


def test_the_validation_split_is_taken_where_there_is_one() -> None:
    assert with_defaults(SPEC, V).validation_split == "validation"
    assert with_defaults(SPEC, version(train=1000, test=10)).validation_split == ""
    assert with_defaults(replace(SPEC, validation_split="train"), V).validation_split == "train"


def test_a_custom_function_that_ends_its_process_does_not_end_the_service() -> None:
    function = "tests.unit.shared.transforms.custom_functions:leaving"
    transform = steps({"custom": {"function": function, "columns": ["share"]}}, {"toFloat": {}})
    with pytest.raises(InvalidArgument, match="ended its process for 0 rows, with exit status 3") as caught:
        check_fits(replace(SPEC, transform=transform), V)
    assert caught.value.fields[0][0] == "spec.transform.steps[0]"


def test_a_recorded_transform_with_a_name_that_no_request_may_have_any_more_is_still_trained_with() -> None:
    assert Preprocessing(replace(SPEC, transform=steps(*LONG_NAMED)), V.columns).output.shape == (1, 28, 28)


TABLE = replace(
    SPEC,
    input_column="features",
    label_column="share",
    validation_split="validation",
    task=REGRESSION,
    transform={"steps": [{"concat": {"columns": ["vector"], "into": "features"}}]},
    model=replace(SPEC.model, builder="mlp", in_channels=6, num_classes=1),
)


def with_report(store: ObjectStore, *columns: dict[str, Any]) -> DatasetVersion:
    report = json.dumps({"columns": columns}).encode()
    store.put(f"{V.folder}/{REPORT}", report)
    attachment = Attachment(path=REPORT, size_bytes=len(report), sha256=sha256_hex(report))
    return replace(V, manifest=replace(V.manifest, attachments=[attachment]))


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [
        ({"column": "vector", "split": "train", "nanCount": "1200"}, "column 'vector' has 1,200 NaN in split 'train'"),
        (
            {"column": "share", "split": "validation", "numbers": {"min": 0, "max": "Infinity"}},
            "column 'share' has infinities in split 'validation'",
        ),
        (
            {"column": "vector", "split": "train", "nanCount": 1, "numbers": {"min": "-Infinity", "max": 1}},
            "column 'vector' has 1 NaN and infinities in split 'train'",
        ),
    ],
)
def test_values_that_are_not_finite_are_refused_by_the_versions_statistics_alone(
    store: ObjectStore, statistics: dict[str, Any], expected: str
) -> None:
    version = with_report(store, {"column": "share", "split": "train", "numbers": {"min": 0, "max": 1}}, statistics)
    with pytest.raises(InvalidArgument, match=r"nan_as_null.*spec\.allow_non_finite") as refused:
        check_finite(store, TABLE, version)
    assert expected in refused.value.message
    assert refused.value.specific_reason == "NON_FINITE_VALUES"
    assert refused.value.metadata["column"] == statistics["column"]

    check_finite(store, replace(TABLE, allow_non_finite=True), version)


def test_columns_and_splits_that_a_job_does_not_read_may_have_any_values(store: ObjectStore) -> None:
    version = with_report(
        store,
        {"column": "vector", "split": "test", "nanCount": 5},
        {"column": "prepared", "split": "train", "nanCount": 5},
        {"column": "share", "split": "train", "nanCount": 0, "nullCount": 5},
    )
    check_finite(store, TABLE, version)
    check_finite(store, TABLE, V)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"min": 0, "max": 10}, "has the label 10 in split 'train' of datasets/d/versions/v, .*; use 11 or more"),
        ({"min": -1, "max": 3}, "has the label -1 in split 'train' .* encode them by ordinal_encode"),
    ],
)
def test_labels_that_are_no_class_are_refused_by_the_versions_statistics(
    store: ObjectStore, numbers: dict[str, int], expected: str
) -> None:
    version = with_report(store, {"column": "label", "split": "train", "numbers": numbers})
    with pytest.raises(InvalidArgument, match=f"spec.model.num_classes: 10: column 'label' {expected}") as refused:
        check_classes(store, SPEC, version)
    assert refused.value.specific_reason == "LABEL_OUT_OF_RANGE"
    assert refused.value.fields[0][0] == "spec.model.num_classes"
    # A width that its own code says later, other splits and other columns are no reason.
    check_classes(store, replace(SPEC, model=replace(SPEC.model, num_classes=0)), version)
    check_classes(store, replace(SPEC, train_split="validation"), version)
    check_classes(store, replace(SPEC, label_column="small_label"), version)


def test_labels_of_all_classes_and_of_a_single_one_fit(store: ObjectStore) -> None:
    check_classes(store, SPEC, with_report(store, {"column": "label", "split": "train", "numbers": {"max": 9}}))
    check_classes(store, SPEC, with_report(store, {"column": "label", "split": "train", "numbers": {}}))
    check_classes(store, SPEC, V)
