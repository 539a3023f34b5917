"""The `fit()` calls of a job's script, kept in its folder: which run each of them is, and which have ended.

    {job}/fits/{uid}/{number:04d}.json         how the run was called when it first began
    {job}/fits/{uid}/{number:04d}-done.json    with what it ended

`uid` is the job's: what a late process of a deleted job writes is nothing to another job of its name.

An attempt runs the whole script. A `fit()` that ended in an earlier attempt returns at once; one that was cut short
goes on at its own newest checkpoint. Runs are identified by name and storage path, as Ray does. A name that a script
makes up anew each time (Ray's own default is a date) is found by its line: the first run of that line that this attempt
has not met yet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.durable import fields_of
from shared.storage import ObjectMissing, ObjectStore


@dataclass(frozen=True, kw_only=True)
class FitCall:
    """What tells a `fit()` from others. `line` is `cells.py:31`, where it is called; `function` the qualified name of
    its training function; `config_sha256` of what that gets."""

    name: str
    storage_path: str
    line: str
    function: str
    config_sha256: str


@dataclass(frozen=True, kw_only=True)
class FitDone:
    """`report` is the number of its newest report, `checkpoint` the name of its newest checkpoint or empty, `metrics`
    those of the newest report; `function` and `config_sha256` as in its call."""

    function: str
    config_sha256: str
    report: int
    checkpoint: str
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One run of the script; `number` counts from 1, in the order in which they first began."""

    number: int
    call: FitCall
    done: FitDone | None = None
    # Sentences on what the job overrides, which were reported before.
    reported_overrides: Sequence[str] = field(default_factory=tuple)
    # What it computes on, CPU or GPU, where its script chose; else empty.
    device: str = ""

    def is_done(self, call: FitCall) -> bool:
        """Whether this very training has ended. With another configuration, e.g. more epochs, it goes on."""
        done = self.done
        return done is not None and (done.function, done.config_sha256) == (call.function, call.config_sha256)


def matching(fits: Sequence[Fit], call: FitCall, met: Collection[int]) -> Fit | None:
    """The run that `call` goes on with, None where it is a new one. `met` are the numbers of runs that this attempt has
    been asked for before."""
    named = (one for one in fits if (one.call.name, one.call.storage_path) == (call.name, call.storage_path))
    placed = (one for one in fits if one.call.line == call.line and one.number not in met)
    return next(named, None) or next(placed, None)


class Fits:
    """Those of one job. All methods block on the store and may be repeated. Only the attempt at work writes."""

    def __init__(self, store: ObjectStore, job_name: str, uid: str) -> None:
        self._store = store
        self._folder = f"{job_name}/fits/{uid}"

    def read(self) -> list[Fit]:
        """In the order of their numbers."""
        found: list[Fit] = []
        while (begun := self._get(f"{len(found) + 1:04d}")) is not None:
            number = len(found) + 1
            done = self._get(f"{number:04d}-done")
            found.append(
                Fit(
                    number=number,
                    call=FitCall(**fields_of(FitCall, begun["call"])),
                    done=FitDone(**fields_of(FitDone, done)) if done is not None else None,
                    reported_overrides=tuple(begun["reported_overrides"]),
                    device=begun.get("device", ""),
                )
            )
        return found

    def begin(self, fit: Fit) -> None:
        begun = {
            "call": asdict(fit.call),
            "reported_overrides": list(fit.reported_overrides),
            "device": fit.device,
        }
        self._put(f"{fit.number:04d}", begun)

    def finish(self, number: int, done: FitDone) -> None:
        self._put(f"{number:04d}-done", asdict(done))

    def _get(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._store.get(f"{self._folder}/{name}.json"))
        except ObjectMissing:
            return None
        return found

    def _put(self, name: str, state: Mapping[str, Any]) -> None:
        self._store.put(f"{self._folder}/{name}.json", json.dumps(state).encode())
