"""A dataset: a name for a collection of versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shared.errors import invalid_fields
from shared.names import ID, ID_REMEDY

MAX_DISPLAY_NAME = 63
MAX_DESCRIPTION = 4096


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """`create_time` is in seconds since the epoch; `request_id` is that of the call that made it, or empty."""

    name: str
    uid: str
    display_name: str
    description: str
    create_time: float
    request_id: str = ""
    # Of the wish: nothing changes a dataset yet.
    generation: int = 1

    def as_state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Dataset:
        return cls(**state)


def check_fields(dataset_id: str, display_name: str, description: str) -> None:
    """Raises `InvalidArgument` naming every field that is wrong."""
    problems: list[tuple[str, object, str]] = []
    if not ID.fullmatch(dataset_id):
        problems.append(("dataset_id", dataset_id, ID_REMEDY))
    if len(display_name) > MAX_DISPLAY_NAME:
        problems.append(("display_name", display_name, f"use at most {MAX_DISPLAY_NAME} characters"))
    if len(description) > MAX_DESCRIPTION:
        problems.append(("description", description, f"use at most {MAX_DESCRIPTION} characters"))
    if problems:
        raise invalid_fields(problems)
