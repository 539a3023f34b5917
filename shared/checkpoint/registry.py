"""The committed checkpoints of a job: a separate resource log, so that a stale attempt cannot add to it.

A checkpoint is removed in steps. First it is no longer named (it is `retiring`). Then its users are looked for: a
marker that was written before keeps it, and it is named again. If there is none the log records that it is condemned,
which is final. Only then are its files deleted, and at last the log drops it. A new user first writes a marker and then
checks that the checkpoint is named (`shared.checkpoint.references`), so at least one of the two sees the other. Any
process may repeat each step, so the next one finishes what another left incomplete.

The log's head has the newest entries. The older ones are in a tree of pages that are written once, so that no append
rewrites them:

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
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from shared.checkpoint.ranking import DEFAULT_RANKING, Ranking
from shared.checkpoint.ranking import CheckpointEntry as CheckpointEntry
from shared.checkpoint.ranking import best as best
from shared.checkpoint.ranking import latest as latest
from shared.durable import Durable, as_state, fields_of, known_of
from shared.errors import STORE_OUTAGES, DataLoss
from shared.reference_markers import live_references as live_references
from shared.resource_log import Record, ResourceLog, StaleAttempt
from shared.storage import ObjectMissing, ObjectStore

# --- Pages of older entries ---

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


# --- Registry ---

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The number of newest entries that stay in the log's records when others move to a page.
KEPT_ENTRIES = 8
# The key of a record's entries where older ones are on pages.
NEWEST_ENTRIES = "newest_entries"


@dataclass(frozen=True)
class Retiring(Durable):
    """An entry that is no longer named. `condemned`: it has no user, and its files are being deleted."""

    entry: CheckpointEntry
    condemned: bool = False


@dataclass(frozen=True)
class RegistryState(Durable):
    """The state in the head of the log.

    `checkpoints` are the newest entries, or all of them if there are few; the others are on `pages`. `attempt` is the
    one that the registry is open for; 0 before the first.
    """

    checkpoints: tuple[CheckpointEntry, ...] = ()
    retiring: tuple[Retiring, ...] = ()
    ranking: Ranking = DEFAULT_RANKING
    attempt: int = 0
    pages: tuple[PageRef, ...] = ()
    # The ranking of the best values in `pages`. An earlier release changes only `ranking`.
    pages_ranking: Ranking = DEFAULT_RANKING

    def as_record(self) -> dict[str, Any]:
        state: dict[str, Any] = as_state(self)
        del state["attempt"]  # the log's own
        if self.pages:
            # An earlier release takes `checkpoints` for all there are, and deletes the files of the others. Without
            # that key it refuses to read the registry.
            state[NEWEST_ENTRIES] = state.pop("checkpoints")
        else:  # as earlier releases have it
            del state["pages"], state["pages_ranking"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in state.items()}

    @classmethod
    def from_record(cls, record: Record | None) -> RegistryState:
        if record is None:
            return cls()
        state = dict(record.state)
        entries = state.pop(NEWEST_ENTRIES) if NEWEST_ENTRIES in state else state["checkpoints"]
        return cls(
            **{
                **fields_of(cls, state),
                "checkpoints": tuple(map(CheckpointEntry.from_state, entries)),
                "retiring": tuple(
                    Retiring(**{**fields_of(Retiring, one), "entry": CheckpointEntry.from_state(one["entry"])})
                    for one in state.get("retiring", ())
                ),
                "ranking": Ranking(**fields_of(Ranking, state.get("ranking", {}))),
                "attempt": record.attempt,
                "pages": tuple(PageRef(**fields_of(PageRef, one)) for one in state.get("pages", ())),
                "pages_ranking": Ranking(**fields_of(Ranking, state.get("pages_ranking", {}))),
            }
        )


def data_folder_of(job_name: str) -> str:
    """Return the folder of the files of a job's checkpoints."""
    return f"{job_name}/checkpoints/data"


