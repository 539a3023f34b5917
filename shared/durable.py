"""Records that outlive a release: fields of a later release are ignored, and written back unchanged.

While a service is updated, processes of both releases read and write the same logs. A class whose objects are written
back derives from `Durable`: `fields_of` converts a record into its constructor's arguments, and `as_state` converts it
back. For a class that is only read, `fields_of` drops unknown fields. A renamed field is still written under its old
name: `stored_as`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

# No record has a field of this name.
UNKNOWN = "unknown"
# The metadata key for a field's name in records, if that differs.
STORED_AS = "stored_as"


@dataclass(frozen=True)
class Durable:
    # Fields that a later release wrote, by name.
    unknown: Mapping[str, Any] = field(default_factory=dict, kw_only=True, hash=False, repr=False)


def stored_as(name: str) -> dict[str, str]:
    """Return the metadata of a dataclass field that is called `name` in records."""
    return {STORED_AS: name}


def fields_of(kind: type, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the dataclass `kind` that `state`, from JSON, has.

    For a `Durable` the other fields are included, as its `unknown`.
    """
    names = {_name_in_records(one): one.name for one in fields(kind)}
    known = {names[name]: value for name, value in state.items() if name in names}
    if issubclass(kind, Durable):
        known[UNKNOWN] = {name: value for name, value in state.items() if name not in names}
    return known


def as_state(value: Any) -> Any:
    """Convert as `dataclasses.asdict` does, with each `Durable`'s unknown fields in their place."""
    if is_dataclass(value) and not isinstance(value, type):
        state = {_name_in_records(one): as_state(getattr(value, one.name)) for one in fields(value)}
        return {**state.pop(UNKNOWN), **state} if isinstance(value, Durable) else state
    if isinstance(value, (list, tuple)):
        return type(value)(as_state(one) for one in value)
    if isinstance(value, Mapping):
        return {key: as_state(one) for key, one in value.items()}
    return value


def _name_in_records(one: Field[Any]) -> str:
    return str(one.metadata.get(STORED_AS, one.name))


def known_of(value: Durable) -> dict[str, Any]:
    """Return the fields without the unknown ones, for messages, which have no others."""
    return {one.name: getattr(value, one.name) for one in fields(value) if one.name != UNKNOWN}
