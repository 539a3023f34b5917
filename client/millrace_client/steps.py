"""Functions that make a transform's steps. `transform_version` and training take a list of them.

from millrace_client import steps

prepared = [steps.fill_nulls("age", statistic="median"), steps.standardize("age"), steps.one_hot_encode("island")]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.common.v1 import transform_pb2 as pb

Step = pb.TransformStep
Value = int | float | str | bool


def scalar(value: Value) -> pb.Scalar:
    """Convert a value by its Python type."""
    if isinstance(value, bool):
        return pb.Scalar(boolean=value)
    if isinstance(value, int):
        return pb.Scalar(integer=value)
    return pb.Scalar(number=value) if isinstance(value, float) else pb.Scalar(text=value)


def select(*columns: str) -> Step:
    """Keep these columns, in this order."""
    return Step(select=pb.Select(columns=columns))


def drop(*columns: str) -> Step:
    """Remove these columns."""
    return Step(drop=pb.Drop(columns=columns))


def rename(columns: Mapping[str, str]) -> Step:
    """Rename columns: old name to new name."""
    return Step(rename=pb.Rename(columns=columns))


def cast(column: str, arrow_type: str) -> Step:
    """Cast to another scalar type in Arrow's own spelling, e.g. `int64`, `double`, `timestamp[us]`."""
    return Step(column=column, cast=pb.Cast(arrow_type=arrow_type))


def filter_rows(expression: str) -> Step:
    """Keep the rows for which it is true, e.g. `distance > 0 and payment in ['cash', 'card']`."""
    return Step(filter=pb.Filter(expression=expression))


def fill_nulls(column: str, value: Value | None = None, *, statistic: str = "") -> Step:
    """Fill with a value, or with a statistic of the training split: `mean`, `median` or `mode`."""
    if (value is None) == (not statistic):
        raise ValueError("give a value or a statistic ('mean', 'median', 'mode'), one of both")
    if value is not None:
        return Step(column=column, fill_nulls=pb.FillNulls(value=scalar(value)))
    return Step(column=column, fill_nulls=pb.FillNulls(statistic=f"STATISTIC_{statistic.upper()}"))


def standardize(column: str) -> Step:
    """Compute (x - mean) / deviation, learned on the training split."""
    return Step(column=column, standardize=pb.Standardize())


def min_max_scale(column: str, *, clip: bool = False) -> Step:
    """Compute (x - min) / (max - min), learned on the training split; `clip` keeps later values within 0..1."""
    return Step(column=column, min_max_scale=pb.MinMaxScale(clip=clip))


def ordinal_encode(column: str, *, unknown_as_minus_one: bool = False, categories: Sequence[str] = ()) -> Step:
    """Encode values as their index among the categories, which are learned unless given."""
    return Step(
        column=column, ordinal_encode=pb.OrdinalEncode(categories=categories, unknown=_unknown(unknown_as_minus_one))
    )


def one_hot_encode(column: str, *, unknown_as_zeros: bool = False, categories: Sequence[str] = ()) -> Step:
    """Encode values as a vector of zeros and one 1; the categories are learned unless given."""
    return Step(
        column=column, one_hot_encode=pb.OneHotEncode(categories=categories, unknown=_unknown(unknown_as_zeros))
    )


def bucketize(column: str, boundaries: Sequence[float]) -> Step:
    """Replace numbers by the count of boundaries at or below them."""
    return Step(column=column, bucketize=pb.Bucketize(boundaries=boundaries))


def concat(columns: Sequence[str], into: str, *, keep: bool = False) -> Step:
    """Join numeric columns and tensors into one float32 tensor; they are removed unless `keep` is set."""
    return Step(concat=pb.Concat(columns=columns, into=into, keep=keep))


def decode_image(column: str, *, gray: bool = False) -> Step:
    """Decode JPEG, PNG, … bytes to uint8 pixels (H, W, 3), or (H, W, 1)."""
    mode = pb.DecodeImage.MODE_GRAY if gray else pb.DecodeImage.MODE_RGB
    return Step(column=column, decode_image=pb.DecodeImage(mode=mode))


