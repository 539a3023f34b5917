"""What installed packages add to Millrace: models, losses and training steps, found by name among entry points.

Looked up anew at each call, in the process that needs it: a package must be installed where its code runs.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from shared.errors import first_line, invalid_field

MODELS = "millrace.models"
LOSSES = "millrace.losses"
TRAINING_STEPS = "millrace.training_steps"


def installed_names(group: str) -> list[str]:
    """In their order."""
    return sorted({point.name for point in entry_points(group=group)})


def load_installed(group: str, name: str, field: str, known: str) -> Any:
    """The object that a package registered as `name`.

    Raises `InvalidArgument` naming `field` where no package of this process has it, where two different ones do, or
    where its import fails. `known` says what else the field may name.
    """
    points = {point.value: point for point in entry_points(group=group) if point.name == name}
    if not points:
        others = ", ".join(installed_names(group)) or "none here"
        choices = f"{known} or " if known else ""
        raise invalid_field(field, name, f"use {choices}one of the entry points {group} ({others})")
    if len(points) > 1:
        raise invalid_field(field, name, f"{group} has it more than once: {', '.join(sorted(points))}; remove one")
    (point,) = points.values()
    try:
        return point.load()
    except Exception as error:  # whatever the package's own import raises
        raise invalid_field(field, name, f"importing {point.value} failed: {first_line(error)}") from None
