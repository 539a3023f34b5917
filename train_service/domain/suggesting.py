"""From what is known of a version to a specification that trains something sensible on it, and why.

Each rule sets one field and gives its reason; a field that was given stays as it is, and no rule gives a reason for it.
What a step has to learn, or rows that cannot be used, make a preparation: a version that the data service makes first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.errors import FailedPrecondition, invalid_field
from train_service.domain.slices import MIN_ROWS_PER_RANK
from train_service.domain.spec import CLASSIFICATION, REGRESSION
from train_service.domain.suggested_features import MAX_STEPS, feature_steps
from train_service.domain.suggested_training import (
    check_input,
    choose_model,
    choose_model_input,
    choose_outputs,
    choose_training,
    expected_width,
)
from train_service.domain.suggestion import Preparation, Suggestion
from train_service.domain.version_facts import (
    BOOLEAN,
    BYTES,
    INTEGER,
    NUMBER,
    OTHER,
    TENSOR,
    TEXT,
    TIME,
    ColumnFacts,
    VersionFacts,
    names_shown,
)

# How a label is called, the surest names first. Two of one line leave open which is meant.
LABEL_NAMES = (
    ("label", "labels", "target", "class"),
    ("species", "survived", "diagnosis", "outcome", "category", "churn", "sentiment", "variety"),
    ("price", "fare", "salary", "income", "cost", "rating", "quality", "mpg", "medv", "saleprice", "medhousevalue"),
    ("y",),
)
IMAGE_NAMES = ("image", "images", "img", "picture", "photo", "pixels")
FEATURES = "features"
VALIDATION_NAMES = ("validation", "val", "valid", "dev", "eval")
# More different integers than that are a quantity, and more different texts say too little each.
MAX_CLASSES_OF_INTEGERS = 20
MAX_CLASSES = 10_000
# Larger versions are not copied for a validation split alone.
MAX_BYTES_TO_DIVIDE = 10 * 2**30
MIN_ROWS_TO_DIVIDE = 10
SPLIT_SEED = 17


def suggest(
    version: VersionFacts, given: Mapping[str, Any], shape_made: Callable[[str], tuple[int, ...]]
) -> Suggestion:
    """`given` is the partial specification; `shape_made` says what its own transform makes of an input column.

    Raises `InvalidArgument` where the version leaves open what is meant, naming what there is to choose from, and
    `FailedPrecondition` where it lacks statistics.
    """
    if "program" in given:
        raise invalid_field(
            "spec.program", "set", "a program has its own model and loop; make the job without this call"
        )
    made = Suggestion({**json.loads(json.dumps(given)), "dataset_version": version.name})
    shares = _choose_splits(made, version)
    source = _find_input(made, version)
    if source is not None and "transform" not in given:
        check_input(source)
    label = _find_label(made, version, source)
    task = _choose_task(made, label)
    steps = _label_steps(made, label, task)
    columns: list[str] = []
    if source is None and "transform" not in given:
        more, columns = feature_steps(made, version, label, MAX_STEPS - len(steps) - 1)
        steps += more
    # As if all rows without a label were among them.
    rows = max(version.splits[_source_split(version, made)] - label.nulls - label.nans, MIN_ROWS_PER_RANK)
    rows = round(rows * shares["train"] / sum(shares.values())) if shares else rows
    if steps or shares:
        steps += [{"concat": {"columns": columns, "into": FEATURES}}] if columns else []
        fit_split = "train" if shares else made.spec["train_split"]
        made.preparation = Preparation(
            source=version.name, steps=steps, shares=shares, seed=SPLIT_SEED, fit_split=fit_split
        )
    elif columns:
        made.spec["transform"] = {"steps": [{"concat": {"columns": columns, "into": FEATURES}}]}
        made.note("transform", f"concat into {FEATURES}", "No column needs more: all are numbers on one scale.")
    is_image = source is not None and (source.is_image or source.kind == BYTES or len(source.shape) == 3)
    if made.preparation is None:
        choose_model_input(made, source, rows, lambda: _width(made, version, source, columns, shape_made))
        choose_outputs(made, label, task)
    if not _is_own(made):
        choose_model(made, is_image, lambda: _width(made, version, source, columns, shape_made))
    choose_training(made, task, rows, is_image, is_own=_is_own(made))
    return made


def _width(
    made: Suggestion,
    version: VersionFacts,
    source: ColumnFacts | None,
    columns: Sequence[str],
    shape_made: Callable[[str], tuple[int, ...]],
) -> int:
    """Of the model's input vector; before a preparation as far as statistics tell."""
    if columns:
        return expected_width(version, columns)
    if source is None or "transform" in made.spec:
        return shape_made(made.spec["input_column"])[0]
    return source.shape[0]