def resize(column: str, height: int, width: int) -> Step:
    """Resize to this size in pixels."""
    return Step(column=column, resize=pb.Resize(height=height, width=width))


def resize_shorter_side(column: str, pixels: int) -> Step:
    """Resize the shorter side to this size; the other keeps the aspect ratio. A crop must follow."""
    return Step(column=column, resize=pb.Resize(height=pixels, shorter_side_only=True))


def center_crop(column: str, height: int, width: int) -> Step:
    """Crop the middle, in pixels."""
    return Step(column=column, center_crop=pb.CenterCrop(height=height, width=width))


def grayscale(column: str) -> Step:
    """Convert uint8 (H, W, 3) to (H, W, 1)."""
    return Step(column=column, grayscale=pb.Grayscale())


def to_float(column: str = "") -> Step:
    """Convert uint8 pixels (H, W) or (H, W, C) to float32 0..1 of shape (C, H, W).

    Without a column: the training job's input.
    """
    return Step(column=column, to_float=pb.ToFloat())


def normalize(mean: float | Sequence[float], std: float | Sequence[float], column: str = "") -> Step:
    """Compute (x - mean) / std, with one value for all channels or one per channel."""
    return Step(column=column, normalize=pb.Normalize(mean=_floats(mean), std=_floats(std)))


def random_crop(height: int, width: int, *, padding: int = 0, column: str = "") -> Step:
    """For training: crop at a random position, after `padding` zeros around the image."""
    return Step(column=column, random_crop=pb.RandomCrop(height=height, width=width, padding=padding))


def random_flip(*, horizontal: float = 0.5, vertical: float = 0.0, column: str = "") -> Step:
    """For training: mirror with these probabilities."""
    flip = pb.RandomFlip(horizontal_probability=horizontal, vertical_probability=vertical)
    return Step(column=column, random_flip=flip)


def random_rotation(degrees: float, *, column: str = "") -> Step:
    """For training: rotate by an angle from -degrees to degrees."""
    return Step(column=column, random_rotation=pb.RandomRotation(degrees=degrees))


def color_jitter(*, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, column: str = "") -> Step:
    """For training: change each by a factor from 1 - x to 1 + x."""
    jitter = pb.ColorJitter(brightness=brightness, contrast=contrast, saturation=saturation)
    return Step(column=column, color_jitter=jitter)


def custom(function: str, columns: Sequence[str], *, timeout_s: float = 0.0) -> Step:
    """Call `module:function`, one that the server allows; `timeout_s` 0 means the server's default."""
    return Step(custom=pb.Custom(function=function, columns=columns, timeout_s=timeout_s))


def tokenize(
    column: str,
    max_length: int,
    *,
    vocabulary_size: int = 0,
    tokenizer: str = "",
    lowercase: bool = False,
    ids_column: str = "",
    mask_column: str = "",
) -> Step:
    """Tokenize texts into `input_ids` and `attention_mask`, int64 (max_length).

    It learns a tokenizer of at most `vocabulary_size` tokens, or takes `tokenizer`, the JSON of one of the library
    `tokenizers`.
    """
    if bool(vocabulary_size) == bool(tokenizer):
        raise ValueError("give a vocabulary_size to learn a tokenizer, or a tokenizer, one of both")
    message = pb.Tokenize(
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        max_length=max_length,
        lowercase=lowercase,
        ids_column=ids_column,
        mask_column=mask_column,
    )
    return Step(column=column, tokenize=message)


def _unknown(encode: bool) -> pb.UnknownValue:
    return pb.UNKNOWN_VALUE_ENCODE if encode else pb.UNKNOWN_VALUE_ERROR


def _floats(values: float | Sequence[float]) -> list[float]:
    return [values] if isinstance(values, (int, float)) else list(values)
