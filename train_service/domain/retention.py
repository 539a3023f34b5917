"""Which checkpoints of a run are kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shared.checkpoint.ranking import Ranking


@dataclass(frozen=True, kw_only=True)
class Saved:
    """`damaged`: it was found so, and counts for nothing. `final`: it is of the run's last step."""

    name: str
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    final: bool = False
    damaged: bool = False


def outlived(
    checkpoints: Sequence[Saved], keep_newest: int, keep_best: int, ranking: Ranking, in_use: Collection[str] = ()
) -> list[str]:
    """The names of those that go, the oldest first.

    The `keep_newest` furthest on stay, or all where that is 0, and besides them the `keep_best` best. Final ones and
    those `in_use` (names) always stay, and count among the newest and the best like any other.
    """
    if keep_newest == 0:
        return []
    good = sorted((one for one in checkpoints if not one.damaged), key=lambda one: one.step, reverse=True)
    kept = {one.name for one in good[:keep_newest]}
    kept |= {one.name for one in ranking.best_first(good)[:keep_best]}
    kept |= {one.name for one in good if one.final}
    # Until there is a good one, a damaged one may be all that is left to look at.
    if not good:
        return []
    going = [one for one in checkpoints if one.name not in kept and one.name not in in_use]
    return [one.name for one in sorted(going, key=lambda one: one.step)]