def _source_split(version: VersionFacts, made: Suggestion) -> str:
    """Where the training rows are now: a split that is still to be made has none."""
    train = made.spec["train_split"]
    return train if train in version.splits else next(iter(version.splits))


def _choose_splits(made: Suggestion, version: VersionFacts) -> dict[str, float]:
    """The shares of a division that has to be made; none where the version's own splits do."""
    splits, spec = version.splits, made.spec
    for path in ("train_split", "validation_split"):
        if path in spec and spec[path] not in splits:
            raise invalid_field(f"spec.{path}", spec[path], f"{version.name} has {names_shown(splits)}")
    if "train_split" not in spec and "train" not in splits and len(splits) > 1:
        remedy = f"{version.name} has {names_shown(splits)}; set it to one of them"
        raise invalid_field("spec.train_split", "", remedy)
    train = spec.get("train_split") or ("train" if "train" in splits else next(iter(splits)))
    if splits[train] < MIN_ROWS_PER_RANK:
        raise invalid_field("spec.train_split", train, f"it has {splits[train]} rows; use at least 2")
    if "validation_split" in spec:
        made.choose("train_split", train, _why_train(train, splits))
        return {}
    usual = next((one for one in VALIDATION_NAMES if splits.get(one) and one != train), "")
    other = usual or next((one for one, rows in splits.items() if one != train and rows), "")
    if other:
        reason = (
            f"The version has it, with {splits[other]:,} rows."
            if usual
            else (
                f"The version has no validation split. Dividing all rows anew would move rows of {other!r} into "
                "training, so validation measures on it; keep other rows aside for a final measure."
            )
        )
        made.choose("train_split", train, _why_train(train, splits))
        made.choose("validation_split", other, reason)
        return {}
    if splits[train] < MIN_ROWS_TO_DIVIDE or version.size_bytes > MAX_BYTES_TO_DIVIDE:
        few = splits[train] < MIN_ROWS_TO_DIVIDE
        why = (
            f"{splits[train]} rows are too few to divide" if few else "the version is over 10 GiB, and would be copied"
        )
        made.choose("train_split", train, _why_train(train, splits))
        made.note("validation_split", "none", f"The version has none, and {why}. The newest checkpoint counts as best.")
        return {}
    shares = {"train": 0.8, "validation": 0.2} if splits[train] < 10_000 else {"train": 0.9, "validation": 0.1}
    spec["train_split"] = "train"
    spec["validation_split"] = "validation"
    value = ", ".join(f"{split} {share:.0%}" for split, share in shares.items())
    why = "The version has one split, and validation needs rows that training does not see; they are drawn at random."
    made.note("preparation.splits", value, why)
    return shares


def _why_train(train: str, splits: Mapping[str, int]) -> str:
    return f"The version has it, with {splits[train]:,} rows."


