"""Rules that suggest a training specification from the facts of a dataset version, with reasons.

Each rule sets one field and gives its reason. A field that the caller gave stays unchanged, and no rule gives a reason
for it. If a step has statistics to learn, or if rows are unusable, the rules propose a preparation: a version that the
data service makes first.

The rules choose the splits, the label and the task. Then they choose how each column of a table becomes part of one
vector, by the first rule that applies. Then they choose the model, its input and its training, by the kind and number
of rows.

A `Suggestion` has the JSON form of `millrace.train.v1.TrainingSpec`, with field names as in the contract.
`VersionFacts` are known before any row is read: a version's columns with their statistics, and its splits.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from shared.errors import FailedPrecondition, invalid_field
from shared.model_spec import NONE
from train_service.domain.order import (
    MIN_ROWS_PER_RANK,
    default_lanes,
    min_rows_of_a_rank,
    shapes_of_steps,
    steps_per_epoch,
)
from train_service.domain.spec import CAUSAL_LM, CLASSIFICATION, IDS_COLUMN, NEXT_TOKEN, PERPLEXITY, REGRESSION

# --- Splits, label and task ---

# Usual names of label columns, the most certain first. If two columns match the same line, the label is ambiguous.
LABEL_NAMES = (
    ("label", "labels", "target", "class"),
    ("species", "survived", "diagnosis", "outcome", "category", "churn", "sentiment", "variety"),
    ("price", "fare", "salary", "income", "cost", "rating", "quality", "mpg", "medv", "saleprice", "medhousevalue"),
    ("y",),
)
IMAGE_NAMES = ("image", "images", "img", "picture", "photo", "pixels")
FEATURES = "features"
VALIDATION_NAMES = ("validation", "val", "valid", "dev", "eval")
# More distinct integers than this are a quantity. More distinct texts than MAX_CLASSES have too few rows each.
MAX_CLASSES_OF_INTEGERS = 20
MAX_CLASSES = 10_000
# Larger versions are not copied just to get a validation split.
MAX_BYTES_TO_DIVIDE = 10 * 2**30
MIN_ROWS_TO_DIVIDE = 10
SPLIT_SEED = 17


def suggest(
    version: VersionFacts, requested: Mapping[str, Any], shape_made: Callable[[str], tuple[int, ...]]
) -> Suggestion:
    """Return a suggestion that completes the partial specification `requested`.

    `shape_made` returns the shape that the caller's own transform makes of an input column.

    Raises `InvalidArgument` if the version is ambiguous, naming the alternatives, and `FailedPrecondition` if it lacks
    statistics.
    """
    if "program" in requested:
        raise invalid_field(
            "spec.program", "set", "a program has its own model and loop; make the job without this call"
        )
    suggestion = Suggestion({**json.loads(json.dumps(requested)), "dataset_version": version.name})
    if requested.get("input_columns") and not _is_own(suggestion):
        raise invalid_field("spec.input_columns", "set", "only a model of your own, spec.model.entry, takes them")
    if _is_language_model(suggestion):
        _choose_for_language_model(suggestion)
    shares = _choose_splits(suggestion, version)
    input_column = _find_input(suggestion, version)
    if input_column is not None and "transform" not in requested:
        check_input(input_column)
    label = _find_label(suggestion, version, input_column)
    task = _choose_task(suggestion, label)
    steps = _label_steps(suggestion, label, task)
    columns: list[str] = []
    several = frozenset(requested.get("input_columns", ()))  # of a model whose transform is the caller's, too
    if input_column is None and "transform" not in requested and not several:
        more, columns = feature_steps(suggestion, version, label, MAX_STEPS - len(steps) - 1)
        steps += more
    # Count as if all rows without a label were in this split.
    rows = max(version.splits[_source_split(version, suggestion)] - label.nulls - label.nans, MIN_ROWS_PER_RANK)
    rows = round(rows * shares["train"] / sum(shares.values())) if shares else rows
    if steps or shares:
        steps += [{"concat": {"columns": columns, "into": FEATURES}}] if columns else []
        fit = "train" if shares else suggestion.spec["train_split"]
        suggestion.preparation = Preparation(version.name, steps, shares, SPLIT_SEED, fit)
    elif columns:
        suggestion.spec["transform"] = {"steps": [{"concat": {"columns": columns, "into": FEATURES}}]}
        suggestion.note("transform", f"concat into {FEATURES}", "No column needs more: all are numbers on one scale.")
    inputs = [one for one in version.columns if one is input_column or one.name in several]
    is_image = any(column.is_image or column.kind == BYTES or len(column.shape) == 3 for column in inputs)
    width = partial(_width, suggestion, version, input_column, columns, shape_made)
    if suggestion.preparation is None:
        if not several:
            choose_model_input(suggestion, input_column, rows, width)
        choose_outputs(suggestion, label, task)
    if not _is_own(suggestion):
        choose_model(suggestion, is_image, width)
    choose_training(suggestion, task, rows, is_image, is_own=_is_own(suggestion))
    return suggestion


def _is_language_model(suggestion: Suggestion) -> bool:
    return bool(suggestion.spec.get("model", {}).get("builder") == CAUSAL_LM)


def _choose_for_language_model(suggestion: Suggestion) -> None:
    """Choose what a causal language model alone has: its labels are its own tokens."""
    why = "A causal language model predicts the tokens of its input."
    suggestion.choose("label_column", IDS_COLUMN, why)
    suggestion.choose("task", f"TASK_{REGRESSION}", "It gives a number for each token.")
    suggestion.choose("target_scaling", f"TARGET_SCALING_{NONE}", "Ids of tokens have no scale.")
    suggestion.choose("loss.name", NEXT_TOKEN, why)
    suggestion.choose("metrics", [PERPLEXITY], "It is exp of the mean surprise of a token.", PERPLEXITY)


def _width(
    suggestion: Suggestion,
    version: VersionFacts,
    input_column: ColumnFacts | None,
    columns: Sequence[str],
    shape_made: Callable[[str], tuple[int, ...]],
) -> int:
    """Return the width of the model's input vector. Before a preparation it is an estimate from statistics."""
    if columns:
        return expected_width(version, columns)
    if input_column is None or "transform" in suggestion.spec:
        return shape_made(suggestion.spec["input_column"])[0]
    return input_column.shape[0]


