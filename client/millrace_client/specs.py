"""Short ways to write the messages that requests are made of: sources, splits, training specifications and sweeps.

mc.sweep_spec(
    base,
    {"optimizer.learning_rate": mc.log_uniform(1e-4, 1e-1), "optimizer.name": mc.grid("SGD", "AdamW")},
    num_samples=8,
    asha=mc.asha(),
)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct, Value

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2
from millrace.data.v1 import resources_pb2 as data_resources_pb2
from millrace.train.v1 import checkpoint_import_pb2, code_bundle_pb2, resources_pb2, sweep_pb2

# --- Specs ---

# Characters that a URI's path may contain, and the wildcards.
_PATH_CHARACTERS = "/-._~!$&'()+,;=:@*?"
_UPLOAD = re.compile(r"datasets/[^/]+/uploads/[^/]+")


def uri(path_or_uri: str | Path) -> str:
    """Return a URI. A path becomes `file:///…`, which the server must be able to read.

    URIs and names of uploads stay unchanged. In a string `*`, `?` and `**` name several files, and a `/` at the end a
    whole folder; a `Path` is one file.
    """
    if isinstance(path_or_uri, Path):
        return Path(_absolute(path_or_uri)).as_uri()
    text = path_or_uri
    if "://" in text or _UPLOAD.fullmatch(text):
        return text
    folder = "/" if text.endswith("/") and text != "/" else ""
    return f"file://{quote(_absolute(text), safe=_PATH_CHARACTERS)}{folder}"


def _absolute(path: str | Path) -> str:
    """Return the absolute path without `..`, which servers refuse. Links are not resolved."""
    return os.path.normpath(Path(path).absolute())


def idx_source(split: str, images: str | Path, labels: str | Path) -> data_service_pb2.ImportSource:
    """Import a pair of IDX files, as MNIST has them, into one split."""
    pair = data_service_pb2.IdxSource(images_uri=uri(images), labels_uri=uri(labels))
    return data_service_pb2.ImportSource(split=split, idx=pair)


def parquet_source(split: str, path_or_uri: str | Path) -> data_service_pb2.ImportSource:
    """Import Parquet files into one split."""
    return data_service_pb2.ImportSource(split=split, parquet=data_service_pb2.ParquetSource(uri=uri(path_or_uri)))


def arrow_source(split: str, path_or_uri: str | Path) -> data_service_pb2.ImportSource:
    """Import Arrow IPC streams or files into one split."""
    return data_service_pb2.ImportSource(split=split, arrow=data_service_pb2.ArrowSource(uri=uri(path_or_uri)))


def csv_source(
    split: str,
    path_or_uri: str | Path,
    *,
    delimiter: str = "",
    column_names: Sequence[str] = (),
    null_values: Sequence[str] = (),
    encoding: str = "",
) -> data_service_pb2.ImportSource:
    """Import CSV files into one split.

    Arguments that are not given have the server's defaults. Give `column_names` for files without a header.
    """
    csv = data_service_pb2.CsvSource(
        uri=uri(path_or_uri),
        delimiter=delimiter,
        column_names=column_names,
        null_values=null_values,
        encoding=encoding,
    )
    return data_service_pb2.ImportSource(split=split, csv=csv)


def json_lines_source(split: str, path_or_uri: str | Path) -> data_service_pb2.ImportSource:
    """Import files of one JSON object per line into one split."""
    lines = data_service_pb2.JsonLinesSource(uri=uri(path_or_uri))
    return data_service_pb2.ImportSource(split=split, json_lines=lines)


def image_folder_source(split: str, path_or_uri: str | Path) -> data_service_pb2.ImportSource:
    """Import a folder with a folder of images for each class into one split."""
    folder = uri(path_or_uri)
    images = data_service_pb2.ImageFolderSource(uri=folder if folder.endswith("/") else f"{folder}/")
    return data_service_pb2.ImportSource(split=split, image_folder=images)


def image_tar_source(split: str, path_or_uri: str | Path) -> data_service_pb2.ImportSource:
    """Import tar files of such a folder into one split."""
    return data_service_pb2.ImportSource(split=split, image_tar=data_service_pb2.ImageTarSource(uri=uri(path_or_uri)))


def quarantine(max_rows: int = 0) -> data_service_pb2.BadRows:
    """Leave bad rows out and quarantine them, up to `max_rows`; 0: any number."""
    return data_service_pb2.BadRows(action=data_service_pb2.BadRows.ACTION_QUARANTINE, max_rows=max_rows)


def append_to(version: str) -> data_service_pb2.Base:
    """Make the new version follow `datasets/{d}/versions/{v}`, with its rows first in each split."""
    return data_service_pb2.Base(version=version, mode=data_service_pb2.Base.MODE_APPEND)


def replacing(version: str) -> data_service_pb2.Base:
    """Make the new version follow `datasets/{d}/versions/{v}`, and keep nothing of it."""
    return data_service_pb2.Base(version=version, mode=data_service_pb2.Base.MODE_REPLACE)


def retention(*, keep_newest: int = 0, max_age_s: float = 0.0) -> data_resources_pb2.Retention:
    """Select versions for automatic deletion; 0: no such rule."""
    message = data_resources_pb2.Retention(keep_newest=keep_newest)
    if max_age_s:
        message.max_age.FromNanoseconds(round(max_age_s * 1e9))
    return message


def hash_split(key_columns: Sequence[str], shares: Mapping[str, float], *, seed: int = 0) -> data_service_pb2.SplitRule:
    """Split by a stable hash of key columns; `shares` maps splits to weights."""
    rule = data_service_pb2.HashSplit(key_columns=key_columns, shares=_shares(shares), seed=seed)
    return data_service_pb2.SplitRule(hash=rule)


def ratio_split(shares: Mapping[str, float], *, seed: int = 0) -> data_service_pb2.SplitRule:
    """Split at random; `shares` maps splits to weights."""
    return data_service_pb2.SplitRule(ratio=data_service_pb2.RatioSplit(shares=_shares(shares), seed=seed))


def column_split(column: str) -> data_service_pb2.SplitRule:
    """Split by the values of a column, which are the splits' names."""
    return data_service_pb2.SplitRule(column=data_service_pb2.ColumnSplit(column=column))


