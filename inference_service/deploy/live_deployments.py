"""Markers of deployments that exist, so that a poll need not read the logs of all that ever were.

    live/deployment/{id}.{uid}.json

A marker is written before the log of its deployment, and removed by a poll once the log says that the deployment is
gone. So every deployment that exists has one. Some markers are of none: their creator was refused, or has died. A poll
removes them some time after it first saw them. A creator may pause for longer, so it marks its deployment once more at
the end.

An earlier release writes no markers. So the first poll of a store that it has used reads all logs, marks what has no
marker, and then notes in the store that all are marked. Such a release may still run beside this one, or again later.
So each poll also reads some of all logs, in turns. The first polls of a process read more, until it has read each log
once. Only then does it know all deployments.

    live/deployments-are-marked
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from inference_service.domain.deployment import Deployment, State
from shared.errors import STORE_OUTAGES, DataLoss
from shared.resource_log import Record, ResourceLog
from shared.storage import ObjectStore

logger = logging.getLogger(__name__)

FOLDER = "live/deployment"
ALL_ARE_MARKED = "live/deployments-are-marked"
DEPLOYMENTS = "deployments"
# How many of all deployments that ever were each look reads in turns.
DEPLOYMENTS_IN_TURNS = 16
# How many each look reads until all were read once. A start waits for the first look.
DEPLOYMENTS_A_FIRST_TURN = 64
# How many names of deployments are asked for together where all logs are read, and how many logs are read at a time.
NAMES_AT_ONCE = 1000
LOGS_AT_ONCE = 16
# A marker whose deployment does not exist so long after a process first saw the marker is of none.
DEPLOYMENT_IS_COMING_S = 600.0


@dataclass
class Poll:
    """The deployments that exist, in the order of their names, and the errors of unreadable logs by name."""

    found: list[Deployment] = field(default_factory=list)
    unreadable: dict[str, DataLoss] = field(default_factory=dict)


class LiveDeployments:
    """Polls the deployments that exist. Safe to call from several threads.

    `open_log` opens the log of a deployment, and `parse` returns the deployment that a record has.
    """

    def __init__(
        self,
        store: ObjectStore,
        open_log: Callable[[str], ResourceLog],
        parse: Callable[[str, Record | None], Deployment | None],
    ) -> None:
        self._store = store
        self._open_log = open_log
        self._parse = parse
        self._lock = threading.Lock()
        # The logs that the last look found to be live or unreadable, kept open.
        self._logs: Mapping[str, ResourceLog] = {}
        # The last id that was read in turns; empty before the first.
        self._turn_at = ""
        self._has_read_all = False
        # The store has the note that all deployments are marked. None before the first look.
        self._are_marked: bool | None = None
        # The markers of no deployment, and when each was first seen; in seconds of the monotonic clock.
        self._unmatched: dict[str, float] = {}

    @property
    def has_read_all(self) -> bool:
        """Whether each log that was there at the first look has been read, also those without a marker."""
        return self._has_read_all

    def mark(self, deployment: Deployment) -> None:
        """Mark a deployment. Call it before its log is written."""
        self._store.put(_key(deployment.name, deployment.uid), b"")

    def mark_again(self, deployment: Deployment) -> None:
        """Mark a deployment whose log has been written. If that fails, a look marks it in its turn."""
        try:
            self.mark(deployment)
        except STORE_OUTAGES as error:
            logger.warning("%s is not marked again: %s", deployment.name, error.message)

    def poll(self) -> Poll:
        """Read the deployments that exist. A log that is kept open costs one request if it has nothing new."""
        with self._lock:
            keys = {info.key for info in self._store.list(FOLDER)}
            self._unmatched = {key: since for key, since in self._unmatched.items() if key in keys}
            marked: dict[str, set[str]] = {}
            for name, uid in map(_name_and_uid, keys):
                marked.setdefault(name, set()).add(uid)
            poll, live_logs = Poll(), {}
            if self._are_marked is None:
                self._are_marked = self._store.exists(ALL_ARE_MARKED)
            in_turn, is_last = self._next_in_turn() if self._are_marked else (self._all_ids(), True)
            names = sorted({*marked, *self._logs, *(f"{DEPLOYMENTS}/{one}" for one in in_turn)})
            logs = {name: self._logs.get(name) or self._open_log(name) for name in names}
            are_marked = True
            for (name, log), deployment in zip(logs.items(), self._read(logs), strict=True):
                if isinstance(deployment, DataLoss):
                    poll.unreadable[name] = deployment
                    live_logs[name] = self._open_log(name)
                    continue
                is_live = deployment is not None and deployment.state is not State.GONE
                if deployment is not None and is_live:
                    poll.found.append(deployment)
                    live_logs[name] = log
                are_marked &= self._correct(name, deployment, is_live, marked.get(name, set()))
            # Not before: a look that fails has not read its turn.
            self._logs = live_logs
            self._turn_at = "" if is_last else in_turn[-1]
            self._has_read_all = self._has_read_all or is_last
            if are_marked and not self._are_marked:
                self._note_marked()
            return poll

    def marked(self) -> Sequence[str]:
        """Return the sorted ids of the deployments that have a marker. Some may not exist.

        The store may have refused a marker, so those are among them that the last poll found.
        """
        names = {_name_and_uid(info.key)[0] for info in self._store.list(FOLDER)} | set(self._logs)
        return sorted(name.removeprefix(f"{DEPLOYMENTS}/") for name in names)

    def _all_ids(self) -> Sequence[str]:
        ids: list[str] = []
        while some := self._store.folders_after(DEPLOYMENTS, ids[-1] if ids else "", NAMES_AT_ONCE):
            ids += some
        return ids

    def _read(self, logs: Mapping[str, ResourceLog]) -> list[Deployment | DataLoss | None]:
        """Return the deployments of the logs, or the errors of damaged ones."""

        def read(name: str) -> Deployment | DataLoss | None:
            try:
                return self._parse(name, logs[name].head())
            except DataLoss as error:
                return error

        if self._are_marked:
            return [read(name) for name in logs]
        # All that ever were.
        with ThreadPoolExecutor(LOGS_AT_ONCE) as pool:
            return list(pool.map(read, logs))

    def _note_marked(self) -> None:
        """Note that all deployments are marked. If that fails, the next poll reads all logs again, and notes it."""
        try:
            self._store.put(ALL_ARE_MARKED, b"")
            self._are_marked = True
        except STORE_OUTAGES as error:
            logger.warning("the next poll reads the logs of all deployments again: %s", error.message)

    def _next_in_turn(self) -> tuple[Sequence[str], bool]:
        """Return ids of deployments that may have no marker, and whether they are the last."""
        most = DEPLOYMENTS_IN_TURNS if self._has_read_all else DEPLOYMENTS_A_FIRST_TURN
        ids = self._store.folders_after(DEPLOYMENTS, self._turn_at, most)
        return ids, len(ids) < most

    def _correct(self, name: str, deployment: Deployment | None, is_live: bool, marked: Collection[str]) -> bool:
        """Mark a live deployment without a marker, and remove markers of none. Return whether the store did so."""
        uid = deployment.uid if deployment is not None else ""
        now = time.monotonic()
        seen = {key: self._unmatched.setdefault(key, now) for key in (_key(name, one) for one in marked if one != uid)}
        dead = [key for key, since in seen.items() if now - since > DEPLOYMENT_IS_COMING_S]
        if uid in marked and not is_live:
            dead.append(_key(name, uid))
        try:
            if deployment is not None and is_live and uid not in marked:
                self.mark(deployment)
            self._store.delete_all(dead)
        except STORE_OUTAGES as error:
            logger.warning("the markers of %s stay as they are: %s", name, error.message)
            return False
        return True


def _key(name: str, uid: str) -> str:
    return f"{FOLDER}/{name.removeprefix(f'{DEPLOYMENTS}/')}.{uid}.json"


def _name_and_uid(key: str) -> tuple[str, str]:
    deployment_id, _, uid = key.removeprefix(f"{FOLDER}/").removesuffix(".json").partition(".")
    return f"{DEPLOYMENTS}/{deployment_id}", uid