def _find_input(made: Suggestion, version: VersionFacts) -> ColumnFacts | None:
    """The column that the model reads, an image or a vector; None where it has to be made of columns of a table."""
    spec = made.spec
    path = "spec.input_column"
    steps = spec.get("transform", {}).get("steps", ())
    into = [step["concat"]["into"] for step in steps if "concat" in step]
    if "input_column" in spec or into:
        made.choose("input_column", into[-1] if into else "", "A concat step of the transform makes it.")
        name = spec["input_column"]
        return None if name in into else version.column(name, path)
    ready = [one for one in version.columns if one.name == FEATURES and _is_vector(one)]
    images = ready or [one for one in version.columns if one.is_image]
    images = images or [one for one in version.columns if one.kind == TENSOR and len(one.shape) == 3]
    if not images:
        encoded = [one for one in version.columns if one.kind == BYTES and not one.empty]
        images = [one for one in encoded if one.name.lower() in IMAGE_NAMES] or encoded
    if len(images) > 1:
        named = [one for one in images if one.name.lower() in IMAGE_NAMES]
        if len(named) != 1:
            remedy = f"{names_shown([one.name for one in images])} may be it; set it to one of them (--input-column)"
            raise invalid_field(path, "", remedy)
        images = named
    if not images:
        made.choose("input_column", FEATURES, "The version is a table: its columns are put together into one vector.")
        return None
    (one,) = images
    what = "vectors" if _is_vector(one) else "encoded images" if one.kind == BYTES else "images"
    made.choose("input_column", one.name, f"It is the version's column of {what}.")
    return one


def _is_vector(one: ColumnFacts) -> bool:
    return one.kind == TENSOR and one.dtype == "float32" and len(one.shape) == 1


def _find_label(made: Suggestion, version: VersionFacts, source: ColumnFacts | None) -> ColumnFacts:
    path = "spec.label_column"
    if "label_column" in made.spec:
        return _usable_label(version.column(made.spec["label_column"], path), version)
    there = [
        one for one in version.columns if one is not source and one.kind not in (BYTES, TIME, OTHER) and not one.empty
    ]
    there = [one for one in there if one.kind != TENSOR]
    for names in LABEL_NAMES:
        found = [one for one in there if one.name.lower() in names]
        if found:
            why = "Its name says that it is what is to be told."
            break
    else:
        found = [one for one in there if one.value_names]
        why = "It is the only column whose values have names."
        if not found:
            found = [one for one in there if _may_be_classes(one)]
            why = "It is the only column of a few different values."
    if len(found) == 1:
        made.choose("label_column", found[0].name, why)
        return _usable_label(found[0], version)
    candidates = found or there
    if not candidates:
        raise invalid_field(path, "", f"no column of {version.name} can be what is to be told; import one")
    what = "may be it" if found else "are there, and none has a name or values that say so"
    remedy = f"{names_shown([one.name for one in candidates])} {what}; set it to one of them (--label-column)"
    raise invalid_field(path, "", remedy)


def _may_be_classes(one: ColumnFacts) -> bool:
    few = 2 <= one.distinct <= MAX_CLASSES_OF_INTEGERS and one.rows >= 2 * one.distinct
    return one.kind in (TEXT, BOOLEAN, INTEGER) and few


def _usable_label(one: ColumnFacts, version: VersionFacts) -> ColumnFacts:
    path = "spec.label_column"
    if not one.known and not one.value_names:
        raise FailedPrecondition(
            f"{version.name} has no statistics of column {one.name!r}, which the choice of a task needs; import it "
            "anew, or write the specification by hand",
            reason="NO_STATISTICS",
            metadata={"resource": version.name, "column": one.name},
        )
    if one.empty:
        raise invalid_field(path, one.name, "it has no value in any row; choose another (--label-column)")
    return one


def _is_own(made: Suggestion) -> bool:
    """Whether a model of the caller's own code is given, which may bring what it is trained with."""
    return bool(made.spec.get("model", {}).get("entry"))