def time_split(column: str, before: Mapping[str, datetime], rest: str) -> data_service_pb2.SplitRule:
    """Split by a date or timestamp column.

    `before` maps splits, in order, to the time before which their rows lie.
    """
    periods = [data_service_pb2.Period(split=split, before=time) for split, time in before.items()]
    rule = data_service_pb2.TimeSplit(column=column, periods=[*periods, data_service_pb2.Period(split=rest)])
    return data_service_pb2.SplitRule(time=rule)


def hold_out(from_split: str, to_split: str, fraction: float, *, seed: int = 0) -> data_service_pb2.HoldOut:
    """Move a seeded random share (0..1) of one split into a new one."""
    return data_service_pb2.HoldOut(from_split=from_split, to_split=to_split, fraction=fraction, seed=seed)


def optimizer(name: str, learning_rate: float, *, cosine: bool = False, **kwargs: Any) -> resources_pb2.Optimizer:
    """Use a class of torch.optim with its arguments; `cosine`: warm-up, then a half cosine to zero."""
    schedule = (
        resources_pb2.Optimizer.SCHEDULE_COSINE_WITH_WARMUP if cosine else resources_pb2.Optimizer.SCHEDULE_CONSTANT
    )
    return resources_pb2.Optimizer(name=name, learning_rate=learning_rate, kwargs=_struct(kwargs), schedule=schedule)


def training_spec(
    dataset_version: str,
    *,
    model: str | resources_pb2.Model,
    in_channels: int = 0,
    num_classes: int = 0,
    model_kwargs: Mapping[str, Any] | None = None,
    transform: Sequence[transform_pb2.TransformStep] = (),
    epochs: int,
    global_batch_size: int,
    **fields: Any,
) -> resources_pb2.TrainingSpec:
    """Make a `TrainingSpec`.

    `fields` are its further fields, e.g. `num_workers=2`, `optimizer=…`. Inputs that are NaN or infinite are refused
    without `allow_non_finite=True`. `model` is the name of a builder, which needs `in_channels` and `num_classes`, or
    an `own_model`.
    """
    return resources_pb2.TrainingSpec(
        dataset_version=dataset_version,
        model=_model(model, in_channels, num_classes, model_kwargs),
        transform=transform_pb2.Transform(steps=transform),
        epochs=epochs,
        global_batch_size=global_batch_size,
        **fields,
    )


def import_spec(
    *,
    model: str | resources_pb2.Model,
    in_channels: int = 0,
    num_classes: int = 0,
    model_kwargs: Mapping[str, Any] | None = None,
    input_shape: Sequence[int] = (),
    input_dtype: str = "",
    transform: Sequence[transform_pb2.TransformStep] = (),
    names: checkpoint_import_pb2.NameMap | None = None,
    **fields: Any,
) -> checkpoint_import_pb2.ImportSpec:
    """Make an `ImportSpec` for weights of `model`, a builder or an `own_model`, as in `training_spec`.

    `input_shape` is the shape of one row of the tensors in requests, `input_dtype` their type (float32); or give
    `dataset_version`. `fields` are further fields, e.g. `task="TASK_REGRESSION"`, `class_names=["cat", "dog"]`.
    """
    spec = checkpoint_import_pb2.ImportSpec(
        model=_model(model, in_channels, num_classes, model_kwargs),
        transform=transform_pb2.Transform(steps=transform),
        names=names,
        **fields,
    )
    if input_shape:
        input_tensor = checkpoint_import_pb2.InputTensor(name=spec.input_column, dtype=input_dtype, shape=input_shape)
        spec.input.CopyFrom(input_tensor)
    return spec


