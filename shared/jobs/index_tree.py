"""The objects of an index: leaves with the entries, in the order of their names, and a root that lists the leaves.

Leaves never change. A change writes the leaves that it concerns anew, under names of their own, and then the next root
with put-if-absent on its number. That root is the commit: a writer that finds its number taken has read an old root,
and begins again. So a change is whole or is not there, and costs a few leaves and a root, whatever the index holds.

The newest root is the one with the highest number in a listing. Unlike a log's records, old roots are deleted. So a
writer that was stopped for long may still write a number whose root is gone. It lists the roots once more after its
write, and begins again if it is not the newest.
"""

from __future__ import annotations

import itertools
import json
import logging
import uuid
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from shared.durable import fields_of
from shared.errors import STORE_OUTAGES
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

logger = logging.getLogger(__name__)

# An entry, as JSON. `SETTLED` is its one field that this module knows.
Entry = dict[str, Any]
SETTLED = "settled"
# The most entries of a leaf, and the most bytes of them, as JSON.
LEAF_ENTRIES = 128
LEAF_BYTES = 1024 * 1024
# A leaf with fewer entries joins a neighbour, once it is written anew.
FEW_ENTRIES = 32
# Older roots are deleted. A reader needs a moment from the listing to its read.
ROOTS_KEPT = 4
READ_AT_ONCE = 16
# A leaf that no root names is deleted after this time: the change that wrote it may be about to write its root.
UNNAMED_S = 3600.0


@dataclass(frozen=True)
class Leaf:
    """A leaf: its key, the first name that it may have, and how many entries it has, of which some are not settled."""

    key: str
    first: str
    count: int
    unsettled: int


@dataclass(frozen=True)
class Root:
    """The state of an index after one change.

    `built_to` is the last name that a first build has read; once it `is_complete` the index has all jobs. `replaced`
    are the leaves that this change has replaced. The next change deletes them, as readers may hold the root before.
    """

    number: int = 0
    leaves: tuple[Leaf, ...] = ()
    is_complete: bool = False
    built_to: str = ""
    replaced: tuple[str, ...] = ()


class LeafMissing(Exception):
    """A leaf is gone: its root is not the newest any more, or the leaf was deleted from outside."""


