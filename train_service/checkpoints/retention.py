"""Which checkpoints a run keeps, and the deletion of the others.

A reconciler deletes them, too, for an attempt that died; it needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.checkpoint.ranking import Ranking
from shared.checkpoint.references import live_references
from shared.storage import ObjectStore
from train_service.domain.spec import CheckpointPolicy


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A saved checkpoint as retention sees it.

    A `damaged` one counts for nothing. A `final` one is of the run's last step.
    """

    name: str
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    final: bool = False
    damaged: bool = False


def outlived(
    checkpoints: Sequence[Saved], keep_newest: int, keep_best: int, ranking: Ranking, in_use: Collection[str] = ()
) -> list[str]:
    """Return the names of the checkpoints to delete.

    The oldest comes first.

    The `keep_newest` newest stay, or all if that is 0, and in addition the `keep_best` best. Final ones and those
    `in_use` (names) always stay, and count among the newest and the best like any other.
    """
    if keep_newest == 0:
        return []
    good = sorted((one for one in checkpoints if not one.damaged), key=lambda one: one.step, reverse=True)
    kept = {one.name for one in good[:keep_newest]}
    kept |= {one.name for one in ranking.best_first(good)[:keep_best]}
    kept |= {one.name for one in good if one.final}
    # Until there is a good checkpoint, a damaged one may be all that is left to examine.
    if not good:
        return []
    going = [checkpoint for checkpoint in checkpoints if checkpoint.name not in kept and checkpoint.name not in in_use]
    return [one.name for one in sorted(going, key=lambda one: one.step)]


def retain(
    store: ObjectStore,
    registry: CheckpointRegistry,
    policy: CheckpointPolicy,
    attempt: int,
    damaged: Collection[str] = (),
    fit: int = 0,
) -> list[CheckpointEntry]:
    """Delete and return the checkpoints of run `fit` that outlived `policy`.

    Run 0 is that of a job whose code is no script. Each run of a script keeps its own.

    Checkpoints in use stay. `damaged` are folders. Raises `StaleAttempt`. Deletions that an earlier attempt left
    unfinished are finished first.
    """
    registry.settle(attempt)
    state = registry.read()
    saved = {
        checkpoint.name: Saved(
            name=checkpoint.name,
            step=checkpoint.step,
            metrics=checkpoint.metrics,
            final=checkpoint.final,
            damaged=checkpoint.folder in damaged,
        )
        for checkpoint in state.checkpoints
        if checkpoint.fit == fit
    }
    going = outlived(list(saved.values()), policy.keep_newest, policy.keep_best, state.ranking)
    # Look up references only of the checkpoints that would be deleted.
    used = {name for name in going if live_references(store, name, time.time())}
    return registry.retire([one for one in state.checkpoints if one.name in going and one.name not in used], attempt)