def _model(
    model: str | resources_pb2.Model, in_channels: int, num_classes: int, kwargs: Mapping[str, Any] | None
) -> resources_pb2.Model:
    whole = resources_pb2.Model()
    whole.CopyFrom(resources_pb2.Model(builder=model) if isinstance(model, str) else model)
    given = resources_pb2.Model(in_channels=in_channels, num_classes=num_classes)
    if kwargs:
        given.kwargs.CopyFrom(_struct(kwargs))
    whole.MergeFrom(given)
    return whole


def name_map(
    *,
    key: str = "",
    prefixes: Mapping[str, str] | None = None,
    patterns: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
) -> checkpoint_import_pb2.NameMap:
    """Map names in files to names in a model.

    `prefixes` and then `patterns` map old to new, e.g. `{"module.": ""}`; `drop` and `allow_missing` are regular
    expressions of whole names.
    """
    rename = checkpoint_import_pb2.NameMap.Rename
    renames = [rename(prefix=one, replacement=to) for one, to in (prefixes or {}).items()]
    renames += [rename(pattern=one, replacement=to) for one, to in (patterns or {}).items()]
    return checkpoint_import_pb2.NameMap(key=key, renames=renames, drop=drop, allow_missing=allow_missing)


def own_model(
    bundle: code_bundle_pb2.CodeBundle | str, entry: str, *, config: Mapping[str, Any] | None = None
) -> resources_pb2.Model:
    """Use your own model in `training_spec`.

    `entry` is `module:name` of a function or class in a pushed bundle. A function gets `config` as its one argument, a
    class as keyword arguments.
    """
    return resources_pb2.Model(
        code_bundle=bundle if isinstance(bundle, str) else bundle.name, entry=entry, kwargs=_struct(config or {})
    )


def program_spec(
    bundle: code_bundle_pb2.CodeBundle | str,
    entry: str,
    *,
    config: Mapping[str, Any] | None = None,
    dataset_version: str = "",
    data_resume: str = "REPLAY",
    remainder: str = "DROP",
    **fields: Any,
) -> resources_pb2.TrainingSpec:
    """Make a `TrainingSpec` that runs your own function: `entry` is `module:function` in a pushed bundle.

    `config`, of JSON values, is the function's argument. `fields` are further fields of the specification, e.g.
    `num_workers=2`. Raises `ValueError` for a configuration that JSON cannot hold.
    """
    program = code_bundle_pb2.Program(
        code_bundle=bundle if isinstance(bundle, str) else bundle.name,
        entry=entry,
        config_json=json.dumps(dict(config or {}), allow_nan=False),
        data_resume=f"DATA_RESUME_{data_resume}",
        remainder=f"REMAINDER_{remainder}",
    )
    return resources_pb2.TrainingSpec(dataset_version=dataset_version, program=program, **fields)


def _shares(weights: Mapping[str, float]) -> list[data_service_pb2.Share]:
    return [data_service_pb2.Share(split=split, weight=weight) for split, weight in weights.items()]


def _struct(values: Mapping[str, Any]) -> Struct:
    struct = Struct()
    struct.update(dict(values))
    return struct


# --- Sweeps ---


def grid(*values: Any) -> sweep_pb2.Domain:
    """Try each value, combined with each one of the other grids."""
    return sweep_pb2.Domain(grid=_values(values))


def choice(*values: Any) -> sweep_pb2.Domain:
    """Draw one of these for each trial."""
    return sweep_pb2.Domain(choice=_values(values))


def uniform(low: float, high: float) -> sweep_pb2.Domain:
    return sweep_pb2.Domain(uniform=sweep_pb2.Range(low=low, high=high))


def log_uniform(low: float, high: float) -> sweep_pb2.Domain:
    """Draw so that the logarithm is uniform; both ends are above 0."""
    return sweep_pb2.Domain(log_uniform=sweep_pb2.Range(low=low, high=high))


def integers(low: int, high: int) -> sweep_pb2.Domain:
    """Draw whole numbers, both ends included."""
    return sweep_pb2.Domain(integers=sweep_pb2.IntegerRange(low=low, high=high))


def asha(*, grace_period: int = 0, reduction_factor: float = 0.0, max_t: int = 0) -> sweep_pb2.Asha:
    """Stop the worse trials early. Times are in epochs; 0 is the server's default."""
    return sweep_pb2.Asha(grace_period=grace_period, reduction_factor=reduction_factor, max_t=max_t)


def sweep_spec(
    base: resources_pb2.TrainingSpec,
    parameters: Mapping[str, sweep_pb2.Domain],
    *,
    num_samples: int | None = None,
    **fields: Any,
) -> sweep_pb2.SweepSpec:
    """Make a `SweepSpec`; `fields` are its further fields, e.g. `metric="validation_loss"`, `asha=asha()`."""
    spec = sweep_pb2.SweepSpec(base=base, num_samples=num_samples, **fields)
    for path, domain in parameters.items():
        spec.parameters[path].CopyFrom(domain)
    return spec


def _values(values: tuple[Any, ...]) -> sweep_pb2.Values:
    return sweep_pb2.Values(values=[json_format.ParseDict(value, Value()) for value in values])
