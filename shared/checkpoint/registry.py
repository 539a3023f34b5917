"""The committed checkpoints of a job: a separate resource log, so that a stale attempt cannot add to it.

A checkpoint is removed in steps. First it is no longer named (it is `retiring`). Then its users are looked for: a
marker that was written before keeps it, and it is named again. If there is none the log records that it is condemned,
which is final. Only then are its files deleted, and at last the log drops it. A new user first writes a marker and then
checks that the checkpoint is named (`shared.checkpoint.references`), so at least one of the two sees the other. Any
process may repeat each step, so the next one finishes what another left incomplete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from shared.checkpoint.pages import PAGE_ENTRIES, PAGES, PageMissing, PageRef, PageTree, RegistryView
from shared.checkpoint.ranking import DEFAULT_RANKING, Ranking
from shared.checkpoint.ranking import CheckpointEntry as CheckpointEntry
from shared.checkpoint.ranking import best as best
from shared.checkpoint.ranking import latest as latest
from shared.durable import Durable, as_state, fields_of, known_of
from shared.errors import STORE_OUTAGES, DataLoss
from shared.log import Record, ResourceLog, StaleAttempt
from shared.reference_markers import live_references as live_references
from shared.storage import ObjectStore

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
    that have the others (`shared.checkpoint.pages`). Pages are written before the record that names them.
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
        """Remove these checkpoints, except those in use. Returns the entries that are no longer named.

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
        """Finish earlier calls of `retire`, of any process. Returns the entries whose files are deleted."""
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
            for key in pages:
                self._store.delete(key)
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