class CheckpointRegistry:
    """The committed checkpoints of the job `trainingJobs/{j}`. Not shared between threads; open one each.

    A record of the log holds the newest entries, fewer than `KEPT_ENTRIES + PAGE_ENTRIES`, and references to the pages
    that have the others (`shared.checkpoint.registry`). Pages are written before the record that names them.
    """

    def __init__(self, store: ObjectStore, job_name: str) -> None:
        self._store = store
        self._log = ResourceLog(store, f"{job_name}/checkpoints/log", is_long=True)
        self._pages_folder = f"{job_name}/checkpoints/{PAGES}"
        self.data_folder = data_folder_of(job_name)

    def poll(self, ask: Callable[[RegistryView], T]) -> T:
        """Return the result of `ask` on the newest state. It is called again if the state changes meanwhile.

        Raises `DataLoss` if a page is lost.
        """
        return self._with_pages(lambda: ask(self._view(RegistryState.from_record(self._log.head()))))

    def state(self) -> RegistryState:
        """Return the newest state, with only the newest entries."""
        return RegistryState.from_record(self._log.head())

    def read(self) -> RegistryState:
        """Return the newest state with all entries among its `checkpoints`, which reads every page."""

        def whole() -> RegistryState:
            state = self.state()
            return replace(state, checkpoints=tuple(self._view(state).entries()), pages=())

        return self._with_pages(whole)

    def entries(self) -> list[CheckpointEntry]:
        """Return all entries, the oldest first."""
        return list(self.read().checkpoints)

    def newest(self) -> CheckpointEntry | None:
        """Return the entry with the highest step."""
        return self.poll(RegistryView.newest)

    def best(self, ranking: Ranking | None = None) -> CheckpointEntry | None:
        """Return the best entry by `ranking`, or else the job's own.

        Of equals the later one wins. If none was measured, it is the one with the highest step.
        """
        return self.poll(lambda view: view.best(ranking))

    def find(self, name: str) -> CheckpointEntry | None:
        return self.poll(lambda view: view.find(name))

    def fence(self, attempt: int, ranking: Ranking | None = None) -> list[CheckpointEntry]:
        """Open the registry as `open_for` does, and return all entries."""
        self.open_for(attempt, ranking)
        return self.entries()

    def open_for(self, attempt: int, ranking: Ranking | None = None) -> None:
        """Open the registry for `attempt` and close it to earlier ones.

        `ranking` defines the best checkpoint from now on. Raises `StaleAttempt`.
        """

        def decide(before: RegistryState, _: PageTree) -> RegistryState:
            return replace(before, ranking=replace(before.ranking, **known_of(ranking))) if ranking else before

        self._update(decide, attempt)

    def commit(self, entry: CheckpointEntry) -> None:
        """Commit a checkpoint. Raises `StaleAttempt` if a later attempt has opened the registry.

        A checkpoint of the same name is replaced: it is of the same position, written by an earlier attempt.
        """

        def add(before: RegistryState, tree: PageTree) -> RegistryState:
            kept = [checkpoint for checkpoint in before.checkpoints if checkpoint.name != entry.name]
            tree.change(lambda ref: ref.may_have(entry.name), lambda one: None if one.name == entry.name else one)
            return replace(before, checkpoints=(*kept, entry))

        self._update(add, entry.attempt)

    def finish(self, name: str, attempt: int) -> None:
        """Mark the checkpoint `name` as the run's final one: no step came after. Raises `StaleAttempt`."""

        def marked(checkpoint_entry: CheckpointEntry) -> CheckpointEntry:
            return replace(checkpoint_entry, final=True) if checkpoint_entry.name == name else checkpoint_entry

        def mark(before: RegistryState, tree: PageTree) -> RegistryState:
            tree.change(lambda ref: ref.may_have(name), marked)
            return replace(before, checkpoints=tuple(map(marked, before.checkpoints)))

        self._update(mark, attempt)

    def retire(
        self, entries: Collection[CheckpointEntry], attempt: int | None = None, clock: Callable[[], float] = time.time
    ) -> list[CheckpointEntry]:
        """Remove these checkpoints, except those in use. Return the entries that are no longer named.

        With `attempt` it raises `StaleAttempt` once a later one has opened the registry.
        """
        if not entries:
            return []
        folders = {entry.folder for entry in entries}

        def unname(before: RegistryState, tree: PageTree) -> RegistryState:
            going: list[Retiring] = []

            def left(checkpoint_entry: CheckpointEntry) -> CheckpointEntry | None:
                if checkpoint_entry.folder not in folders:
                    return checkpoint_entry
                going.append(Retiring(checkpoint_entry))
                return None

            tree.change(lambda ref: any(ref.may_have(one.name) for one in entries), left)
            kept = tuple(checkpoint for checkpoint in before.checkpoints if left(checkpoint) is not None)
            return replace(before, checkpoints=kept, retiring=(*before.retiring, *going)) if going else before

        self._update(unname, attempt)
        return [one for one in self.settle(attempt, clock) if one.folder in folders]

    def settle(self, attempt: int | None = None, clock: Callable[[], float] = time.time) -> list[CheckpointEntry]:
        """Finish earlier calls of `retire`, of any process. Return the entries whose files are deleted."""
        waiting = self.state().retiring
        if not waiting:
            return []
        used = {
            one.entry.folder
            for one in waiting
            if not one.condemned and live_references(self._store, one.entry.name, clock())
        }
        looked_at = {one.entry.folder for one in waiting}
        decided = self._update(lambda before, tree: _decided(before, tree, looked_at, used), attempt)
        gone = {one.entry.folder: one.entry for one in decided.retiring if one.condemned}
        for folder in gone:
            self._store.delete_folder(folder)

        def forget(before: RegistryState, _: PageTree) -> RegistryState:
            return replace(before, retiring=tuple(one for one in before.retiring if one.entry.folder not in gone))

        self._update(forget, attempt)
        return list(gone.values())

    def clear(self, attempt: int) -> None:
        """Drop the entries of attempts before `attempt` and close the registry to these attempts. The files stay.

        Entries of later attempts stay: a new job of the name continues the attempt numbers of the deleted one.
        """

        def drop(before: RegistryState, tree: PageTree) -> RegistryState:
            tree.drop(lambda ref: ref.last_attempt < attempt)
            tree.change(lambda ref: ref.first_attempt < attempt, lambda one: one if one.attempt >= attempt else None)
            return replace(
                before,
                checkpoints=tuple(checkpoint for checkpoint in before.checkpoints if checkpoint.attempt >= attempt),
                retiring=tuple(one for one in before.retiring if one.entry.attempt >= attempt),
            )

        self._update(drop, attempt)

    def _update(self, decide: Callable[[RegistryState, PageTree], RegistryState], attempt: int | None) -> RegistryState:
        """Append the state that `decide` returns for the newest state and its pages, unless both are unchanged."""
        edits: list[PageTree] = []

        def step(head: Record | None) -> dict[str, Any] | None:
            # If another writer was faster, no record names the pages that were written for this one.
            self._take_away([key for edit in edits for key in edit.written])
            edits.clear()
            before = RegistryState.from_record(head)
            tree = self._tree(before)
            edits.append(tree)
            after = _in_pages(decide(before, tree), tree)
            fences = attempt is not None and attempt != before.attempt
            return after.as_record() if fences or after.as_record() != before.as_record() else None

        try:
            record = self._with_pages(lambda: self._log.update(step, attempt))
        except StaleAttempt:
            self._take_away([key for edit in edits for key in edit.written])
            raise
        self._take_away(edits[-1].replaced)
        return RegistryState.from_record(record)

    def _with_pages(self, call: Callable[[], T]) -> T:
        """Repeat the call if a page is missing because the log has another head by now."""
        while True:
            try:
                return call()
            except PageMissing as missing:
                read = self._log.newest_known
                if self._log.head() == read:
                    raise DataLoss(
                        f"{missing}, a page of the checkpoints' registry, is gone",
                        reason="REGISTRY_DAMAGED",
                        metadata={"object": str(missing)},
                    ) from None

    def _view(self, state: RegistryState) -> RegistryView:
        return RegistryView(state.checkpoints, self._tree(state), state.ranking)

    def _tree(self, state: RegistryState) -> PageTree:
        return PageTree(self._store, self._pages_folder, state.pages, state.pages_ranking)

    def _take_away(self, pages: Collection[str]) -> None:
        """Delete pages that no record names. Pages that remain are deleted with the job."""
        try:
            self._store.delete_all(pages)
        except STORE_OUTAGES as error:
            logger.warning("old pages of the checkpoints' registry stay until the job is deleted: %s", error.message)


