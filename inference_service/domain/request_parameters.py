"""The parameters of a request, of its tensors and of the outputs that it asks for, as far as they mean something here.

What means nothing here is ignored, as Triton does, but for shared memory: its tensors would be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import invalid_field

Parameters = Mapping[str, object]

# 1 is the most urgent. Above the last level is the default's, as in Triton.
PRIORITY_LEVELS = 10
DEFAULT_PRIORITY = 5
SHARED_MEMORY = "shared_memory_region"


@dataclass(frozen=True)
class Wishes:
    """`timeout_s`: in which it must be answered; None: no such wish."""

    priority: int = DEFAULT_PRIORITY
    timeout_s: float | None = None


@dataclass(frozen=True)
class RequestedOutput:
    """`top`: so many of the greatest numbers of each row, as a classification; 0: the output itself."""

    name: str
    top: int = 0


def wishes_of(parameters: Parameters) -> Wishes:
    """Raises `InvalidArgument` naming the parameter."""
    priority = _count("parameters", parameters, "priority", "use 1, the most urgent, to 10; 0 is the default")
    timeout_us = _count("parameters", parameters, "timeout", "use microseconds; 0 is no timeout")
    return Wishes(
        priority if 1 <= priority <= PRIORITY_LEVELS else DEFAULT_PRIORITY,
        timeout_us / 1e6 if timeout_us else None,
    )


def requested_output(field: str, name: str, parameters: Parameters) -> RequestedOutput:
    """`field` is the output's path in the request. Raises `InvalidArgument`."""
    check_no_shared_memory(field, name, parameters)
    field = f"{field}.parameters"
    return RequestedOutput(name, _count(field, parameters, "classification", "use the number of classes wanted"))


def check_no_shared_memory(field: str, name: str, parameters: Parameters) -> None:
    """Raises `InvalidArgument`: nothing would be found there, or written there."""
    if SHARED_MEMORY in parameters:
        remedy = f"tensor {name[:100]!r}: shared memory is not served; send tensors in the messages"
        raise invalid_field(f"{field}.parameters.{SHARED_MEMORY}", parameters[SHARED_MEMORY], remedy)


def _count(field: str, parameters: Parameters, name: str, remedy: str) -> int:
    value = parameters.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid_field(f"{field}.{name}", value, remedy)
    return value
