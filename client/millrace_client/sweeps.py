"""Short ways to write a sweep.

mc.sweep_spec(
    base,
    {"optimizer.learning_rate": mc.log_uniform(1e-4, 1e-1), "optimizer.name": mc.grid("SGD", "AdamW")},
    num_samples=8,
    asha=mc.asha(),
)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.struct_pb2 import Value

from millrace.train.v1 import resources_pb2, sweep_pb2


def grid(*values: Any) -> sweep_pb2.Domain:
    """Each of these is tried, with each one of the other grids."""
    return sweep_pb2.Domain(grid=_values(values))


def choice(*values: Any) -> sweep_pb2.Domain:
    """One of these is drawn for each trial."""
    return sweep_pb2.Domain(choice=_values(values))


def uniform(low: float, high: float) -> sweep_pb2.Domain:
    return sweep_pb2.Domain(uniform=sweep_pb2.Range(low=low, high=high))


def log_uniform(low: float, high: float) -> sweep_pb2.Domain:
    """Drawn so that its logarithm is even; both above 0."""
    return sweep_pb2.Domain(log_uniform=sweep_pb2.Range(low=low, high=high))


def integers(low: int, high: int) -> sweep_pb2.Domain:
    """Whole numbers, both ends included."""
    return sweep_pb2.Domain(integers=sweep_pb2.IntegerRange(low=low, high=high))


def asha(*, grace_period: int = 0, reduction_factor: float = 0.0, max_t: int = 0) -> sweep_pb2.Asha:
    """Stops the worse trials early; in epochs, and 0 is the server's default."""
    return sweep_pb2.Asha(grace_period=grace_period, reduction_factor=reduction_factor, max_t=max_t)


def sweep_spec(
    base: resources_pb2.TrainingSpec,
    parameters: Mapping[str, sweep_pb2.Domain],
    *,
    num_samples: int | None = None,
    **fields: Any,
) -> sweep_pb2.SweepSpec:
    """A `SweepSpec`; `fields` are further fields of it, e.g. `metric="validation_loss"`, `asha=asha()`."""
    spec = sweep_pb2.SweepSpec(base=base, num_samples=num_samples, **fields)
    for path, domain in parameters.items():
        spec.parameters[path].CopyFrom(domain)
    return spec


def _values(values: tuple[Any, ...]) -> sweep_pb2.Values:
    return sweep_pb2.Values(values=[json_format.ParseDict(value, Value()) for value in values])