def _source_split(version: VersionFacts, suggestion: Suggestion) -> str:
    """Return the split that has the training rows now. A split that is still to be made has none."""
    train = suggestion.spec["train_split"]
    return train if train in version.splits else next(iter(version.splits))


def _choose_splits(suggestion: Suggestion, version: VersionFacts) -> dict[str, float]:
    """Return the shares of the splits to make. The result is empty if the version's own splits suffice."""
    splits, spec = version.splits, suggestion.spec
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
        suggestion.choose("train_split", train, _why_train(train, splits))
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
        suggestion.choose("train_split", train, _why_train(train, splits))
        suggestion.choose("validation_split", other, reason)
        return {}
    if splits[train] < MIN_ROWS_TO_DIVIDE or version.size_bytes > MAX_BYTES_TO_DIVIDE:
        few = splits[train] < MIN_ROWS_TO_DIVIDE
        why = (
            f"{splits[train]} rows are too few to divide" if few else "the version is over 10 GiB, and would be copied"
        )
        suggestion.choose("train_split", train, _why_train(train, splits))
        suggestion.note(
            "validation_split", "none", f"The version has none, and {why}. The newest checkpoint counts as best."
        )
        return {}
    shares = {"train": 0.8, "validation": 0.2} if splits[train] < 10_000 else {"train": 0.9, "validation": 0.1}
    spec["train_split"] = "train"
    spec["validation_split"] = "validation"
    value = ", ".join(f"{split} {share:.0%}" for split, share in shares.items())
    why = "The version has one split, and validation needs rows that training does not see; they are drawn at random."
    suggestion.note("preparation.splits", value, why)
    return shares


def _why_train(train: str, splits: Mapping[str, int]) -> str:
    return f"The version has it, with {splits[train]:,} rows."


