"""Which of a deployment's versions stay loaded although they have no traffic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shared.errors import invalid_field

MAX_LATEST = 100
MAX_NAMED = 100


class Kept(StrEnum):
    LATEST = "LATEST"
    ALL = "ALL"
    NAMED = "NAMED"


@dataclass(frozen=True)
class VersionPolicy:
    """`count` is of the newest ones, `named` are numbers; each means something to its own kind only."""

    kept: Kept = Kept.LATEST
    count: int = 1
    named: tuple[str, ...] = ()

    def keeps(self, numbers: Iterable[str]) -> Collection[str]:
        """Those of `numbers` that stay."""
        ordered = sorted(numbers, key=int)
        if self.kept is Kept.ALL:
            return ordered
        if self.kept is Kept.NAMED:
            return [number for number in ordered if number in self.named]
        return ordered[-self.count :]

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> VersionPolicy:
        return VersionPolicy(Kept(record["kept"]), record["count"], tuple(record["named"]))


LATEST = VersionPolicy()


def latest_policy(field: str, count: int) -> VersionPolicy:
    """Raises `InvalidArgument`."""
    if not 0 <= count <= MAX_LATEST:
        raise invalid_field(f"{field}.latest.count", count, f"use 0 to {MAX_LATEST}; 0 means 1")
    return VersionPolicy(Kept.LATEST, count=count or 1)


def named_policy(field: str, numbers: Collection[str]) -> VersionPolicy:
    """Raises `InvalidArgument`."""
    if len(numbers) > MAX_NAMED:
        raise invalid_field(f"{field}.named.versions", f"{len(numbers)} versions", f"name at most {MAX_NAMED}")
    for number in numbers:
        if not (number.isascii() and number.isdecimal() and len(number) < 10 and number == str(int(number))):
            raise invalid_field(f"{field}.named.versions", number, "use the numbers of versions: 1, 2, 3, …")
    return VersionPolicy(Kept.NAMED, named=tuple(numbers))
