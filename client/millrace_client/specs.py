"""Short ways to write the messages that requests are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2
from millrace.train.v1 import resources_pb2


def uri(path_or_uri: str | Path) -> str:
    """A URI as it is; a path as `file:///…`, which the server must be able to read."""
    text = str(path_or_uri)
    return text if "://" in text else Path(text).absolute().as_uri()


def idx_source(split: str, images: str | Path, labels: str | Path) -> data_service_pb2.ImportSource:
    """A pair of IDX files, as MNIST has them, for one split."""
    pair = data_service_pb2.IdxSource(images_uri=uri(images), labels_uri=uri(labels))
    return data_service_pb2.ImportSource(split=split, idx=pair)


def parquet_source(split: str, path_or_uri: str | Path) -> data_service_pb2.ImportSource:
    """One Parquet file for one split."""
    return data_service_pb2.ImportSource(split=split, parquet=data_service_pb2.ParquetSource(uri=uri(path_or_uri)))


def hold_out(from_split: str, to_split: str, fraction: float, *, seed: int = 0) -> data_service_pb2.HoldOut:
    """Moves a seeded random share (0..1) of one split into a new one."""
    return data_service_pb2.HoldOut(from_split=from_split, to_split=to_split, fraction=fraction, seed=seed)


def to_float() -> transform_pb2.TransformStep:
    """uint8 pixels (H, W) to float32 0..1 of shape (1, H, W)."""
    return transform_pb2.TransformStep(to_float=transform_pb2.ToFloat())


def normalize(mean: float | Sequence[float], std: float | Sequence[float]) -> transform_pb2.TransformStep:
    """(x - mean) / std; one value for all channels, or one per channel."""
    means = [mean] if isinstance(mean, (int, float)) else list(mean)
    stds = [std] if isinstance(std, (int, float)) else list(std)
    return transform_pb2.TransformStep(normalize=transform_pb2.Normalize(mean=means, std=stds))


def optimizer(name: str, learning_rate: float, *, cosine: bool = False, **kwargs: Any) -> resources_pb2.Optimizer:
    """A class of torch.optim with its arguments; `cosine`: warm-up, then a half cosine to zero."""
    schedule = (
        resources_pb2.Optimizer.SCHEDULE_COSINE_WITH_WARMUP if cosine else resources_pb2.Optimizer.SCHEDULE_CONSTANT
    )
    return resources_pb2.Optimizer(name=name, learning_rate=learning_rate, kwargs=_struct(kwargs), schedule=schedule)


def training_spec(
    dataset_version: str,
    *,
    model: str,
    in_channels: int,
    num_classes: int,
    model_kwargs: Mapping[str, Any] | None = None,
    transform: Sequence[transform_pb2.TransformStep] = (),
    epochs: int,
    global_batch_size: int,
    **fields: Any,
) -> resources_pb2.TrainingSpec:
    """A `TrainingSpec`; `fields` are further fields of it, e.g. `num_workers=2`, `optimizer=…`."""
    return resources_pb2.TrainingSpec(
        dataset_version=dataset_version,
        model=resources_pb2.Model(
            builder=model,
            kwargs=_struct(model_kwargs or {}),
            in_channels=in_channels,
            num_classes=num_classes,
        ),
        transform=transform_pb2.Transform(steps=transform),
        epochs=epochs,
        global_batch_size=global_batch_size,
        **fields,
    )


def _struct(values: Mapping[str, Any]) -> Struct:
    struct = Struct()
    struct.update(dict(values))
    return struct
