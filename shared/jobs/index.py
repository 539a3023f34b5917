"""The index of the jobs of one kind: a page of a list reads it, instead of the log of each job that ever was.

A job's log is the truth, and the index is made from it. Writers put a note before each record (`shared.jobs.registry`).
`merge` reads the logs of the jobs that have notes, commits their entries to the tree (`IndexTree`), and
then removes the notes. A page reads the tree and the notes, and the logs of those of its jobs that have notes. So it
shows each job as its log has it, whether or not a merge came in between. Each step may be the last of its process:

- After the note: its record is not there. The note is removed `ABANDONED_S` after it was first seen.
- After the record: the note is there, and the next page or merge reads the log.
- After leaves, without a root: no root names them, and `delete_unnamed` deletes them.
- After the root: the notes are read once more, and change nothing.

A merge reads the newest root before it reads logs, and its commit fails if another one came in between. So the entry of
a later root is never of an earlier state of a log.

Processes of earlier releases write no notes. While a job is live it has a marker, in any release: `refresh` reads jobs
whose markers came or went, and live ones now and then. What is left, such as a deletion by an earlier release, is found
by `check`, which compares some jobs of the store with the index at each call and goes through all of them in turns. A
process also goes through all of them once after its start: `catch_up` compares `JOBS_A_COMMIT` at each `keep`.

The index is a tree in the store: leaves with the entries, in the order of their names, and a root that lists the
leaves.

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
import time
import uuid
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shared.durable import fields_of
from shared.errors import STORE_OUTAGES
from shared.jobs.registry import NO_RECORD, Change, Changes, Jobs, folder_of_index, log_prefix
from shared.jobs.transitions import JobRecord, JobState
from shared.resource_log import ResourceLog
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

# --- Index ---

logger = logging.getLogger(__name__)

# How often a service brings its index up to date.
KEEP_INTERVAL_S = 2.0
# The most jobs whose logs one commit reads: a commit that another one overtakes reads them again.
JOBS_A_COMMIT = 256
# A page that finds more notes merges them: no other process does.
NOTES_A_PAGE = 32
# A record that is not there so long after its note was seen was never written, or will be found by `refresh`.
ABANDONED_S = 60.0
# How often the markers of live jobs are read, and after how many times each live job is.
REFRESH_INTERVAL_S = 30.0
REFRESHES_A_ROUND = 10


@dataclass(frozen=True)
class IndexedJob:
    """A job as the index has it. `shown` is what its kind shows of it besides its log; see `JobIndex`.

    A job is settled if the garbage collector has found nothing more to do about it.
    """

    record: JobRecord
    shown: dict[str, Any]
    is_settled: bool = False


class JobNames(Protocol):
    """The names of the jobs of one kind in the store, also of deleted ones."""

    def all(self) -> Sequence[str]:
        """Return all names, sorted."""

    def after(self, name: str, most: int) -> Sequence[str]:
        """Return the next names behind `name`, at most `most`, in the order of keys; see `ObjectStore.folders_after`.

        A name that is no job's, such as that of the collection, is before all.
        """


class CollectionNames:
    """The names `{collection}/{id}`."""

    def __init__(self, store: ObjectStore, collection: str) -> None:
        self._store = store
        self._collection = collection

    def all(self) -> Sequence[str]:
        return [f"{self._collection}/{folder}" for folder in self._store.folders(self._collection)]

    def after(self, name: str, most: int) -> Sequence[str]:
        ids = self._store.folders_after(self._collection, name.rpartition("/")[2], most)
        return [f"{self._collection}/{one}" for one in ids]


class JobIndex:
    """The index of the jobs of one kind.

    They are `{collection}/{id}`, unless `names` has others below the collection. `describe` returns, as JSON, what a
    list shows of a job besides its record. Any thread may call `page`, `merge`, `unsettled` and `settle`. `keep`
    belongs to one thread, and so does `check`.
    """

    def __init__(
        self,
        store: ObjectStore,
        kind: str,
        collection: str,
        describe: Callable[[JobRecord], dict[str, Any]] = lambda _: {},
        clock: Callable[[], float] = time.monotonic,
        *,
        names: JobNames | None = None,
    ) -> None:
        self._store = store
        self._names = names or CollectionNames(store, collection)
        self._describe = describe
        self._clock = clock
        self._jobs = Jobs(store, kind)
        self._changes = Changes(store, kind)
        self._tree = IndexTree(store, folder_of_index(kind))
        # By the key of a note whose record is not there: when it was first seen.
        self._unwritten: dict[str, float] = {}
        # The folders of live jobs by their uids as of the last `refresh`; None before the first.
        self._live: dict[str, str] | None = None
        self._refreshed_at = -REFRESH_INTERVAL_S
        self._refreshes = 0
        self._is_built = False
        # The last name that `check` has read.
        self._checked_to = ""
        # The last name that `keep` has compared with its log since this process began; None once it has compared all.
        self._caught_up_to: str | None = f"{collection}/"

    # --- Reading ---

    def page(self, after: str, size: int, within: str = "") -> tuple[list[IndexedJob], bool] | None:
        """Return the first `size` jobs whose names are beyond `after`, and whether there are more.

        Only jobs whose names begin with `within`. Return None while the index does not have all jobs yet.
        """
        # In this order: a note that a merge removes meanwhile is of an entry in the root that is read next.
        changes = self._changes.read()
        root = self._tree.root()
        may_merge = True
        while root.is_complete:
            if may_merge and len(changes) > NOTES_A_PAGE:
                self.merge()
                may_merge = False  # some notes may have to stay
            else:
                try:
                    notes = {change.name for change in changes if change.name.startswith(within)}
                    return self._page(root, notes, after, size, within)
                except LeafMissing:
                    self._mend(root)
            changes = self._changes.read()
            root = self._tree.root()
        self._is_built = False  # an operator may have deleted the index, to have it built anew
        return None

    def _page(
        self, root: Root, notes: Collection[str], after: str, size: int, within: str
    ) -> tuple[list[IndexedJob], bool]:
        found: list[IndexedJob] = []
        begin = after
        leaves: list[tuple[Leaf | None, str]] = [*leaves_after(root, after)]
        for leaf, end in leaves or [(None, "")]:
            entries = self._tree.entries(leaf) if leaf else {}
            changed = [name for name in notes if name > after and name >= begin and (not end or name < end)]
            # A job that cannot be read is shown as it was.
            for name, (_, entry) in self._readable(changed).items():
                entries.pop(name, None)
                if entry is not None:
                    entries[name] = entry
            some = sorted((name, entry) for name, entry in entries.items() if name > after and name.startswith(within))
            found += [_job_of(entry) for _, entry in some]
            if len(found) > size:
                return found[:size], True
            if end > within and not end.startswith(within):
                break  # the leaves behind have only later names
            begin = end
        return found, False

    def unsettled(self) -> Iterator[IndexedJob] | None:
        """Yield the jobs that are not settled, as of the last merge; None while the index does not have all jobs.

        It reads only leaves that have some.
        """
        root = self._tree.root()
        if not root.is_complete:
            self._is_built = False
        return self._unsettled(root) if root.is_complete else None

    def _unsettled(self, root: Root) -> Iterator[IndexedJob]:
        after = ""
        while root.is_complete:  # else its leaves were deleted meanwhile, and the next call returns None
            try:
                for leaf, _ in leaves_after(root, after):
                    entries = self._tree.entries(leaf) if leaf.unsettled else {}
                    for name, entry in sorted(entries.items()):
                        if name > after and not entry[SETTLED]:
                            after = name
                            yield _job_of(entry)
                return
            except LeafMissing:
                self._mend(root)
                root = self._tree.root()

    # --- Writing ---

    def merge(self) -> None:
        """Take in what has changed: each job that has notes is read once."""
        changes = self._changes.read()
        names = sorted({change.name for change in changes})
        for start in range(0, len(names), JOBS_A_COMMIT):
            # Always: before the notes go, no other merge may be left that has read an earlier state of these logs.
            numbers = self._update(names[start : start + JOBS_A_COMMIT], always=True)
            self._forget([one for one in changes if one.name in numbers and self._is_done(one, numbers[one.name])])

    def build(self) -> None:
        """Read the jobs that were there before the index, unless it has them all already."""
        if self._tree.root().is_complete:
            return
        names = self._names.all()
        while not (root := self._tree.root()).is_complete:
            some = [name for name in names if name > root.built_to][:JOBS_A_COMMIT]
            if some:
                found = self._readable(some)
                for name in some:
                    if name not in found:
                        self._changes.note(name)  # it is read again until that succeeds
                self._tree.commit(root, {name: entry for name, (_, entry) in found.items()}, built_to=some[-1])
            else:
                self._tree.commit(root, {}, is_complete=True)

    def refresh(self) -> None:
        """Read the jobs whose markers came or went since the last call, and sometimes all live ones."""
        live = {one.uid: one.folder for one in self._jobs.live()}
        before = self._live
        changed = {folder for uid, folder in live.items() if before is None or uid not in before}
        if before is None:
            # What ended while no process refreshed the index.
            changed |= {job.record.name for job in self.unsettled() or () if not job.record.unattended}
        else:
            changed |= {folder for uid, folder in before.items() if uid not in live}
        self._refreshes += 1
        if self._refreshes % REFRESHES_A_ROUND == 0:
            changed |= set(live.values())
        self._update_all(sorted(changed))
        self._live = live

    def check(self, most: int) -> list[str]:
        """Compare the next `most` jobs of the store, in the order of their names, with the index. Return their names.

        The call after the last job begins with the first.
        """
        names = self._check_after(self._checked_to, most)
        self._checked_to = names[-1] if names and len(names) == most else ""
        if not self._checked_to:
            self._tree.delete_unnamed()
        return names

    def catch_up(self) -> None:
        """Compare the next jobs with their logs, until all have been compared once since this process began.

        An earlier release may have run before, and have ended or deleted jobs without a trace but in their logs.
        """
        if self._caught_up_to is not None:
            names = self._check_after(self._caught_up_to, JOBS_A_COMMIT)
            self._caught_up_to = names[-1] if len(names) == JOBS_A_COMMIT else None

    def settle(self, jobs: Sequence[IndexedJob]) -> None:
        """Mark jobs as settled, except those that have changed since they were read."""
        for start in range(0, len(jobs), JOBS_A_COMMIT):
            some = {job.record.name: _entry_of(job.record, job.shown) for job in jobs[start : start + JOBS_A_COMMIT]}
            while not self._settle(some):
                pass

    def keep(self) -> None:
        """Bring the index up to date. A service calls it every `KEEP_INTERVAL_S`."""
        if not self._is_built:
            self.build()
            self._is_built = True
        self.merge()
        if self._clock() - self._refreshed_at >= REFRESH_INTERVAL_S:
            self.refresh()
            self._refreshed_at = self._clock()
            self._is_built = self._tree.root().is_complete  # an operator may delete the index while nothing changes
        self.catch_up()

    # --- Steps ---

    def _check_after(self, name: str, most: int) -> list[str]:
        names = list(self._names.after(name, most))
        self._update_all(names)
        return names

    def _mend(self, root: Root) -> None:
        """After `LeafMissing`: the next `keep` builds the index if its leaves were deleted."""
        self._tree.begin_anew_if_broken(root)
        self._is_built = False

    def _settle(self, entries: dict[str, Entry]) -> bool:
        root = self._tree.root()
        settled: dict[str, Entry | None] = {}
        try:
            for leaf, end in leaves_after(root, ""):
                own = {name for name in entries if name >= leaf.first and (not end or name < end)}
                there = self._tree.entries(leaf) if own else {}
                for name in own & there.keys():
                    if there[name] == entries[name]:
                        settled[name] = {**entries[name], SETTLED: True}
        except LeafMissing:
            self._mend(root)
            return False
        return self._tree.commit(root, settled)

    def _update_all(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), JOBS_A_COMMIT):
            self._update(names[start : start + JOBS_A_COMMIT])

    def _update(self, names: Sequence[str], *, always: bool = False) -> dict[str, int]:
        """Commit the entries of these jobs as their logs are now. Return the numbers of the records that were read.

        With `always` a root is written if any job could be read, whether or not its entry changes.
        """
        while names:
            root = self._tree.root()
            if not root.is_complete:
                self._is_built = False
            found = self._readable(names)
            if self._tree.commit(
                root, {name: entry for name, (_, entry) in found.items()}, always=always and bool(found)
            ):
                return {name: number for name, (number, _) in found.items()}
        return {}

    def _readable(self, names: Sequence[str]) -> dict[str, tuple[int, Entry | None]]:
        """Return what `_read_all` does, without jobs that cannot be read."""
        try:
            return self._read_all(names)
        except STORE_OUTAGES:
            raise
        except Exception as error:
            if len(names) == 1:
                logger.warning("%s cannot be indexed; the others go on: %s", names[0], error)
                return {}
        middle = len(names) // 2
        return {**self._readable(names[:middle]), **self._readable(names[middle:])}

    def _read_all(self, names: Sequence[str]) -> dict[str, tuple[int, Entry | None]]:
        """Return the number of each job's newest record, and its entry; None if there is no job."""
        if len(names) < 2:
            return {name: self._read(name) for name in names}
        with ThreadPoolExecutor(min(READ_AT_ONCE, len(names))) as pool:
            return dict(zip(names, pool.map(self._read, names), strict=True))

    def _read(self, name: str) -> tuple[int, Entry | None]:
        record = ResourceLog(self._store, log_prefix(name)).head()
        if record is None:
            return 0, None
        job = JobRecord.from_state(record.state)
        return record.number, None if job.state is JobState.DELETED else _entry_of(job, self._describe(job))

    def _is_done(self, change: Change, number: int) -> bool:
        """Return whether the record of a note was read, as `number` was, or will never be written."""
        if change.number != NO_RECORD and change.number > number:
            now = self._clock()
            if now - self._unwritten.setdefault(change.key, now) <= ABANDONED_S:
                return False
        self._unwritten.pop(change.key, None)
        return True

    def _forget(self, changes: Sequence[Change]) -> None:
        try:
            self._changes.forget(changes)
        except STORE_OUTAGES as error:
            logger.warning("notes of changed jobs stay, and are read again: %s", error.message)


def _entry_of(job: JobRecord, shown: dict[str, Any]) -> Entry:
    # As it reads from a leaf, so that an entry can be compared with one that was read.
    entry: Entry = json.loads(json.dumps({"job": job.as_state(), "shown": shown, SETTLED: False}))
    return entry


def _job_of(entry: Entry) -> IndexedJob:
    return IndexedJob(JobRecord.from_state(entry["job"]), entry["shown"], entry[SETTLED])


# --- The tree ---

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

        Return False if `base` is not the newest root: then nothing is committed, or another change follows it already.
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
