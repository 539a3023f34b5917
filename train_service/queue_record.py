"""The record of what waiting jobs keep for themselves, for attempts that could take more workers.

The reconciler knows the queue, and writes `clusters/queue.json`. An attempt reads it where it finds room to grow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from shared.durable import fields_of
from shared.storage import ObjectMissing, ObjectStore
from train_service.domain.capacity import Claim

KEY = "clusters/queue.json"
# Claims are written again after this time although nothing changed. This shows that the reconciler still runs.
REFRESHED_S = 60.0
# Older claims count no more: no reconciler runs that could begin their jobs. Clocks of nodes may differ by a minute.
EXPIRED_S = 3 * REFRESHED_S


class QueueRecord:
    """Writer and reader of the claims in the store. `clock` returns seconds since the epoch."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._last: tuple[list[Claim], float] | None = None

    def write(self, claims: Sequence[Claim]) -> None:
        """Record the claims of the jobs that wait, the first one first. Costs nothing while nothing changes."""
        now, noted = self._clock(), list(claims)
        if self._last is not None:
            last, at = self._last
            if noted == last and (not noted or now - at < REFRESHED_S):
                return
        state = {"claims": [asdict(claim) for claim in noted], "time": now}
        self._store.put(KEY, json.dumps(state).encode())
        self._last = (noted, now)

    def read(self) -> list[Claim]:
        """Return the claims, without those that have expired."""
        try:
            state = json.loads(self._store.get(KEY))
        except ObjectMissing:
            return []
        if self._clock() - state["time"] > EXPIRED_S:
            return []
        return [Claim(**fields_of(Claim, claim)) for claim in state["claims"]]
