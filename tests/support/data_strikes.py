"""Whom the tests of kills strike in the data service, on each store, and that it is done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.support.chunk_sender import commit, send
from tests.support.data_place import DataPlace, Gate
from tests.support.faults import Faults
from tests.support.killable_s3 import KillableS3
from tests.support.stores import STORES
from tests.support.waiting import wait_until

S3_AWAY_S = 5.0


@dataclass
class Struck:
    """A place on the kind of store that `store` names, and who can be struck there. `s3` is there on S3 alone."""

    place: DataPlace
    gate: Gate
    store: str
    s3: KillableS3 | None = None
    faults: Faults | None = None

    @property
    def count(self) -> int:
        return self.place.struck + (self.s3.kills if self.s3 else 0)

    @contextmanager
    def counted_in(self, faults: Faults) -> Iterator[None]:
        self.faults = faults
        try:
            yield
        finally:
            self.faults = None
            self.gate.open()  # what a failed test left at work would be in the next one's way


def uploaded(place: DataPlace, data: bytes) -> str:
    upload = place.start_upload()
    assert send(place.client.data, upload, data, 0, len(data)) == len(data)
    commit(place.client.data, upload, data)
    return upload


# Waits until who was struck is back.
Recover = Callable[[], None]


def strike_service(struck: Struck) -> Recover:
    struck.place.strike_service()
    return struck.place.service.start


def strike_actor(struck: Struck) -> Recover:
    """The process of the attempt."""
    struck.place.strike_pids(struck.place.at_work())
    return lambda: None


def strike_worker(struck: Struck) -> Recover:
    """One that has rows before it; of those at the gate, if there are any, and of these one with the last rows."""
    busy = struck.place.workers()
    gated = [pid for pid in struck.gate.at_the_last() or struck.gate.waiting() if pid in busy]
    struck.place.strike_pids((gated or busy)[:1])
    return lambda: None


def strike_standby(struck: Struck) -> Recover:
    """The process that waits for the next attempt; if there are several, as after a service's death, all."""
    wait_until(lambda: bool(struck.place.spares()), "a spare")
    struck.place.strike_pids(struck.place.spares())
    return lambda: None


def strike_s3(struck: Struck) -> Recover:
    assert struck.s3
    return struck.s3.kill_for(S3_AWAY_S).join


STRIKES: Mapping[str, Callable[[Struck], Recover]] = {
    "service": strike_service,
    "actor": strike_actor,
    "worker": strike_worker,
    "spare": strike_standby,
    "s3": strike_s3,
}
NAMES = {"actor": "attempt", "worker": "Ray worker", "spare": "waiting attempts", "s3": "S3 server"}


def strike(struck: Struck, victim: str, stage: str) -> Recover:
    """`stage`: what is under way."""
    before = struck.count
    recover = STRIKES[victim](struck)
    assert struck.count > before
    if struck.faults:
        struck.faults.add(f"SIGKILL {NAMES.get(victim, victim)}", stage, STORES[struck.store], struck.count - before)
    return recover


def cases(victims: Mapping[str, str], quick: Collection[str]) -> pytest.MarkDecorator:
    """The victims of each stage, on each kind of store. All but the ids that are `quick` are for `make chaos`."""
    every = [
        pytest.param(store, stage, victim, id=name, marks=[] if name in quick else pytest.mark.chaos)
        for store, shown in STORES.items()
        for stage, names in victims.items()
        for victim in names.split()
        if store == "s3" or victim != "s3"
        for name in [f"{stage}-{victim}-{shown}"]
    ]
    return pytest.mark.parametrize(("scene", "stage", "victim"), every, indirect=["scene"])
