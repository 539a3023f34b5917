"""The nodes of Ray that this process has seen lately: what none of them could hold is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from inference_service.domain.deployment import Spec
from inference_service.domain.fitting import Resources, check_fits, check_within

# A node that is away may be starting again, or be replaced by its like.
REMEMBERED_S = 3600.0


class Cluster:
    """`most` is the operator's bound of a cluster that grows, None where there is none. `clock` gives seconds. Safe to
    read from any thread."""

    def __init__(self, most: Resources | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._seen: dict[str, tuple[Resources, float]] = {}  # by id

    def note(self, nodes: Mapping[str, Resources]) -> None:
        """What the nodes that there are now have in all, by their ids."""
        now_s = self._clock()
        kept = {name: one for name, one in self._seen.items() if now_s - one[1] < REMEMBERED_S}
        self._seen = {**kept, **{name: (resources, now_s) for name, resources in nodes.items()}}

    def check_fits(self, spec: Spec, versions: int = 1) -> None:
        """Raises `FailedPrecondition` where the replicas of so many versions could never be placed at once, as far as
        anybody knows."""
        if self._most is not None:
            check_within(spec, self._most, versions)
        else:
            check_fits(spec, [resources for resources, _ in self._seen.values()], versions)
