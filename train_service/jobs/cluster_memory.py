"""Records of recent clusters, and of the present cluster's use.

The reconciler writes them for the service's process, which has no connection to Ray.

`clusters/train.json` holds each distinct set of nodes with the time when it was last seen. A node that is absent for a
while is part of an earlier set: a job that fits that set is accepted, and waits.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shared.errors import FailedPrecondition
from shared.settings import CLUSTER_MAX_VARIABLE
from shared.storage import ObjectMissing, ObjectStore
from train_service.domain.capacity import ClusterUse, Resources, beyond, first_bundle, lasts, never_fits, resources_text
from train_service.domain.spec import TrainingSpec

logger = logging.getLogger(__name__)

KEY = "clusters/train.json"
USE_KEY = "clusters/use.json"
# The use is written again after this time although nothing changed. This shows that the reconciler still runs.
USE_REFRESHED_S = 60.0
GIB = 2.0**30
REMEMBERED_S = 24 * 3600.0
# How often an unchanged set of nodes is written again.
REFRESHED_S = 600.0
AS_LATE_S = 3600.0
MAX_REMEMBERED = 100


class ClusterMemory:
    """The store's records of clusters. `clock` returns seconds since the epoch."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._last: tuple[list[dict[str, float]], float] = ([], 0.0)
        self._last_use: tuple[ClusterUse | None, float] = (None, 0.0)

    def note(self, nodes: Sequence[Resources]) -> None:
        """Record the totals of all present nodes. Cheap while nothing changes."""
        now = self._clock()
        seen = sorted((_lasting(node) for node in nodes), key=str)
        last, at = self._last
        if not seen or (seen == last and now - at < REFRESHED_S):
            return
        lasting = [one for one in self._read() if now - one["seen"] < REMEMBERED_S and one["nodes"] != seen]
        kept = [*_largest(lasting), {"nodes": seen, "seen": now}][-MAX_REMEMBERED:]
        self._store.put(KEY, json.dumps({"clusters": kept}).encode())
        self._last = (seen, now)

    def note_use(self, use: ClusterUse) -> None:
        """Record who uses the cluster now. Cheap while nothing changes."""
        now = self._clock()
        last, at = self._last_use
        if use == last and now - at < USE_REFRESHED_S:
            return
        self._store.put(USE_KEY, json.dumps({"time": now, **asdict(use)}).encode())
        self._last_use = (use, now)

    def use(self) -> tuple[ClusterUse, float]:
        """Return the cluster's use and its time.

        The time is in seconds since the epoch, or 0 if the use was never seen.
        """
        try:
            state = json.loads(self._store.get(USE_KEY))
            return ClusterUse.from_state(state), float(state["time"])
        except ObjectMissing:
            return ClusterUse(), 0.0

    def clusters(self) -> list[list[Resources]]:
        """Return the last day's sets of nodes. The newest is the last."""
        now = self._clock()
        return [one["nodes"] for one in self._read() if now - one["seen"] < REMEMBERED_S]

    def _read(self) -> list[dict[str, Any]]:
        try:
            found = json.loads(self._store.get(KEY))["clusters"]
            return [{"nodes": list(one["nodes"]), "seen": float(one["seen"])} for one in found]
        except ObjectMissing:
            return []
        except (ValueError, KeyError, TypeError):
            logger.exception("%s cannot be read; the reconciler writes it anew", KEY)
            return []


def check_ever_fits(spec: TrainingSpec, memory: ClusterMemory, most: Mapping[str, float] | None) -> None:
    """Raise `FailedPrecondition` for workers that never fit.

    The error names the fields that request too much for the fewest workers. With `most`, the operator's bound, a
    request may not exceed it. Otherwise a cluster of the last day must be able to hold the workers.
    """
    if most is None:
        clusters = memory.clusters()
        fields, has = never_fits(spec, clusters)
        known = f"the cluster has {has} in all"
        remedy = f"ask for less; of a cluster that grows, its operator sets {CLUSTER_MAX_VARIABLE}"
        bundle = first_bundle(spec, clusters[-1] if clusters else [])
    else:
        fields, known = beyond(spec, most), f"the cluster never has more than {resources_text(most)}"
        remedy, bundle = "ask for less", first_bundle(spec, [])
    if fields:
        number = spec.effective_min_workers
        wanted = f"{number} worker{'' if number == 1 else 's'} of {resources_text(bundle)} can never be placed"
        raise FailedPrecondition(
            f"{', '.join(fields)}: {wanted}: {known}; {remedy}",
            reason="NEVER_SCHEDULABLE",
            fields=[(field, f"{known}; {remedy}") for field in fields],
        )


def _largest(clusters: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the clusters without parts of others.

    A cluster is dropped if it is part of a larger one that was seen as late or nearly as late. A job that fits a part
    of a cluster fits all of it.
    """
    sizes = [_counted(cluster["nodes"]) for cluster in clusters]
    return [
        one
        for one, size in zip(clusters, sizes, strict=True)
        if not any(
            size < larger and one["seen"] <= other["seen"] + AS_LATE_S
            for other, larger in zip(clusters, sizes, strict=True)
        )
    ]


def _counted(nodes: Sequence[Resources]) -> Counter[str]:
    return Counter(json.dumps(node, sort_keys=True) for node in nodes)


def _lasting(node: Resources) -> dict[str, float]:
    """Return the lasting resources of a node.

    Memory is in whole GiB, because it differs a little at each start of a node.
    """
    kept = {name: amount for name, amount in node.items() if lasts(name)}
    return {name: math.ceil(amount / GIB) * GIB if name == "memory" else amount for name, amount in kept.items()}
