"""What is said of an exception that the training of a rank raised: a model, a loss or a step of a user's own may."""

from __future__ import annotations

import traceback

from shared.code_loading import line_in_code
from shared.errors import Internal, MillraceError, first_line
from shared.log import StaleAttempt
from train_service.domain.watchdog import WAITING_FRAMES

# What backends say to a rank whose peer is gone. Its own end says nothing new.
OF_A_LOST_PEER = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe", "tcpstore")


def as_reported(error: Exception, rank: int, step: int) -> Exception:
    """`error` as one of ours that names its type, the first line of its message, the rank, how many steps were done,
    and the line of a user's own code. Itself where it is one of ours already, or where the rank only lost others that
    it waited for.

    It counts as a failure, and another attempt is made: what raised once may not again.
    """
    if isinstance(error, (MillraceError, StaleAttempt)) or lost_others(error):
        return error
    kind, line = type(error).__name__, line_in_code(error)
    at = f" at {line}" if line else ""
    return Internal(
        f"{kind} on rank {rank} at step {step}{at}: {first_line(error)}",
        reason="WORKER_RAISED",
        metadata={"ranks": str(rank), "step": str(step), "exception": kind, **({"line": line} if line else {})},
    )


def lost_others(error: Exception) -> bool:
    """Whether it comes from a call in which ranks wait for one another."""
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    last = f"{frames[-1].filename} {frames[-1].name}" if frames else ""
    waited = any(frame in last for frame in WAITING_FRAMES if frame != "_engine_run_backward")
    return waited or any(text in str(error).lower() for text in OF_A_LOST_PEER)