def _in_pages(state: RegistryState, tree: PageTree) -> RegistryState:
    """Return the state with its oldest entries moved to a page once there are `KEPT_ENTRIES + PAGE_ENTRIES`."""
    checkpoints = list(state.checkpoints)
    tree.rank(state.ranking)
    while len(checkpoints) >= KEPT_ENTRIES + PAGE_ENTRIES:
        tree.add(checkpoints[:PAGE_ENTRIES])
        del checkpoints[:PAGE_ENTRIES]
    return replace(
        state,
        checkpoints=tuple(checkpoints),
        pages=tuple(tree.refs),
        pages_ranking=state.ranking if tree.refs else DEFAULT_RANKING,
    )


def _decided(before: RegistryState, tree: PageTree, looked_at: Collection[str], used: Collection[str]) -> RegistryState:
    """Return the state with used entries named again, unless they are condemned, and the others condemned."""
    back = [one for one in before.retiring if one.entry.folder in used and not one.condemned]
    going = [
        replace(one, condemned=True) if one.entry.folder in looked_at else one
        for one in before.retiring
        if one not in back
    ]
    view = RegistryView(before.checkpoints, tree, before.ranking)
    # An entry that was written again has a new one under its name: the old files stay while they are used.
    returned = [one.entry for one in back if view.find(one.entry.name) is None]
    checkpoints = sorted((*before.checkpoints, *returned), key=lambda one: (one.create_time, one.step))
    return replace(before, checkpoints=tuple(checkpoints if returned else before.checkpoints), retiring=tuple(going))
