"""The queue of jobs for a cluster's resources: who was before takes first, and only what fits begins.

A job that waits holds the place of its fewest workers against those behind it, so that smaller jobs cannot pass it for
ever. It holds only resources that it asks for: jobs that ask for others begin. An attempt that has begun counts until
its workers hold their resources, as free resources still include them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from train_service.domain.capacity import STRICT_PACK, STRICT_SPREAD, Resources

BEFORE = "is before it in the queue"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Workers that take resources which a cluster still reports as free.

    `bundle` is what each of them requests, and `job` the name of their job.
    """

    bundle: Resources
    workers: int
    strategy: str
    job: str = ""


def left_by(claims: Sequence[Claim], free: Sequence[Resources], totals: Sequence[Resources]) -> list[Resources]:
    """Return what the claims leave of the free resources of each node. `totals` are all resources of each node.

    Each worker takes the node that has the most room for its kind. If none has, it takes what there is of the node that
    could hold the most of its kind if it were empty: it is the next one there. Workers that must be on one node all
    take from one that could hold them all.
    """
    left = [dict(node) for node in free]
    for claim in claims:
        taken = set[int]()
        # At once, so that each of them takes from the same node.
        together = claim.workers if claim.strategy == STRICT_PACK else 1
        for _ in range(0, claim.workers, max(together, 1)):
            alone = claim.strategy == STRICT_SPREAD
            could = [place for place, total in enumerate(totals) if _capacity(total, claim.bundle) >= together]
            places = [place for place in could if not (alone and place in taken)]
            if not places:
                break
            best = max(places, key=lambda at: [_capacity(node[at], claim.bundle) for node in (left, totals)])
            taken.add(best)
            for name, need in claim.bundle.items():
                left[best][name] = max(0.0, left[best].get(name, 0.0) - together * need)
    return list(left)


def _capacity(node: Resources, bundle: Resources) -> float:
    """Return for how many workers a node has room, with fractions, so that a node that is nearly free counts more."""
    return min(((node.get(name, 0.0) + 1e-9) / need for name, need in bundle.items()), default=0.0)
