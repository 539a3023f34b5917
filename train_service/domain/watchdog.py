"""The rule by which a rank counts as hung. It uses the heartbeats that ranks send once a second."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIN_SECONDS = 30.0
MEDIAN_STEPS = 10.0
# How long a starting rank may make no progress: compilation takes minutes, never half an hour.
STARTING_SECONDS = 1800.0
# The factor by which a starting rank may stay silent for longer: imports and compilation may hold the interpreter lock.
STARTING_FACTOR = 3.0
# Frames in which a rank waits for the other ranks: in backward, where gradients are reduced, or in a collective call.
WAITING_FRAMES = (
    "torch/distributed/",
    "_engine_run_backward",
    "train_service/learning/ranks.py",
    "train_service/program/report_sender.py",
    "ray/train/v2/_internal/execution/collective_impl.py",
)
# Frames of the training thread, in Millrace's loop or in a program. Other threads of the process do not count.
TRAINING_FRAMES = ("in train_loop", "in run_program")


class Phase(enum.StrEnum):
    # Until the first step of the attempt is done: reading, building, compiling; and while a validation compiles.
    STARTING = "STARTING"
    TRAINING = "TRAINING"
    # Rank 0 waits for a checkpoint to be durable, and the other ranks wait for rank 0.
    SAVING = "SAVING"


@dataclass(frozen=True)
class RankState:
    """The state of one rank.

    `still_s` is the time since its last progress, as the rank itself reports it. `unresponsive_s` is the time since its
    last message of any kind.
    """

    rank: int
    step: int
    phase: Phase
    still_s: float
    unresponsive_s: float
    # The training thread waits for a call of the store, which may not answer.
    waits_for_store: bool = False


def limit_s(seconds_per_step: Sequence[float], first_step_s: float = 0.0) -> float:
    """Return how long a rank may make no progress.

    The limit is the larger of `MIN_SECONDS` and `MEDIAN_STEPS` median steps. While only the first step has been timed,
    its duration stands for the others, because no step takes longer.
    """
    return max(MIN_SECONDS, MEDIAN_STEPS * median(seconds_per_step or [first_step_s]))


def unresponsive_ranks(ranks: Sequence[RankState], limit: float) -> list[int]:
    """Return the ranks whose processes have stopped sending messages.

    A starting rank may hold the interpreter lock for longer, by `STARTING_FACTOR`.
    """
    return [
        rank.rank
        for rank in ranks
        if rank.unresponsive_s > limit * (STARTING_FACTOR if rank.phase is Phase.STARTING else 1)
    ]


def hung(ranks: Sequence[RankState], limit: float) -> list[int]:
    """Return the ranks that hang.

    The list is empty while all is well.

    A silent process counts as hung in any phase. Ranks advance in step, so while one of them progresses, or has a
    reason not to, the others wait for it. If all stand still, the ranks at the lowest step hold up the rest.

    A start has a longer limit. A checkpoint needs none: a rank that gathers or copies a checkpoint reports progress
    with each tensor, and a rank that waits for the upload is in a call of the store, which times out by itself.
    """
    unresponsive = unresponsive_ranks(ranks, limit)
    if unresponsive or not ranks:
        return unresponsive
    if any(one.waits_for_store or one.still_s <= _outage_timeout_s(one, limit) for one in ranks):
        return []
    lowest = min(one.step for one in ranks)
    return [rank.rank for rank in ranks if rank.step == lowest]


def _outage_timeout_s(rank_state: RankState, limit: float) -> float:
    return max(STARTING_SECONDS, limit) if rank_state.phase is Phase.STARTING else limit


def waits_for_others(stacks: str) -> bool:
    """Return whether a training thread waits for ranks. `stacks` is faulthandler's text of one rank."""
    for thread in stacks.split("\n\n"):
        if any(frame in thread for frame in TRAINING_FRAMES):
            return any(frame in thread for frame in WAITING_FRAMES)
    return False


def line_in_bundle(stacks: str, bundle_sha256: str) -> str:
    """Return the training thread's line in the program.

    The line is `path:line` of the innermost frame of the program's own code.

    Empty if the thread is not in the program's code. The folder of the code is named after the bundle's digest.
    """
    for thread in stacks.split("\n\n"):
        if any(frame in thread for frame in TRAINING_FRAMES):
            found = re.search(rf'File "[^"]*/{re.escape(bundle_sha256)}/([^"]+)", line (\d+)', thread)
            return f"{found[1]}:{found[2]}" if found else ""
    return ""


def culprits(suspects: Sequence[int], stacks: dict[int, str], unresponsive: Sequence[int]) -> list[int]:
    """Return which of the suspects hold up the others.

    These are the silent ranks; otherwise those that do not wait for other ranks; otherwise all suspects.
    """
    if unresponsive:
        return list(unresponsive)
    return [rank for rank in suspects if rank in stacks and not waits_for_others(stacks[rank])] or list(suspects)
