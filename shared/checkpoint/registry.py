"""Which checkpoints of a job count: a resource log of its own, so that a stale attempt cannot add to it.

A checkpoint that is to go is first no longer named (it is `retiring`). Then its users are looked for: who left a marker
before keeps it, and it is named again. Where there is none the log says that it is condemned, from which there is no
way back; only then do its files go, and at last the log forgets it. Whoever wishes to use one leaves a marker first and
looks then whether it is named (`shared.checkpoint.users`), so one of both sees the other. Each step can be done again
by anybody, so what a process leaves half-way the next one finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shared.checkpoint.ranking import DEFAULT_RANKING, Ranking
from shared.durable import Durable, as_state, fields_of, known_of
from shared.log import Record, ResourceLog
from shared.storage import ObjectStore
from shared.user_markers import live_users as live_users


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry(Durable):
    """`name` is `trainingJobs/{j}/checkpoints/{c}`; `create_time` in seconds since the epoch; `final`: it is of the
    run's last step; `code_bundle`: `codeBundles/{sha256}` of the program that reported it, or of the code that makes
    the model, whose `model_entry` it then has; empty for other models. `fit`: the number of the run of its script that
    reported it, from 1, and 0 where there is no script."""

    name: str
    folder: str
    manifest_sha256: str
    step: int
    epoch: int
    attempt: int
    size_bytes: int
    create_time: float
    metrics: dict[str, float] = field(default_factory=dict)
    final: bool = False
    code_bundle: str = ""
    model_entry: str = ""
    fit: int = 0

    @property
    def is_of_program(self) -> bool:
        """Whether only the program that reported it can read it."""
        return bool(self.code_bundle) and not self.model_entry

    def as_state(self) -> dict[str, Any]:
        state: dict[str, Any] = as_state(self)
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CheckpointEntry:
        return cls(**fields_of(cls, state))


@dataclass(frozen=True)
class Retiring(Durable):
    """No longer named. `condemned`: nobody used it, and its files go."""

    entry: CheckpointEntry
    condemned: bool = False


@dataclass(frozen=True)
class RegistryState(Durable):
    """`attempt` is the one that it is open for; 0 before the first."""

    checkpoints: tuple[CheckpointEntry, ...] = ()
    retiring: tuple[Retiring, ...] = ()
    ranking: Ranking = DEFAULT_RANKING
    attempt: int = 0

    def as_record(self) -> dict[str, Any]:
        state: dict[str, Any] = as_state(self)
        del state["attempt"]  # the log's own
        return {**state, "checkpoints": list(state["checkpoints"]), "retiring": list(state["retiring"])}

    @classmethod
    def from_record(cls, record: Record | None) -> RegistryState:
        if record is None:
            return cls()
        return cls(
            **{
                **fields_of(cls, record.state),
                "checkpoints": tuple(CheckpointEntry.from_state(one) for one in record.state["checkpoints"]),
                "retiring": tuple(
                    Retiring(**{**fields_of(Retiring, one), "entry": CheckpointEntry.from_state(one["entry"])})
                    for one in record.state.get("retiring", ())
                ),
                "ranking": Ranking(**fields_of(Ranking, record.state.get("ranking", {}))),
                "attempt": record.attempt,
            }
        )


def data_folder_of(job_name: str) -> str:
    """Below which the files of a job's checkpoints are."""
    return f"{job_name}/checkpoints/data"


