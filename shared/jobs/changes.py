"""Notes of changed jobs: which jobs' entries in the index (`shared.jobs.index`) may be behind their logs.

A writer puts a note before it appends to a job's log. The note names the record that is about to be written. So the
note outlives the record's writer, whichever of the two writes is its last, and a merge of the index can
tell whether the record is there yet. A note is an empty object whose key says everything, so a listing reads a thousand
notes at once.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from shared.storage import ObjectStore

# The kinds of jobs that have an index. Notes of other kinds would never be removed.
INDEXED_KINDS = frozenset({"train", "sweep", "import"})
# The number in a note of a change that is written already, and is not in the log: a report, or what a job waits for.
NO_RECORD = 0
KEY = re.compile(r"(?P<name>.+)\.(?P<number>\d+)\.[0-9a-f]+")


@dataclass(frozen=True)
class Change:
    """A note: the job `name` changes with the record `number` of its log. `key` is the note's own."""

    name: str
    number: int
    key: str


class Changes:
    """The notes of one kind of jobs. A kind without an index has none."""

    def __init__(self, store: ObjectStore, kind: str) -> None:
        self._store = store
        self._folder = f"{folder_of_index(kind)}/changes"
        self._is_indexed = kind in INDEXED_KINDS

    def note(self, name: str, number: int = NO_RECORD) -> None:
        """Note that record `number` of the job's log is about to be written."""
        if self._is_indexed:
            # Each note has a key of its own: a reader removes those that it has read, and no later one.
            self._store.put(f"{self._folder}/{name.replace('/', ',')}.{number}.{uuid.uuid4().hex[:12]}", b"")

    def read(self) -> list[Change]:
        """Return all notes, in the order of the jobs' names."""
        keys = [info.key for info in self._store.list(self._folder)]
        found = [(match, key) for key in keys if (match := KEY.fullmatch(key.rsplit("/", 1)[-1]))]
        changes = [Change(match["name"].replace(",", "/"), int(match["number"]), key) for match, key in found]
        return sorted(changes, key=lambda one: (one.name, one.number))

    def forget(self, changes: Iterable[Change]) -> None:
        self._store.delete_all(change.key for change in changes)


def folder_of_index(kind: str) -> str:
    return f"index/{kind}/v1"
