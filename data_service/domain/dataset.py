"""A dataset: a name for a collection of versions, and the retention of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shared.durable import Durable, as_state, fields_of
from shared.errors import invalid_field, invalid_fields
from shared.names import ID, ID_REMEDY

# --- Retention ---
# The retention of a dataset's versions: which are deleted automatically.

# The maximum of `google.protobuf.Duration`: 10,000 years.
MAX_AGE_S = 315_576_000_000


@dataclass(frozen=True, kw_only=True)
class Retention(Durable):
    """The retention rules; 0 disables a rule.

    With both at 0 no version is deleted.
    """

    keep_newest: int = 0
    max_age_s: float = 0.0

    @property
    def keeps_all(self) -> bool:
        return self.keep_newest == 0 and self.max_age_s == 0


@dataclass(frozen=True)
class Committed:
    """An ACTIVE version; `commit_time` is in seconds since the epoch."""

    name: str
    commit_time: float
    in_use: bool = False


def check_retention(retention: Retention, field: str = "retention") -> None:
    """Raise `InvalidArgument` naming every invalid field."""
    problems: list[tuple[str, object, str]] = []
    if retention.keep_newest < 0:
        problems.append((f"{field}.keep_newest", retention.keep_newest, "use 0 (no matter) or more"))
    if not 0 <= retention.max_age_s <= MAX_AGE_S:
        remedy = f"use 0 (no matter) to {MAX_AGE_S} seconds"
        problems.append((f"{field}.max_age", f"{retention.max_age_s:g}s", remedy))
    if problems:
        raise invalid_fields(problems)


def outlived(retention: Retention, versions: Sequence[Committed], now: float) -> list[str]:
    """Return the names of versions that the retention deletes, the oldest first.

    A version is deleted if every enabled rule says so, but never one in use, and never the newest. Versions in use
    count among those that `keep_newest` keeps.
    """
    if retention.keeps_all:
        return []
    newest_first = sorted(versions, key=lambda one: (one.commit_time, one.name), reverse=True)
    # Without a `keep_newest` rule, at least the newest one stays.
    candidates = newest_first[max(retention.keep_newest, 1) :]
    if retention.max_age_s:
        candidates = [one for one in candidates if now - one.commit_time > retention.max_age_s]
    return [candidate.name for candidate in reversed(candidates) if not candidate.in_use]


# --- Dataset ---

MAX_DISPLAY_NAME = 63
MAX_DESCRIPTION = 4096
UPDATABLE = ("display_name", "description", "retention")


@dataclass(frozen=True, kw_only=True)
class Dataset(Durable):
    """A dataset.

    `create_time` is in seconds since the epoch; `request_id` is that of the call that created it, or empty.
    """

    name: str
    uid: str
    display_name: str
    description: str
    create_time: float
    request_id: str = ""
    # Counts the client's changes: 1 for the creation, one more for each change.
    generation: int = 1
    retention: Retention = field(default_factory=Retention)
    # A tombstone: the dataset does not exist, and a new one may begin in the same log.
    deleted: bool = False

    @property
    def etag(self) -> str:
        return str(self.generation)

    def as_state(self) -> dict[str, Any]:
        state: dict[str, Any] = as_state(self)
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Dataset:
        retention = Retention(**fields_of(Retention, state.get("retention", {})))
        return cls(**{**fields_of(cls, state), "retention": retention})


def changed(dataset: Dataset, changes: Mapping[str, Any]) -> Dataset:
    """Return the dataset with these of `UPDATABLE`; the same object if nothing changes.

    Raises `InvalidArgument` naming every invalid value.
    """
    wanted = replace(dataset, **changes)
    check_fields(None, wanted.display_name, wanted.description, prefix="dataset.")
    check_retention(wanted.retention, "dataset.retention")
    return dataset if wanted == dataset else replace(wanted, generation=dataset.generation + 1)


def check_mask(paths: Iterable[str]) -> list[str]:
    """Return the fields that an update changes: all of `UPDATABLE` if the mask is empty.

    Raises `InvalidArgument`.
    """
    given = list(paths)
    for index, path in enumerate(given):
        if path not in UPDATABLE:
            raise invalid_field(f"update_mask.paths[{index}]", path, f"use some of {', '.join(UPDATABLE)}, or none")
    return given or list(UPDATABLE)


def check_fields(dataset_id: str | None, display_name: str, description: str, prefix: str = "") -> None:
    """Raise `InvalidArgument` naming every invalid field, prefixed by `prefix`."""
    problems: list[tuple[str, object, str]] = []
    if dataset_id is not None and not ID.fullmatch(dataset_id):
        problems.append(("dataset_id", dataset_id, ID_REMEDY))
    if len(display_name) > MAX_DISPLAY_NAME:
        problems.append((f"{prefix}display_name", display_name, f"use at most {MAX_DISPLAY_NAME} characters"))
    if len(description) > MAX_DESCRIPTION:
        problems.append((f"{prefix}description", description, f"use at most {MAX_DESCRIPTION} characters"))
    if problems:
        raise invalid_fields(problems)
