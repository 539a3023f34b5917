"""The rule by which a rank counts as hung, from what the ranks say of themselves once a second."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIN_SECONDS = 30.0
MEDIAN_STEPS = 10.0
# A rank that starts may stand still for so long: what it compiles takes minutes, never half an hour.
STARTING_SECONDS = 1800.0
# By so much longer may a rank that starts say nothing: what it imports and compiles may hold the interpreter.
STARTING_FACTOR = 3.0
# Frames in which a rank waits for the others: in backward, where gradients are added up, or in a call of its own.
WAITING_FRAMES = (
    "torch/distributed/",
    "_engine_run_backward",
    "train_service/learning/ranks.py",
    "train_service/program/rank_reports.py",
    "ray/train/v2/_internal/execution/collective_impl.py",
)
# Frames of the thread that trains, whatever else a worker's process runs: Millrace's loop, or a program's.
TRAINING_FRAMES = ("in train_loop", "in run_program")


class Phase(enum.StrEnum):
    # Until the first step of the attempt is done: reading, building, compiling; and while a validation compiles.
    STARTING = "STARTING"
    TRAINING = "TRAINING"
    # Rank 0 waits for a checkpoint to be durable, and others for rank 0.
    SAVING = "SAVING"


@dataclass(frozen=True)
class RankState:
    """`still_s`: since it last got on, by its own word; `unresponsive_s`: since it last said anything at all."""

    rank: int
    step: int
    phase: Phase
    still_s: float
    unresponsive_s: float
    # The thread that trains waits for a call of the store, which may not answer.
    waits_for_store: bool = False


def limit_s(seconds_per_step: Sequence[float], first_step_s: float = 0.0) -> float:
    """How long a rank may stand still: the larger of 30 s and ten median steps. While only the first step was timed, it
    stands for the others: none takes longer."""
    return max(MIN_SECONDS, MEDIAN_STEPS * median(seconds_per_step or [first_step_s]))


def unresponsive_ranks(ranks: Sequence[RankState], limit: float) -> list[int]:
    """Those whose process says nothing any more. One that starts may keep the interpreter to itself for longer."""
    return [
        one.rank
        for one in ranks
        if one.unresponsive_s > limit * (STARTING_FACTOR if one.phase is Phase.STARTING else 1)
    ]


def hung(ranks: Sequence[RankState], limit: float) -> list[int]:
    """The ranks that hang; empty while all is well.

    A process that says nothing hangs in any phase. Ranks go in step, so as long as one of them gets on, or has a reason
    not to, the others wait for it. Of those that stand still, the ones at the lowest step hold up the rest. A start has
    more patience; a checkpoint has none of its own: whoever gathers or copies one gets on with each tensor, and who
    waits for its upload is in a call of the store, which gives up by itself.
    """
    unresponsive = unresponsive_ranks(ranks, limit)
    if unresponsive or not ranks:
        return unresponsive
    if any(one.waits_for_store or one.still_s <= _outage_timeout_s(one, limit) for one in ranks):
        return []
    lowest = min(one.step for one in ranks)
    return [one.rank for one in ranks if one.step == lowest]


def _outage_timeout_s(one: RankState, limit: float) -> float:
    return max(STARTING_SECONDS, limit) if one.phase is Phase.STARTING else limit


def waits_for_others(stacks: str) -> bool:
    """Whether the training thread of such stacks (faulthandler's text) waits for other ranks."""
    for thread in stacks.split("\n\n"):
        if any(frame in thread for frame in TRAINING_FRAMES):
            return any(frame in thread for frame in WAITING_FRAMES)
    return False


def line_in_bundle(stacks: str, bundle_sha256: str) -> str:
    """`path:line` of the innermost frame of a program's own code in the thread that trains; empty where it is in none.

    The code lies in a folder that has the bundle's digest for its name."""
    for thread in stacks.split("\n\n"):
        if any(frame in thread for frame in TRAINING_FRAMES):
            found = re.search(rf'File "[^"]*/{re.escape(bundle_sha256)}/([^"]+)", line (\d+)', thread)
            return f"{found[1]}:{found[2]}" if found else ""
    return ""


def culprits(suspects: Sequence[int], stacks: dict[int, str], unresponsive: Sequence[int]) -> list[int]:
    """Which of the suspects hold up the others: who is silent, else who does not wait for anybody, else all."""
    if unresponsive:
        return list(unresponsive)
    return [rank for rank in suspects if rank in stacks and not waits_for_others(stacks[rank])] or list(suspects)
