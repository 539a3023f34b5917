"""Records that outlive a release: what a later one added to them is read over, and written back as it was.

While a service is updated, processes of both releases read and write the same logs. A class whose objects are written
back again derives from `Durable`; `fields_of` makes its constructor's arguments from what was read, `as_state` what is
written. Of a class that is only read, `fields_of` leaves out what this release does not know. A field that was renamed
is still written under its old name: `stored_as`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

# No record has a field of that name.
UNKNOWN = "unknown"
# The metadata of a field that has another name in records.
STORED_AS = "stored_as"


@dataclass(frozen=True)
class Durable:
    # The fields that a later release wrote, by name.
    unknown: Mapping[str, Any] = field(default_factory=dict, kw_only=True, hash=False, repr=False)


def stored_as(name: str) -> dict[str, str]:
    """The metadata of a dataclass field that records call `name`."""
    return {STORED_AS: name}


def fields_of(kind: type, state: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the dataclass `kind` that are in `state`, which JSON gave; of a `Durable` one the others, too, as
    its `unknown`."""
    names = {_name_in_records(one): one.name for one in fields(kind)}
    known = {names[name]: value for name, value in state.items() if name in names}
    if issubclass(kind, Durable):
        known[UNKNOWN] = {name: value for name, value in state.items() if name not in names}
    return known


def as_state(value: Any) -> Any:
    """As `dataclasses.asdict`, with what is unknown of each `Durable` in its place."""
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
    """The fields of its own, without those that are unknown: for messages, which have no others."""
    return {one.name: getattr(value, one.name) for one in fields(value) if one.name != UNKNOWN}