def _find_input(suggestion: Suggestion, version: VersionFacts) -> ColumnFacts | None:
    """Return the model's input column, an image or a vector.

    Return None if the caller names several columns, or if those of a table must be combined.
    """
    spec = suggestion.spec
    if spec.get("input_columns"):
        return None
    path = "spec.input_column"
    steps = spec.get("transform", {}).get("steps", ())
    into = [step["concat"]["into"] for step in steps if "concat" in step]
    if "input_column" in spec or into:
        suggestion.choose("input_column", into[-1] if into else "", "A concat step of the transform makes it.")
        name = spec["input_column"]
        return None if name in into else version.column(name, path)
    ready = [column for column in version.columns if column.name == FEATURES and _is_vector(column)]
    images = ready or [one for one in version.columns if one.is_image]
    images = images or [one for one in version.columns if one.kind == TENSOR and len(one.shape) == 3]
    if not images:
        encoded = [one for one in version.columns if one.kind == BYTES and not one.empty]
        images = [one for one in encoded if one.name.lower() in IMAGE_NAMES] or encoded
    if len(images) > 1:
        named = [image for image in images if image.name.lower() in IMAGE_NAMES]
        if len(named) != 1:
            remedy = f"{names_shown([one.name for one in images])} may be it; set it to one of them (--input-column)"
            raise invalid_field(path, "", remedy)
        images = named
    if not images:
        suggestion.choose(
            "input_column", FEATURES, "The version is a table: its columns are put together into one vector."
        )
        return None
    (one,) = images
    what = "vectors" if _is_vector(one) else "encoded images" if one.kind == BYTES else "images"
    suggestion.choose("input_column", one.name, f"It is the version's column of {what}.")
    return one


def _is_vector(column_facts: ColumnFacts) -> bool:
    return column_facts.kind == TENSOR and column_facts.dtype == "float32" and len(column_facts.shape) == 1


def _find_label(suggestion: Suggestion, version: VersionFacts, input_column: ColumnFacts | None) -> ColumnFacts:
    path = "spec.label_column"
    if _is_language_model(suggestion):  # tokens need no statistics: neither task nor classes follow from them
        return version.column(suggestion.spec["label_column"], path)
    if "label_column" in suggestion.spec:
        return _usable_label(version.column(suggestion.spec["label_column"], path), version)
    inputs = {*suggestion.spec.get("input_columns", ()), input_column and input_column.name}
    usable = [one for one in version.columns if one.kind not in (BYTES, TIME, OTHER, TENSOR) and not one.empty]
    there = [one for one in usable if one.name not in inputs]
    for names in LABEL_NAMES:
        found = [one for one in there if one.name.lower() in names]
        if found:
            why = "Its name says that it is to be predicted."
            break
    else:
        found = [one for one in there if one.value_names]
        why = "It is the only column whose values have names."
        if not found:
            found = [one for one in there if _may_be_classes(one)]
            why = "It is the only column of a few different values."
    if len(found) == 1:
        suggestion.choose("label_column", found[0].name, why)
        return _usable_label(found[0], version)
    candidates = found or there
    if not candidates:
        raise invalid_field(path, "", f"no column of {version.name} can be predicted; import one")
    what = "may be it" if found else "are there, and none has a name or values that say so"
    remedy = (
        f"{names_shown([candidate.name for candidate in candidates])} {what}; set it to one of them (--label-column)"
    )
    raise invalid_field(path, "", remedy)


def _may_be_classes(column_facts: ColumnFacts) -> bool:
    few = 2 <= column_facts.distinct <= MAX_CLASSES_OF_INTEGERS and column_facts.rows >= 2 * column_facts.distinct
    return column_facts.kind in (TEXT, BOOLEAN, INTEGER) and few


def _usable_label(column_facts: ColumnFacts, version: VersionFacts) -> ColumnFacts:
    path = "spec.label_column"
    if not column_facts.known and not column_facts.value_names:
        raise FailedPrecondition(
            f"{version.name} has no statistics of column {column_facts.name!r}, which the choice of a task needs; "
            "import it "
            "anew, or write the specification by hand",
            reason="NO_STATISTICS",
            metadata={"resource": version.name, "column": column_facts.name},
        )
    if column_facts.empty:
        raise invalid_field(path, column_facts.name, "it has no value in any row; choose another (--label-column)")
    return column_facts


def _is_own(suggestion: Suggestion) -> bool:
    """Return whether the caller gave their own model. Such a model may bring its own loss and optimizer."""
    return bool(suggestion.spec.get("model", {}).get("entry"))


