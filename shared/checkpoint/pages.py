"""The older entries of a registry: a tree of pages that are written once, so that no append rewrites them.

    head of the log          its newest entries, and references, the oldest first:
                             [level 3] [level 2] [level 2] [level 1] [level 1]
    page of level 1          at most `PAGE_ENTRIES` entries
    page of level n > 1      at most `FAN_OUT` references to pages of level n - 1

A reference summarizes all entries below it for searches: the range of their names, the highest step, the best value. So
a search reads one page of each level, and n entries have about log(n) / log(FAN_OUT) levels. If an entry is changed or
removed, its page and those above it are written under new names; the old pages are deleted once the log names the new
ones. An interrupted process leaves only pages that nothing references.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.checkpoint.ranking import CheckpointEntry, Ranking, best, latest
from shared.durable import Durable, as_state, fields_of
from shared.errors import DataLoss
from shared.storage import ObjectMissing, ObjectStore

PAGE_ENTRIES = 32
FAN_OUT = 32
# Below a job's folder of checkpoints.
PAGES = "pages"


class PageMissing(Exception):
    """A page is missing: the registry has a newer head, or the page is lost."""


@dataclass(frozen=True, kw_only=True)
class PageRef(Durable):
    """Reference to a page, with a summary of all entries below it. Pages of `level` 1 hold entries."""

    key: str
    sha256: str
    level: int
    count: int
    # The lowest and the highest name, in string order.
    first_name: str
    last_name: str
    first_attempt: int
    last_attempt: int
    last_step: int
    # The highest final step; -1 if there is none.
    last_final_step: int
    # The best value by the registry's ranking; None if no entry was measured.
    best_value: float | None
    best_step: int

    def may_have(self, name: str) -> bool:
        return self.first_name <= name <= self.last_name


class PageTree:
    """The pages that `refs` name, the oldest first, and edits of them. Best values are by `ranking`."""

    def __init__(self, store: ObjectStore, folder: str, refs: Sequence[PageRef], ranking: Ranking) -> None:
        self.refs = list(refs)
        # Keys of the pages that this edit wrote, and of those that it replaced.
        self.written: list[str] = []
        self.replaced: list[str] = []
        self._store = store
        self._folder = folder
        self.ranking = ranking

    def search(self, may_have: Callable[[PageRef], bool]) -> Iterator[CheckpointEntry]:
        """Yield the entries of the pages that `may_have` accepts, the oldest first. Other pages are not read."""
        for ref in self.refs:
            yield from self._search(ref, may_have)

    def entries_of(self, ref: PageRef) -> list[CheckpointEntry]:
        """Return the entries of a page of level 1."""
        return [CheckpointEntry.from_state(entry) for entry in self._load(ref)["entries"]]

    def refs_of(self, ref: PageRef) -> list[PageRef]:
        """Return the references of a page of a higher level."""
        return [PageRef(**fields_of(PageRef, page)) for page in self._load(ref)["pages"]]

    def add(self, entries: Sequence[CheckpointEntry]) -> None:
        """Add the newest page. `FAN_OUT` pages of one level become one page of the next."""
        self.refs.append(self._write_entries(entries))
        while len(newest := self.refs[-FAN_OUT:]) == FAN_OUT and newest[0].level == newest[-1].level:
            self.refs[-FAN_OUT:] = [self._write_refs(newest)]

    def change(
        self, may_have: Callable[[PageRef], bool], change: Callable[[CheckpointEntry], CheckpointEntry | None]
    ) -> None:
        """Replace each entry by the result of `change`, or remove it if that is None.

        Only pages that `may_have` accepts are read.
        """
        changed = (self._changed(ref, may_have, change) for ref in self.refs)
        self.refs = [ref for ref in changed if ref is not None]

    def drop(self, goes: Callable[[PageRef], bool]) -> None:
        """Take away the pages that `goes` names, with all below them. A page that is lost stops nothing."""
        for ref in self.refs:
            if goes(ref):
                self._replace(ref)
        self.refs = [ref for ref in self.refs if not goes(ref)]

    def rank(self, ranking: Ranking) -> None:
        """Change the ranking. All references are rewritten if the order differs."""
        reorders = not is_same_order(ranking, self.ranking)
        self.ranking = ranking
        if reorders:
            self.refs = [self._ranked(ref) for ref in self.refs]

    def _replace(self, ref: PageRef) -> None:
        self.replaced.append(ref.key)
        if ref.level == 1:
            return
        try:
            children = self.refs_of(ref)
        except (PageMissing, DataLoss):  # what is below it goes with the job
            return
        for child in children:
            self._replace(child)

    def _search(self, ref: PageRef, may_have: Callable[[PageRef], bool]) -> Iterator[CheckpointEntry]:
        if not may_have(ref):
            return
        if ref.level == 1:
            yield from self.entries_of(ref)
        else:
            for child in self.refs_of(ref):
                yield from self._search(child, may_have)

    def _changed(
        self,
        ref: PageRef,
        may_have: Callable[[PageRef], bool],
        change: Callable[[CheckpointEntry], CheckpointEntry | None],
    ) -> PageRef | None:
        if not may_have(ref):
            return ref
        if ref.level == 1:
            before = self.entries_of(ref)
            entries = [after for entry in before if (after := change(entry)) is not None]
            if entries == before:
                return ref
            self.replaced.append(ref.key)
            return self._write_entries(entries) if entries else None
        children = self.refs_of(ref)
        refs = [one for child in children if (one := self._changed(child, may_have, change)) is not None]
        if refs == children:
            return ref
        self.replaced.append(ref.key)
        return self._write_refs(refs) if refs else None

    def _ranked(self, ref: PageRef) -> PageRef:
        if ref.level == 1:
            return self._entries_ref(self.entries_of(ref), ref.key, ref.sha256)
        self.replaced.append(ref.key)
        return self._write_refs([self._ranked(child) for child in self.refs_of(ref)])

    def _write_entries(self, entries: Sequence[CheckpointEntry]) -> PageRef:
        key, sha256 = self._write({"entries": [entry.as_state() for entry in entries]})
        return self._entries_ref(entries, key, sha256)

    def _entries_ref(self, entries: Sequence[CheckpointEntry], key: str, sha256: str) -> PageRef:
        names = [entry.name for entry in entries]
        attempts = [one.attempt for one in entries]
        measured = next(iter(self.ranking.best_first(entries)), None)
        return PageRef(
            key=key,
            sha256=sha256,
            level=1,
            count=len(entries),
            first_name=min(names),
            last_name=max(names),
            first_attempt=min(attempts),
            last_attempt=max(attempts),
            last_step=max(one.step for one in entries),
            last_final_step=max((one.step for one in entries if one.final), default=-1),
            best_value=measured.metrics[self.ranking.metric] if measured else None,
            best_step=measured.step if measured else -1,
        )

    def _write_refs(self, refs: Sequence[PageRef]) -> PageRef:
        key, sha256 = self._write({"pages": [as_state(one) for one in refs]})
        measured = [ref for ref in refs if ref.best_value is not None]
        top = max(measured, key=self._rank_of, default=None)
        return PageRef(
            key=key,
            sha256=sha256,
            level=refs[0].level + 1,
            count=sum(one.count for one in refs),
            first_name=min(one.first_name for one in refs),
            last_name=max(one.last_name for one in refs),
            first_attempt=min(one.first_attempt for one in refs),
            last_attempt=max(one.last_attempt for one in refs),
            last_step=max(one.last_step for one in refs),
            last_final_step=max(one.last_final_step for one in refs),
            best_value=top.best_value if top else None,
            best_step=top.best_step if top else -1,
        )

    def _rank_of(self, ref: PageRef) -> tuple[float, int]:
        assert ref.best_value is not None
        return (ref.best_value if self.ranking.maximize else -ref.best_value, ref.best_step)

    def _write(self, page: dict[str, Any]) -> tuple[str, str]:
        """Write a page and return its key and digest. Each key is new, so a process that deletes old keys cannot hit
        it."""
        data = json.dumps(page).encode()
        key = f"{self._folder}/{uuid.uuid4().hex}.json"
        self._store.put(key, data)
        self.written.append(key)
        return key, hashlib.sha256(data).hexdigest()

    def _load(self, ref: PageRef) -> dict[str, Any]:
        try:
            data = self._store.get(ref.key)
        except ObjectMissing:
            raise PageMissing(ref.key) from None
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise DataLoss(
                f"{ref.key}, a page of the checkpoints' registry, does not have the digest that its log names",
                reason="REGISTRY_DAMAGED",
                metadata={"object": ref.key},
            )
        page: dict[str, Any] = json.loads(data)
        return page


def is_same_order(ranking: Ranking, other: Ranking) -> bool:
    return (ranking.metric, ranking.maximize) == (other.metric, other.maximize)


class RegistryView:
    """The named checkpoints of one head of the log: `recent` are its newest entries, `tree` has the others.

    Each method reads a bounded number of pages, except `entries` and a `best` by another ranking than the registry's,
    which read all. They raise `PageMissing` if another head has replaced this one.
    """

    def __init__(self, recent: Sequence[CheckpointEntry], tree: PageTree, ranking: Ranking) -> None:
        self._recent = list(recent)
        self._tree = tree
        self._ranking = ranking

    @property
    def is_empty(self) -> bool:
        return not self._recent and not self._tree.refs

    def entries(self) -> list[CheckpointEntry]:
        """Return all entries, the oldest first."""
        # A release without pages may have committed a name that is on a page: the later one counts.
        recent = {one.name for one in self._recent}
        older = [one for one in self._tree.search(lambda _: True) if one.name not in recent]
        return [*older, *self._recent]

    def find(self, name: str) -> CheckpointEntry | None:
        for entry in self._recent:
            if entry.name == name:
                return entry
        return next((one for one in self._tree.search(lambda ref: ref.may_have(name)) if one.name == name), None)

    def newest(self) -> CheckpointEntry | None:
        """Return the entry with the highest step."""
        recent = latest(self._recent)
        step = max((ref.last_step for ref in self._tree.refs), default=-1)
        if recent is not None and recent.step >= step:
            return recent
        return next((one for one in self._tree.search(lambda ref: ref.last_step == step) if one.step == step), None)

    def final(self) -> CheckpointEntry | None:
        """Return the final entry with the highest step."""
        recent = latest([one for one in self._recent if one.final])
        step = max((ref.last_final_step for ref in self._tree.refs), default=-1)
        if step < 0 or (recent is not None and recent.step >= step):
            return recent
        found = self._tree.search(lambda ref: ref.last_final_step == step)
        return next((one for one in found if one.final and one.step == step), None)

    def best(self, ranking: Ranking | None = None) -> CheckpointEntry | None:
        """Return the best entry by `ranking` (None: the registry's).

        Of equals the later one wins. If none was measured, it is the newest.
        """
        ranking = ranking or self._ranking
        if self._tree.refs and not is_same_order(ranking, self._tree.ranking):
            return best(self.entries(), ranking)
        sign = 1 if ranking.maximize else -1
        recent = next(iter(ranking.best_first(self._recent)), None)
        ranks = [(sign * ref.best_value, ref.best_step) for ref in self._tree.refs if ref.best_value is not None]
        top = max(ranks, default=None)
        if recent is not None and (top is None or (sign * recent.metrics[ranking.metric], recent.step) >= top):
            return recent
        if top is None:
            return self.newest()

        def may_have(ref: PageRef) -> bool:
            return ref.best_value is not None and (sign * ref.best_value, ref.best_step) == top

        return next(iter(ranking.best_first(self._tree.search(may_have))), None)

    def has_attempt(self, attempt: int) -> bool:
        """Return whether this attempt committed a checkpoint."""
        older = self._tree.search(lambda ref: ref.first_attempt <= attempt <= ref.last_attempt)
        return any(one.attempt == attempt for one in itertools.chain(self._recent, older))

    def page(self, after: str, size: int) -> tuple[list[CheckpointEntry], bool]:
        """Return the first `size` entries by name after `after`, and whether there are more."""
        recent = {one.name for one in self._recent}
        waiting: list[tuple[str, int, CheckpointEntry | PageRef]] = []
        order = itertools.count()

        def push(one: CheckpointEntry | PageRef) -> None:
            if isinstance(one, PageRef):
                if one.last_name > after:
                    heapq.heappush(waiting, (one.first_name, next(order), one))
            elif one.name > after:
                heapq.heappush(waiting, (one.name, next(order), one))

        for recent_entry in self._recent:
            push(recent_entry)
        for ref in self._tree.refs:
            push(ref)
        found: list[CheckpointEntry] = []
        while waiting and len(found) <= size:
            _, _, lowest = heapq.heappop(waiting)
            if isinstance(lowest, CheckpointEntry):
                found.append(lowest)
            elif lowest.level == 1:
                for entry in self._tree.entries_of(lowest):
                    if entry.name not in recent:
                        push(entry)
            else:
                for ref in self._tree.refs_of(lowest):
                    push(ref)
        return found[:size], len(found) > size
