"""The model, its input and how it is trained, by what the rows are and how many there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.errors import invalid_field
from train_service.domain.slices import (
    MIN_ROWS_PER_RANK,
    default_lanes,
    min_rows_of_a_rank,
    shapes_of_steps,
    steps_per_epoch,
)
from train_service.domain.spec import REGRESSION
from train_service.domain.suggestion import Suggestion
from train_service.domain.version_facts import BOOLEAN, BYTES, TENSOR, TEXT, ColumnFacts, VersionFacts, names_shown

MLP, RESNET = "mlp", "torchvision.resnet18"
# (below so many training rows, value)
BATCH_BY_ROWS = ((500, 16), (5_000, 32), (50_000, 64), (math.inf, 128))
HIDDEN_BY_WIDTH = ((33, [64, 32]), (257, [128, 64]), (math.inf, [256, 128]))
SIDE_BY_ROWS = ((2_000, 64), (20_000, 128), (math.inf, 224))
LARGEST_SIDE = 256
# (rows to see in all, fewest epochs, most epochs)
EPOCHS_OF_IMAGES, EPOCHS_OF_TABLES = (24_000, 3, 40), (100_000, 5, 100)
LEARNING_RATE_OF_IMAGES, LEARNING_RATE_OF_TABLES = 0.002, 0.003
# Of ImageNet's pixels, which photos resemble.
PHOTO_MEAN, PHOTO_DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def check_input(source: ColumnFacts) -> None:
    """Raises `InvalidArgument` for a column that no model reads as it is, or as an image."""
    tensor = source.kind == TENSOR and source.dtype == "float32" and len(source.shape) in (1, 3)
    if not (tensor or source.is_image or source.kind == BYTES):
        remedy = "it is neither an image nor a float32 tensor; choose another, or give a transform that makes one of it"
        raise invalid_field("spec.input_column", source.name, remedy)


def choose_model_input(made: Suggestion, source: ColumnFacts | None, rows: int, width: Callable[[], int]) -> None:
    """The transform that runs in training, and the channels or the `width` that it makes."""
    if source is None or made.spec.get("transform", {}).get("steps"):
        made.choose("model.in_channels", width(), "It is what the transform makes.")
    elif source.kind == BYTES:
        _photo_transform(made, by_rows(SIDE_BY_ROWS, rows))
    elif source.is_image:
        _pixel_transform(made, source, rows)
    else:
        what = "width" if len(source.shape) == 1 else "number of channels"
        made.choose("model.in_channels", source.shape[0], f"It is the {what} of {source.name!r}.")


def _photo_transform(made: Suggestion, side: int) -> None:
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
    made.choose("transform", {"steps": steps}, why, " → ".join(next(iter(step)) for step in steps))
    made.choose("model.in_channels", 3, "Images are decoded to red, green and blue.")


def _pixel_transform(made: Suggestion, source: ColumnFacts, rows: int) -> None:
    steps: list[dict[str, Any]] = []
    side = by_rows(SIDE_BY_ROWS, rows)
    reason = "Pixels become numbers from 0 to 1."
    if max(source.shape[:2]) > LARGEST_SIDE:
        steps.append({"resize": {"height": side, "width": side}})
        reason += (
            f" {source.shape[0]} by {source.shape[1]} is larger than this many rows need: {side} by {side} is faster."
        )
    steps.append({"to_float": {}})
    if source.mean is not None and source.deviation:
        mean, deviation = round(source.mean / 255, 4), max(round(source.deviation / 255, 4), 0.0001)
        steps.append({"normalize": {"mean": [mean], "std": [deviation]}})
        reason += f" {mean:g} and {deviation:g} are the training split's own mean and deviation."
    made.choose("transform", {"steps": steps}, reason, " → ".join(next(iter(step)) for step in steps))
    channels = source.shape[2] if len(source.shape) == 3 else 1
    made.choose("model.in_channels", channels, f"{source.name!r} has images of {_by(source.shape)}.")


def _by(shape: Sequence[int]) -> str:
    return " by ".join(map(str, shape))


def choose_outputs(made: Suggestion, label: ColumnFacts, task: str) -> None:
    if task == REGRESSION:
        outputs = label.shape[0] if label.shape else 1
        made.choose("model.num_classes", outputs, "The model gives one number for each that is to be learnt.")
        return
    count = len(label.value_names) or label.distinct
    names = label.value_names or (label.values or ())
    reason = f"{label.name!r} has so many classes."
    made.choose("model.num_classes", count, reason, f"{count} ({names_shown(list(map(str, names)))})" if names else "")


def choose_model(made: Suggestion, is_image: bool, width: Callable[[], int]) -> None:
    if is_image:
        made.choose("model.builder", RESNET, "It is small, and learns images of most sizes from scratch.")
        return
    made.choose("model.builder", MLP, "Rows are vectors, which a multi-layer perceptron reads.")
    if made.spec["model"]["builder"] == MLP:
        numbers = made.spec["model"].get("in_channels") or width()
        hidden = by_rows(HIDDEN_BY_WIDTH, numbers)
        about = "about " if made.preparation is not None else ""
        why = f"Two hidden layers are enough for an input of {about}{numbers:,} numbers."
        made.choose("model.kwargs", {"hidden": hidden}, why, f"hidden={hidden}")


def expected_width(version: VersionFacts, columns: Sequence[str]) -> int:
    """Of what becomes of these columns of a table: before it is known which values are in the training rows."""
    wanted = frozenset(columns)
    return sum(_numbers(one) for one in version.columns if one.name in wanted)


def _numbers(one: ColumnFacts) -> int:
    if one.kind == TENSOR:
        return math.prod(one.shape)
    return one.distinct if one.kind == TEXT or (one.kind == BOOLEAN and one.nulls) else 1


def choose_training(made: Suggestion, task: str, rows: int, is_image: bool, *, is_own: bool = False) -> None:
    """Of a model that `is_own` without what its code may bring itself."""
    spec = made.spec
    if not is_own:
        _choose_optimizer(made, is_image)
    to_see, fewest, most = EPOCHS_OF_IMAGES if is_image else EPOCHS_OF_TABLES
    epochs = min(max(math.ceil(to_see / max(rows, 1)), fewest), most)
    made.choose("epochs", epochs, f"{rows:,} training rows are seen {epochs} times.")
    made.choose("global_batch_size", _batch_size(spec, rows), f"It suits {rows:,} training rows.")
    if task == REGRESSION and not is_own:
        made.choose("metrics", ["mae", "rmse", "r2"], "They are in the target's own unit, but for r2.", "mae, rmse, r2")
    made.choose("checkpoints.keep_newest", 2, "Besides the best one; all others would only take room.")
    made.choose("num_workers", 1, "One worker needs the least room; more are faster where the cluster has them.")
    patience = max(5, int(spec["epochs"]) // 4)
    if "early_stopping" in spec and not spec["early_stopping"]:
        if made.preparation is None:
            del spec["early_stopping"]
    elif "early_stopping" in spec or (not is_own and spec.get("validation_split") and int(spec["epochs"]) > patience):
        made.choose(
            "early_stopping.patience", patience, "The run ends where validation gets no better for so many epochs."
        )


def _choose_optimizer(made: Suggestion, is_image: bool) -> None:
    rate = LEARNING_RATE_OF_IMAGES if is_image else LEARNING_RATE_OF_TABLES
    made.choose("optimizer.name", "AdamW", "It works without much tuning.")
    made.choose("optimizer.learning_rate", rate, f"It is usual for {'images' if is_image else 'tables'} from scratch.")
    if "scheduler" not in made.spec["optimizer"]:
        why = "The rate warms up and then falls to 0, which ends a run of known length well."
        made.choose("optimizer.schedule", "SCHEDULE_COSINE_WITH_WARMUP", why)


def _batch_size(spec: Mapping[str, Any], rows: int) -> int:
    """By the rows, and at least so large that each of the workers has rows in each step."""
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
    """The value of the first line whose bound is above the count."""
    return next(value for bound, value in table if count < bound)