def _choose_task(suggestion: Suggestion, label: ColumnFacts) -> str:
    if "task" in suggestion.spec:
        return str(suggestion.spec["task"]).removeprefix("TASK_")
    task, why = CLASSIFICATION, f"{label.name!r} has {max(label.distinct, len(label.value_names))} different values."
    if label.kind == TENSOR:
        task, why = REGRESSION, f"{label.name!r} is a vector of numbers."
    elif label.kind == NUMBER and not (label.whole and label.distinct <= MAX_CLASSES_OF_INTEGERS):
        task, why = REGRESSION, f"{label.name!r} is a number of many values, a quantity."
    elif label.kind == INTEGER and not label.value_names and not _counts_from_0(label):
        few = label.distinct <= MAX_CLASSES_OF_INTEGERS
        task, why = (task, why) if few else (REGRESSION, f"{label.name!r} has {label.distinct:,} different numbers.")
    suggestion.choose("task", f"TASK_{task}", why)
    return task


def _counts_from_0(label: ColumnFacts) -> bool:
    """Return whether the integers are 0, 1, …. Classes have such integers."""
    many_rows = label.rows >= 10 * label.distinct
    return label.least == 0 and label.most == label.distinct - 1 and (many_rows or label.distinct <= 2)


def _label_steps(suggestion: Suggestion, label: ColumnFacts, task: str) -> list[dict[str, Any]]:
    """Return the steps that the label needs. A run can use the label after these steps."""
    path = "spec.label_column"
    steps: list[dict[str, Any]] = []
    if label.kind in (BYTES, TIME, OTHER) or (label.kind == TEXT and task == REGRESSION):
        raise invalid_field(path, label.name, f"it is of a type ({label.kind}) that cannot be learnt; choose another")
    if label.nulls or label.nans:
        column = f"col({json.dumps(label.name, ensure_ascii=False)})"
        kept = f"{column} is not None" + (f" and not is_nan({column})" if label.nans else "")
        steps.append({"filter": {"expression": kept}})
        count = label.nulls + label.nans
        suggestion.note("preparation.transform", "filter", f"{count:,} rows have no {label.name!r} to learn from.")
    if task == REGRESSION:
        if label.kind == BOOLEAN:
            raise invalid_field(path, label.name, "it is a boolean, which has no scale; use TASK_CLASSIFICATION")
        if not _is_own(suggestion):
            suggestion.choose(
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
    suggestion.note(
        "preparation.transform", f"ordinal_encode {label.name}", "Classes are numbers from 0 up; names are kept."
    )
    return steps


def _category_texts(label: ColumnFacts) -> list[str]:
    """Return the label's values as texts.

    They are those of all splits, in the order of their type. With all splits, a class that the training rows lack
    causes no error later. If the values are not all known, the list is empty, and the step learns them.
    """
    if label.values is None:
        return []
    if label.kind == TEXT:
        return sorted(map(str, label.values), key=str.encode)
    if label.kind == BOOLEAN:
        return [str(one).lower() for one in sorted(label.values)]
    return [str(int(value)) for value in sorted(label.values)]


# --- Columns of a table ---

ID_NAMES = ("id", "uuid", "guid", "index", "key", "row", "rowid", "row_id")
MAX_CATEGORIES = 50
# Of one transform, as shared.transforms counts steps.
MAX_STEPS = 256
# Learning a median counts every distinct value.
MAX_DISTINCT_OF_MEDIAN = 4_000_000


@dataclass(frozen=True)
class _Feature:
    """The treatment of a column.

    It has steps that make numbers of the column, or in `left_out` the reason for leaving it out.
    """

    steps: Sequence[Mapping[str, Any]] = ()
    treatment: str = ""
    left_out: str = ""


def feature_steps(
    suggestion: Suggestion, version: VersionFacts, label: ColumnFacts, most: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the steps and columns of the features. The steps, at most `most`, make these columns numeric."""
    steps: list[dict[str, Any]] = []
    used: dict[str, list[str]] = {}
    left_out: dict[str, list[str]] = {}
    for column in version.columns:
        if column.name == label.name:
            continue
        feature = _feature(column)
        if not feature.left_out and len(steps) + len(feature.steps) > most:
            feature = _Feature(left_out=f"a transform has at most {MAX_STEPS} steps; prepare more of them by hand")
        if feature.left_out:
            left_out.setdefault(feature.left_out, []).append(column.name)
        else:
            steps += [dict(step) for step in feature.steps]
            used.setdefault(feature.treatment, []).append(column.name)
    kept = {name for names in used.values() for name in names}
    if not kept:
        reasons = (
            "; ".join(f"{names_shown(names)}: {why}" for why, names in left_out.items()) or "it has no other column"
        )
        raise invalid_field("spec.dataset_version", version.name, f"no column is left to learn from: {reasons}")
    for treatment, names in used.items():
        suggestion.note("preparation.transform", names_shown(names), treatment)
    for why, names in left_out.items():
        suggestion.note("preparation.transform", f"without {names_shown(names)}", f"Left out: {why}.")
    return steps, [one.name for one in version.columns if one.name in kept]


def _feature(column_facts: ColumnFacts) -> _Feature:
    """Return the treatment of a table's column. The first rule that applies decides."""
    column = column_facts.name
    there = column_facts.rows - column_facts.nulls
    unique = column_facts.distinct >= 0.95 * there and there >= 20
    sequence = (
        column_facts.least is not None
        and column_facts.most is not None
        and column_facts.most - column_facts.least + 1 == column_facts.distinct
    )
    an_id = column.lower() in ID_NAMES or column.lower().endswith(("_id", "-id"))
    if not column_facts.known:
        return _Feature(left_out="the version has no statistics of it")
    if column_facts.empty:
        return _Feature(left_out="it has no value in any row")
    if column_facts.kind == TIME:
        return _Feature(left_out="it is a date or a time; cast it to int64 first where it carries a trend")
    if column_facts.kind in (BYTES, OTHER):
        return _Feature(left_out="its type has no place in a vector; cast it to double first where it is a number")
    if column_facts.kind == TENSOR and (column_facts.nans or column_facts.infinite):
        return _Feature(left_out="it has NaN or infinite values")
    if column_facts.kind == TENSOR:
        return _Feature((), "They are vectors already, and are taken as they are.")
    if column_facts.distinct < 2:
        return _Feature(left_out="it has the same value in all rows")
    if column_facts.kind == TEXT and unique:
        return _Feature(left_out="nearly each row has its own value, as identifiers and free texts do")
    if column_facts.kind == INTEGER and there >= 20 and column_facts.distinct == there and (sequence or an_id):
        return _Feature(left_out="nearly each row has its own value, as identifiers and free texts do")
    if column_facts.kind == TEXT and column_facts.distinct > MAX_CATEGORIES:
        return _Feature(left_out=f"it has more than {MAX_CATEGORIES} categories")
    if column_facts.kind == TEXT or (column_facts.kind == BOOLEAN and column_facts.nulls):
        encoded = {"column": column, "one_hot_encode": {"unknown": "UNKNOWN_VALUE_ENCODE"}}
        return _Feature((encoded,), "Categories become one-hot vectors; a null or an unseen one is all zeros.")
    if column_facts.kind == BOOLEAN:
        return _Feature((), "Booleans are 0 and 1.")
    if column_facts.nans or column_facts.infinite:
        return _Feature(left_out="it has NaN or infinite values; import it with nan_as_null, or filter them out")
    return _scaled(column_facts)


def _scaled(column_facts: ColumnFacts) -> _Feature:
    scale = {"column": column_facts.name, "standardize": {}}
    if column_facts.nulls and column_facts.distinct > MAX_DISTINCT_OF_MEDIAN:
        if column_facts.kind == INTEGER:
            return _Feature(left_out="it has nulls, and too many different integers to learn a median of")
        fill: dict[str, Any] = {"column": column_facts.name, "fill_nulls": {"statistic": "STATISTIC_MEAN"}}
        return _Feature((fill, scale), "Nulls become the mean; numbers are standardised.")
    if column_facts.nulls:
        fill = {"column": column_facts.name, "fill_nulls": {"statistic": "STATISTIC_MEDIAN"}}
        return _Feature((fill, scale), "Nulls become the median; numbers are standardised.")
    on_scale = (
        column_facts.mean is not None
        and column_facts.deviation is not None
        and abs(column_facts.mean) <= 0.5
        and 0.5 <= column_facts.deviation <= 2
    )
    if on_scale:
        return _Feature((), "Their mean and deviation are near 0 and 1 already.")
    return _Feature((scale,), "Numbers are standardised, so that none outweighs the others.")


# --- Model and training ---

MLP, RESNET = "mlp", "torchvision.resnet18"
# (applies below this number of training rows, value)
BATCH_BY_ROWS = ((500, 16), (5_000, 32), (50_000, 64), (math.inf, 128))
HIDDEN_BY_WIDTH = ((33, [64, 32]), (257, [128, 64]), (math.inf, [256, 128]))
SIDE_BY_ROWS = ((2_000, 64), (20_000, 128), (math.inf, 224))
LARGEST_SIDE = 256
# (rows to process in total, fewest epochs, most epochs)
EPOCHS_OF_IMAGES, EPOCHS_OF_TABLES = (24_000, 3, 40), (100_000, 5, 100)
LEARNING_RATE_OF_IMAGES, LEARNING_RATE_OF_TABLES = 0.002, 0.003
# Statistics of ImageNet's pixels, which photos resemble.
PHOTO_MEAN, PHOTO_DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def check_input(input_column: ColumnFacts) -> None:
    """Raise `InvalidArgument` for an unreadable input column.

    No model can read the column, neither as it is nor as an image.
    """
    tensor = input_column.kind == TENSOR and input_column.dtype == "float32" and len(input_column.shape) in (1, 3)
    if not (tensor or input_column.is_image or input_column.kind == BYTES):
        remedy = "it is neither an image nor a float32 tensor; choose another, or give a transform that makes one of it"
        raise invalid_field("spec.input_column", input_column.name, remedy)


def choose_model_input(
    suggestion: Suggestion, input_column: ColumnFacts | None, rows: int, width: Callable[[], int]
) -> None:
    """Choose the transform that runs in training. The channels or the `width` that it produces are chosen, too."""
    if input_column is None or suggestion.spec.get("transform", {}).get("steps"):
        suggestion.choose("model.in_channels", width(), "It is what the transform makes.")
    elif input_column.kind == BYTES:
        _photo_transform(suggestion, by_rows(SIDE_BY_ROWS, rows))
    elif input_column.is_image:
        _pixel_transform(suggestion, input_column, rows)
    else:
        what = "width" if len(input_column.shape) == 1 else "number of channels"
        suggestion.choose("model.in_channels", input_column.shape[0], f"It is the {what} of {input_column.name!r}.")


def _photo_transform(suggestion: Suggestion, side: int) -> None:
    steps: list[dict[str, Any]] = [
        {"decode_image": {"mode": "MODE_RGB"}},
        {"resize": {"height": side, "width": side}},
        {"random_flip": {"horizontal_probability": 0.5}},
        {"to_float": {}},
        {"normalize": {"mean": PHOTO_MEAN, "std": PHOTO_DEVIATION}},
    ]
    why = (
        f"Images of many sizes are decoded and brought to {side} by {side}, which suits the number of rows; mirrored "
        "ones help where there are few. Encoded images have no statistics of pixels, so ImageNet's are taken."
    )
    suggestion.choose("transform", {"steps": steps}, why, " → ".join(next(iter(step)) for step in steps))
    suggestion.choose("model.in_channels", 3, "Images are decoded to red, green and blue.")


def _pixel_transform(suggestion: Suggestion, input_column: ColumnFacts, rows: int) -> None:
    steps: list[dict[str, Any]] = []
    side = by_rows(SIDE_BY_ROWS, rows)
    reason = "Pixels become numbers from 0 to 1."
    if max(input_column.shape[:2]) > LARGEST_SIDE:
        steps.append({"resize": {"height": side, "width": side}})
        height, width = input_column.shape[:2]
        reason += f" {height} by {width} is larger than this many rows need: {side} by {side} is faster."
    steps.append({"to_float": {}})
    if input_column.mean is not None and input_column.deviation:
        mean, deviation = round(input_column.mean / 255, 4), max(round(input_column.deviation / 255, 4), 0.0001)
        steps.append({"normalize": {"mean": [mean], "std": [deviation]}})
        reason += f" {mean:g} and {deviation:g} are the training split's own mean and deviation."
    suggestion.choose("transform", {"steps": steps}, reason, " → ".join(next(iter(step)) for step in steps))
    channels = input_column.shape[2] if len(input_column.shape) == 3 else 1
    suggestion.choose("model.in_channels", channels, f"{input_column.name!r} has images of {_by(input_column.shape)}.")


def _by(shape: Sequence[int]) -> str:
    return " by ".join(map(str, shape))


def choose_outputs(suggestion: Suggestion, label: ColumnFacts, task: str) -> None:
    if task == REGRESSION:
        outputs = label.shape[0] if label.shape else 1
        suggestion.choose("model.num_classes", outputs, "The model gives one number for each that is to be learnt.")
        return
    count = len(label.value_names) or label.distinct
    names = label.value_names or (label.values or ())
    reason = f"{label.name!r} has so many classes."
    suggestion.choose(
        "model.num_classes", count, reason, f"{count} ({names_shown(list(map(str, names)))})" if names else ""
    )


def choose_model(suggestion: Suggestion, is_image: bool, width: Callable[[], int]) -> None:
    if is_image:
        suggestion.choose("model.builder", RESNET, "It is small, and learns images of most sizes from scratch.")
        return
    suggestion.choose("model.builder", MLP, "Rows are vectors, which a multi-layer perceptron reads.")
    if suggestion.spec["model"]["builder"] == MLP:
        numbers = suggestion.spec["model"].get("in_channels") or width()
        hidden = by_rows(HIDDEN_BY_WIDTH, numbers)
        about = "about " if suggestion.preparation is not None else ""
        why = f"Two hidden layers are enough for an input of {about}{numbers:,} numbers."
        suggestion.choose("model.kwargs", {"hidden": hidden}, why, f"hidden={hidden}")


def expected_width(version: VersionFacts, columns: Sequence[str]) -> int:
    """Return the expected width of the input vector.

    These columns of a table become the vector. It is an estimate until the values in the training rows are known.
    """
    wanted = frozenset(columns)
    return sum(_numbers(column) for column in version.columns if column.name in wanted)


def _numbers(column_facts: ColumnFacts) -> int:
    if column_facts.kind == TENSOR:
        return math.prod(column_facts.shape)
    return (
        column_facts.distinct
        if column_facts.kind == TEXT or (column_facts.kind == BOOLEAN and column_facts.nulls)
        else 1
    )


def choose_training(suggestion: Suggestion, task: str, rows: int, is_image: bool, *, is_own: bool = False) -> None:
    """Choose the training settings. If the model `is_own`, skip those that its code may supply."""
    spec = suggestion.spec
    if not is_own:
        _choose_optimizer(suggestion, is_image)
    to_see, fewest, most = EPOCHS_OF_IMAGES if is_image else EPOCHS_OF_TABLES
    epochs = min(max(math.ceil(to_see / max(rows, 1)), fewest), most)
    suggestion.choose("epochs", epochs, f"{rows:,} training rows are seen {epochs} times.")
    suggestion.choose("global_batch_size", _batch_size(spec, rows), f"It suits {rows:,} training rows.")
    if task == REGRESSION and not is_own:
        suggestion.choose(
            "metrics", ["mae", "rmse", "r2"], "They are in the target's own unit, but for r2.", "mae, rmse, r2"
        )
    suggestion.choose("checkpoints.keep_newest", 2, "Besides the best one; all others would only take room.")
    suggestion.choose("num_workers", 1, "One worker needs the least room; more are faster where the cluster has them.")
    patience = max(5, int(spec["epochs"]) // 4)
    if "early_stopping" in spec and not spec["early_stopping"]:
        if suggestion.preparation is None:
            del spec["early_stopping"]
    elif "early_stopping" in spec or (not is_own and spec.get("validation_split") and int(spec["epochs"]) > patience):
        suggestion.choose(
            "early_stopping.patience", patience, "The run ends where validation gets no better for so many epochs."
        )


def _choose_optimizer(suggestion: Suggestion, is_image: bool) -> None:
    rate = LEARNING_RATE_OF_IMAGES if is_image else LEARNING_RATE_OF_TABLES
    suggestion.choose("optimizer.name", "AdamW", "It works without much tuning.")
    suggestion.choose(
        "optimizer.learning_rate", rate, f"It is usual for {'images' if is_image else 'tables'} from scratch."
    )
    if "scheduler" not in suggestion.spec["optimizer"]:
        why = "The rate warms up and then falls to 0, which ends a run of known length well."
        suggestion.choose("optimizer.schedule", "SCHEDULE_COSINE_WITH_WARMUP", why)


def _batch_size(spec: Mapping[str, Any], rows: int) -> int:
    """Return the batch size for `rows` rows. It is large enough that each worker has rows in each step."""
    size = min(int(by_rows(BATCH_BY_ROWS, rows)), rows)
    workers = max(int(spec.get("num_workers", 1)), 1)
    lanes = int(spec.get("lanes", 0)) or default_lanes(workers)
    least = MIN_ROWS_PER_RANK * int(spec.get("accumulation_steps", 1))
    while size < rows and not _each_has_rows(rows, size, lanes, workers, least):
        size = min(2 * size, rows)
    return size


def _each_has_rows(rows: int, size: int, lanes: int, workers: int, least: int) -> bool:
    shapes = shapes_of_steps(rows, steps_per_epoch(rows, size), lanes)
    return all(min_rows_of_a_rank(shapes, lanes, world) >= least for world in range(1, workers + 1))


def by_rows(table: Sequence[tuple[float, Any]], count: int) -> Any:
    """Return the value for a count. It is that of the first line whose bound is above `count`."""
    return next(value for bound, value in table if count < bound)


# --- Suggestion ---


@dataclass(frozen=True)
class Choice:
    field: str
    value: str
    reason: str


@dataclass(frozen=True)
class Preparation:
    """Arguments of TransformVersion. `steps` is JSON of the transform's steps. `shares` are weights of a RatioSplit."""

    source: str
    steps: Sequence[Mapping[str, Any]]
    shares: Mapping[str, float]
    seed: int
    fit_split: str

    @property
    def request_id(self) -> str:
        """Return a UUID4-like id of the preparation. Equal preparations have equal ids."""
        body = [self.source, self.steps, self.shares, self.seed, self.fit_split]
        digest = sha256(json.dumps(body, sort_keys=True).encode()).digest()
        return str(uuid.UUID(bytes=digest[:16], version=4))


@dataclass
class Suggestion:
    spec: dict[str, Any]
    choices: list[Choice] = field(default_factory=list)
    preparation: Preparation | None = None

    def choose(self, path: str, value: Any, reason: str, shown: str = "") -> None:
        """Set a field unless the caller gave it. The field is at most one message deep."""
        outer, _, inner = path.rpartition(".")
        message = self.spec.setdefault(outer, {}) if outer else self.spec
        if inner not in message:
            message[inner] = value
            self.choices.append(Choice(path, shown or str(value), reason))

    def note(self, path: str, value: str, reason: str) -> None:
        self.choices.append(Choice(path, value, reason))


# --- Facts of a version ---

# Kinds of columns.
NUMBER, INTEGER, BOOLEAN, TEXT = "number", "integer", "boolean", "text"
BYTES, TIME, TENSOR, OTHER = "bytes", "time", "tensor", "other"
# Statistics keep this many values of a column.
MAX_VALUES = 100
MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """The facts of one column.

    The schema and the statistics provide them, over all splits. `known` means that the column has statistics. `values`
    are all distinct values, or None if there are too many. `mean` and `deviation` are those of the training split.
    """

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    value_names: tuple[str, ...] = ()
    known: bool = True
    rows: int = 0
    nulls: int = 0
    nans: int = 0
    infinite: bool = False
    distinct: int = 0
    values: tuple[Any, ...] | None = None
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    deviation: float | None = None

    @property
    def empty(self) -> bool:
        return self.known and self.rows > 0 and self.nulls + self.nans >= self.rows

    @property
    def is_image(self) -> bool:
        """Return whether the column is uint8 (H, W[, C])."""
        of_image = len(self.shape) == 2 or (len(self.shape) == 3 and self.shape[2] in (1, 3, 4))
        return self.kind == TENSOR and self.dtype == "uint8" and of_image

    @property
    def whole(self) -> bool:
        """Return whether all distinct values are whole numbers. They must all be known."""
        return self.values is not None and all(float(value).is_integer() for value in self.values)


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """The facts of a version. `splits` has the number of rows of each split."""

    name: str
    columns: Sequence[ColumnFacts]
    splits: Mapping[str, int]
    size_bytes: int = 0

    def column(self, name: str, path: str) -> ColumnFacts:
        """Return the column of that name. Raises `InvalidArgument` if there is none."""
        for one in self.columns:
            if one.name == name:
                return one
        raise invalid_field(path, name, f"{self.name} has {names_shown([one.name for one in self.columns])}")


def names_shown(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the first names, and count the others."""
    shown = list(names)[:MAX_NAMES_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")
