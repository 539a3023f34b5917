"""Which versions of a dataset go by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.durable import Durable
from shared.errors import invalid_fields

# What a `google.protobuf.Duration` holds: 10,000 years.
MAX_AGE_S = 315_576_000_000


@dataclass(frozen=True, kw_only=True)
class Retention(Durable):
    """`keep_newest` of 0 and `max_age_s` of 0 mean: no matter. With both at 0 nothing goes."""

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
    """Raises `InvalidArgument` naming every field that is wrong."""
    problems: list[tuple[str, object, str]] = []
    if retention.keep_newest < 0:
        problems.append((f"{field}.keep_newest", retention.keep_newest, "use 0 (no matter) or more"))
    if not 0 <= retention.max_age_s <= MAX_AGE_S:
        remedy = f"use 0 (no matter) to {MAX_AGE_S} seconds"
        problems.append((f"{field}.max_age", f"{retention.max_age_s:g}s", remedy))
    if problems:
        raise invalid_fields(problems)


def outlived(retention: Retention, versions: Sequence[Committed], now: float) -> list[str]:
    """The names of those that the retention lets go, the oldest first.

    A version goes when every rule that is set says so; never one in use, and never the newest. Versions in use count
    among those that `keep_newest` keeps.
    """
    if retention.keeps_all:
        return []
    newest_first = sorted(versions, key=lambda one: (one.commit_time, one.name), reverse=True)
    # Without the rule of the newest, at least the newest one stays.
    candidates = newest_first[max(retention.keep_newest, 1) :]
    if retention.max_age_s:
        candidates = [one for one in candidates if now - one.commit_time > retention.max_age_s]
    return [one.name for one in reversed(candidates) if not one.in_use]