class IndexTree:
    """The tree below `folder`. Its methods may be called from several threads."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        self._store = store
        self._roots = f"{folder}/roots"
        self._leaves = f"{folder}/leaves"

    def root(self) -> Root:
        """Return the newest root, or an empty one with the number 0. It takes a listing and a read."""
        while (number := max(self._numbers(), default=0)) > 0:
            try:
                state = json.loads(zlib.decompress(self._store.get(self._root_key(number))))
            except ObjectMissing:
                continue  # later roots were written since the listing
            leaves = tuple(Leaf(*leave) for leave in state["leaves"])
            return Root(**{**fields_of(Root, state), "leaves": leaves, "replaced": tuple(state["replaced"])})
        return Root()

    def entries(self, leaf: Leaf) -> dict[str, Entry]:
        """Return a leaf's entries by their names. Raises `LeafMissing`."""
        try:
            entries: dict[str, Entry] = json.loads(zlib.decompress(self._store.get(leaf.key)))
        except ObjectMissing:
            raise LeafMissing(leaf.key) from None
        return entries

    def commit(self, base: Root, changed: Mapping[str, Entry | None], *, always: bool = False, **fields: Any) -> bool:
        """Commit the tree `base` with these entries in place of those of the same names; None removes one.

        `fields` are new values of fields of the root. With `always` a root is written even if nothing changes, so that
        no other change to `base` can be committed any more.

        Returns False if `base` is not the newest root: then nothing is committed, or another change follows it already.
        """
        try:
            parts = self._changed(base, changed)
        except LeafMissing:
            self.begin_anew_if_broken(base)
            return False
        written = [part for part in parts if isinstance(part, dict)]
        if parts == list(base.leaves) and not (fields or always):
            return True
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            made = iter(list(pool.map(self._write, written)))
        leaves = [part if isinstance(part, Leaf) else next(made) for part in parts]
        if leaves:
            leaves[0] = replace(leaves[0], first="")  # a leaf has the names up to the next one's first
        staying = {leaf.key for leaf in leaves}
        replaced = tuple(leaf.key for leaf in base.leaves if leaf.key not in staying)
        root = replace(base, number=base.number + 1, leaves=tuple(leaves), replaced=replaced, **fields)
        if not self._put_root(root):
            return False
        numbers = self._numbers()
        if max(numbers, default=0) != root.number:
            return False
        old = [self._root_key(number) for number in numbers if number <= root.number - ROOTS_KEPT]
        self._delete([*base.replaced, *old])
        return True

    def begin_anew_if_broken(self, base: Root) -> None:
        """Commit a tree without leaves if `base`, of which a leaf is missing, is the newest root.

        A change deletes leaves only of roots that are not the newest. So an operator has deleted the leaf, and a change
        in progress may have written its root after that. Every reader would look for the leaf for ever.
        """
        if self.root().number == base.number:
            logger.warning("leaves of %s were deleted: the index is built anew", self._roots)
            self._put_root(Root(number=base.number + 1))

    def delete_unnamed(self) -> None:
        """Delete leaves that changes left behind whose writers died, or found another change to be faster."""
        before = {info.key: info.modified for info in self._store.list(self._leaves)}
        root = self.root()
        named = {leaf.key for leaf in root.leaves} | set(root.replaced)
        now = max((info.modified for info in self._store.list(self._roots)), default=0.0)  # by the store's clock
        self._delete([key for key, modified in before.items() if key not in named and modified < now - UNNAMED_S])

    def _changed(self, base: Root, changed: Mapping[str, Entry | None]) -> list[Leaf | dict[str, Entry]]:
        """Return the leaves after the change: those that stay, and the entries of those that are to be written."""
        parts: list[Leaf | dict[str, Entry]] = list(base.leaves)
        for place, names in _by_leaf(base, changed).items():
            before = self.entries(base.leaves[place]) if base.leaves else {}
            entries = {name: entry for name, entry in before.items() if name not in names}
            for name in names:
                if (entry := changed[name]) is not None:
                    there = before.get(name, {})
                    # An entry that was settled, and has not changed since, stays settled.
                    entries[name] = there if there == {**entry, SETTLED: True} else entry
            if entries != before:
                parts[place : place + 1] = [dict(sorted(entries.items()))]
        at = 0
        while at < len(parts):
            part = parts[at]
            if isinstance(part, dict) and len(part) < FEW_ENTRIES and len(parts) > 1:
                beside = at - 1 if at else at + 1
                neighbour = parts[beside]
                joined = neighbour if isinstance(neighbour, dict) else self.entries(neighbour)
                low = min(at, beside)
                parts[low : low + 2] = [dict(sorted({**joined, **part}.items()))]
                at = low
            at += 1
        cut: list[Leaf | dict[str, Entry]] = []
        for part in parts:
            cut += [part] if isinstance(part, Leaf) else _cut(part)
        return cut

    def _write(self, entries: dict[str, Entry]) -> Leaf:
        leaf = Leaf(
            key=f"{self._leaves}/{uuid.uuid4().hex}.json.z",
            first=next(iter(entries)),
            count=len(entries),
            unsettled=sum(not entry[SETTLED] for entry in entries.values()),
        )
        self._store.put(leaf.key, zlib.compress(json.dumps(entries).encode(), 1))
        return leaf

    def _put_root(self, root: Root) -> bool:
        """Write a root. Return False if its number is taken."""
        state = zlib.compress(json.dumps(_state_of(root)).encode(), 1)
        try:
            self._store.put_if_absent(self._root_key(root.number), state)
        except ObjectExists:
            return False
        return True

    def _numbers(self) -> list[int]:
        return [int(info.key.rsplit("/", 1)[-1].split(".")[0]) for info in self._store.list(self._roots)]

    def _root_key(self, number: int) -> str:
        return f"{self._roots}/{number:012d}.json.z"

    def _delete(self, keys: list[str]) -> None:
        try:
            self._store.delete_all(keys)
        except STORE_OUTAGES as error:
            logger.warning("old objects of %s stay for now: %s", self._roots, error.message)


def _state_of(root: Root) -> dict[str, Any]:
    """Return the root as JSON. Its leaves are lists, as it is read for each page and may have a thousand of them."""
    leaves = [[leaf.key, leaf.first, leaf.count, leaf.unsettled] for leaf in root.leaves]
    fields = ("number", "is_complete", "built_to", "replaced")
    return {**{name: getattr(root, name) for name in fields}, "leaves": leaves}


def leaves_after(root: Root, name: str) -> Iterator[tuple[Leaf, str]]:
    """Yield the leaves that may have names after `name`, each with the next one's first name; empty for the last."""
    leaves = root.leaves
    begin = max(0, bisect_right([leaf.first for leaf in leaves], name) - 1)
    for place in range(begin, len(leaves)):
        yield leaves[place], leaves[place + 1].first if place + 1 < len(leaves) else ""


def _by_leaf(base: Root, changed: Mapping[str, Entry | None]) -> dict[int, list[str]]:
    """Return the changed names by the place of their leaf, from the last to the first."""
    firsts = [leaf.first for leaf in base.leaves]
    by_place: dict[int, list[str]] = {}
    for name in sorted(changed, reverse=True):
        by_place.setdefault(max(0, bisect_right(firsts, name) - 1), []).append(name)
    return by_place


def _cut(entries: dict[str, Entry]) -> list[dict[str, Entry]]:
    """Return the entries as leaves of about equal numbers, none above its limits unless it has one entry."""
    if not entries:
        return []
    items = list(entries.items())
    size_bytes = sum(len(json.dumps(entry)) for entry in entries.values())
    pieces = max(-(-len(items) // LEAF_ENTRIES), min(len(items), -(-size_bytes // LEAF_BYTES)))
    bounds = [len(items) * piece // pieces for piece in range(pieces + 1)]
    return [dict(items[start:end]) for start, end in itertools.pairwise(bounds)]