def _choose_task(made: Suggestion, label: ColumnFacts) -> str:
    if "task" in made.spec:
        return str(made.spec["task"]).removeprefix("TASK_")
    task, why = CLASSIFICATION, f"{label.name!r} has {max(label.distinct, len(label.value_names))} different values."
    if label.kind == TENSOR:
        task, why = REGRESSION, f"{label.name!r} is a vector of numbers."
    elif label.kind == NUMBER and not (label.whole and label.distinct <= MAX_CLASSES_OF_INTEGERS):
        task, why = REGRESSION, f"{label.name!r} is a number of many values, a quantity."
    elif label.kind == INTEGER and not label.value_names and not _counts_from_0(label):
        few = label.distinct <= MAX_CLASSES_OF_INTEGERS
        task, why = (task, why) if few else (REGRESSION, f"{label.name!r} has {label.distinct:,} different numbers.")
    made.choose("task", f"TASK_{task}", why)
    return task


def _counts_from_0(label: ColumnFacts) -> bool:
    """Whether the integers are 0, 1, …, as classes are."""
    many_rows = label.rows >= 10 * label.distinct
    return label.least == 0 and label.most == label.distinct - 1 and (many_rows or label.distinct <= 2)


def _label_steps(made: Suggestion, label: ColumnFacts, task: str) -> list[dict[str, Any]]:
    """What has to be done to the label before a run takes it."""
    path = "spec.label_column"
    steps: list[dict[str, Any]] = []
    if label.kind in (BYTES, TIME, OTHER) or (label.kind == TEXT and task == REGRESSION):
        raise invalid_field(path, label.name, f"it is of a type ({label.kind}) that cannot be learnt; choose another")
    if label.nulls or label.nans:
        column = f"col({json.dumps(label.name, ensure_ascii=False)})"
        kept = f"{column} is not None" + (f" and not is_nan({column})" if label.nans else "")
        steps.append({"filter": {"expression": kept}})
        count = label.nulls + label.nans
        made.note("preparation.transform", "filter", f"{count:,} rows have no {label.name!r} to learn from.")
    if task == REGRESSION:
        if label.kind == BOOLEAN:
            raise invalid_field(path, label.name, "it is a boolean, which has no scale; use TASK_CLASSIFICATION")
        if not _is_own(made):
            made.choose(
                "target_scaling",
                "TARGET_SCALING_STANDARD",
                "Numbers of any size are learnt best around 0; answers stay in the target's own unit.",
            )
        return steps
    if label.kind == TENSOR:
        raise invalid_field(path, label.name, "it is a tensor, and classes are scalars; use TASK_REGRESSION")
    classes = max(label.distinct, len(label.value_names))
    if classes < 2:
        raise invalid_field(
            path, label.name, "it has one value in all rows, and there is nothing to tell; choose another"
        )
    if classes > MAX_CLASSES:
        remedy = (
            f"it has about {label.distinct:,} different values; use at most {MAX_CLASSES:,} classes, or another task"
        )
        raise invalid_field(path, label.name, remedy)
    if label.kind == INTEGER and (label.value_names or (label.least == 0 and label.most == label.distinct - 1)):
        return steps
    if label.kind == NUMBER:
        if not label.whole:
            raise invalid_field(
                path, label.name, "it has numbers that are not whole; bucketize it, or use TASK_REGRESSION"
            )
        steps.append({"column": label.name, "cast": {"arrow_type": "int64"}})
    known = _category_texts(label)
    steps.append({"column": label.name, "ordinal_encode": {"categories": known} if known else {}})
    made.note("preparation.transform", f"ordinal_encode {label.name}", "Classes are numbers from 0 up; names are kept.")
    return steps


def _category_texts(label: ColumnFacts) -> list[str]:
    """Of all splits, in the order of the type: a class that training rows lack is no error then. None: learnt."""
    if label.values is None:
        return []
    if label.kind == TEXT:
        return sorted(map(str, label.values), key=str.encode)
    if label.kind == BOOLEAN:
        return [str(one).lower() for one in sorted(label.values)]
    return [str(int(one)) for one in sorted(label.values)]