class CheckpointRegistry:
    """The committed checkpoints of the job `trainingJobs/{j}`. Not shared between threads; open one each."""

    def __init__(self, store: ObjectStore, job_name: str) -> None:
        self._store = store
        self._log = ResourceLog(store, f"{job_name}/checkpoints/log")
        self.data_folder = data_folder_of(job_name)

    def read(self) -> RegistryState:
        return RegistryState.from_record(self._log.head())

    def entries(self) -> list[CheckpointEntry]:
        """Oldest first."""
        return list(self.read().checkpoints)

    def best(self) -> CheckpointEntry | None:
        """By the job's own metric; of equals the later; where none was measured, the one furthest on."""
        state = self.read()
        return best(state.checkpoints, state.ranking)

    def fence(self, attempt: int, ranking: Ranking | None = None) -> list[CheckpointEntry]:
        """Opens the registry for `attempt` and closes it to earlier ones. Returns the entries.

        `ranking` says from now on which one is the best. Raises `StaleAttempt`.
        """

        def decide(head: Record | None) -> dict[str, Any] | None:
            before = RegistryState.from_record(head)
            after = replace(before, ranking=replace(before.ranking, **known_of(ranking))) if ranking else before
            opened = head is not None and head.attempt == attempt
            return None if opened and after == before else after.as_record()

        return list(RegistryState.from_record(self._log.update(decide, attempt=attempt)).checkpoints)

    def commit(self, entry: CheckpointEntry) -> None:
        """Makes it count. Raises `StaleAttempt` when a later attempt has opened the registry.

        A checkpoint of the same name is replaced: it is of the same position, written by an earlier attempt.
        """

        def add(before: RegistryState) -> RegistryState:
            kept = [one for one in before.checkpoints if one.name != entry.name]
            return replace(before, checkpoints=(*kept, entry))

        self._update(add, entry.attempt)

    def finish(self, name: str, attempt: int) -> None:
        """Makes the checkpoint `name` the run's final one: no step came after. Raises `StaleAttempt`."""

        def mark(before: RegistryState) -> RegistryState:
            marked = tuple(replace(one, final=True) if one.name == name else one for one in before.checkpoints)
            return replace(before, checkpoints=marked)

        self._update(mark, attempt)

    def retire(
        self, entries: Collection[CheckpointEntry], attempt: int | None = None, clock: Callable[[], float] = time.time
    ) -> list[CheckpointEntry]:
        """Takes these away, but for those that somebody uses. Returns what is named no longer.

        With `attempt` it raises `StaleAttempt` once a later one has opened the registry.
        """
        if not entries:
            return []
        folders = {one.folder for one in entries}

        def unname(before: RegistryState) -> RegistryState:
            going = tuple(Retiring(one) for one in before.checkpoints if one.folder in folders)
            kept = tuple(one for one in before.checkpoints if one.folder not in folders)
            return replace(before, checkpoints=kept, retiring=(*before.retiring, *going)) if going else before

        self._update(unname, attempt)
        return [one for one in self.settle(attempt, clock) if one.folder in folders]

    def settle(self, attempt: int | None = None, clock: Callable[[], float] = time.time) -> list[CheckpointEntry]:
        """Finishes what `retire` began, whoever called it. Returns the entries whose files are gone."""
        waiting = self.read().retiring
        if not waiting:
            return []
        used = {
            one.entry.folder
            for one in waiting
            if not one.condemned and live_users(self._store, one.entry.name, clock())
        }
        looked_at = {one.entry.folder for one in waiting}
        decided = self._update(lambda before: _decided(before, looked_at, used), attempt)
        gone = {one.entry.folder: one.entry for one in decided.retiring if one.condemned}
        for folder in gone:
            self._store.delete_folder(folder)

        def forget(before: RegistryState) -> RegistryState:
            return replace(before, retiring=tuple(one for one in before.retiring if one.entry.folder not in gone))

        self._update(forget, attempt)
        return list(gone.values())

    def clear(self, attempt: int) -> None:
        """Names nothing of the attempts before `attempt` any more and closes the registry to them; the files stay.

        What later attempts committed stays named: a new job of the name goes on behind the numbers of the deleted one.
        """

        def drop(before: RegistryState) -> RegistryState:
            return replace(
                before,
                checkpoints=tuple(one for one in before.checkpoints if one.attempt >= attempt),
                retiring=tuple(one for one in before.retiring if one.entry.attempt >= attempt),
            )

        self._update(drop, attempt)

    def _update(self, decide: Callable[[RegistryState], RegistryState], attempt: int | None) -> RegistryState:
        """Appends what `decide` makes of the newest state; nothing where it is the same."""

        def step(head: Record | None) -> dict[str, Any] | None:
            before = RegistryState.from_record(head)
            after = decide(before)
            fences = attempt is not None and attempt != before.attempt
            return after.as_record() if fences or after.as_record() != before.as_record() else None

        return RegistryState.from_record(self._log.update(step, attempt))


def _decided(before: RegistryState, looked_at: Collection[str], used: Collection[str]) -> RegistryState:
    """With those that are used named again, unless somebody else has condemned them; the others are condemned."""
    back = [one for one in before.retiring if one.entry.folder in used and not one.condemned]
    going = [
        replace(one, condemned=True) if one.entry.folder in looked_at else one
        for one in before.retiring
        if one not in back
    ]
    named = {one.name for one in before.checkpoints}
    # One that was written again meanwhile has another under its name: the old files stay while they are used.
    returned = [one.entry for one in back if one.entry.name not in named]
    checkpoints = sorted((*before.checkpoints, *returned), key=lambda one: (one.create_time, one.step))
    return replace(before, checkpoints=tuple(checkpoints if returned else before.checkpoints), retiring=tuple(going))


def latest(entries: Sequence[CheckpointEntry]) -> CheckpointEntry | None:
    """The one furthest on."""
    return max(entries, key=lambda entry: entry.step, default=None)


def best(entries: Sequence[CheckpointEntry], ranking: Ranking = DEFAULT_RANKING) -> CheckpointEntry | None:
    """The first by `ranking`, of equals the later; without any measured, the one furthest on."""
    return next(iter(ranking.best_first(entries)), latest(entries))
