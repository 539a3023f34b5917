"""Why a run of Ray Train failed, in plain values: what its process knows of it, and what the attempt makes of that."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.train import TrainingFailedError

from shared.errors import MillraceError, Unavailable, error_from_record
from shared.jobs.transitions import INSUFFICIENT_RESOURCES, RESIZED
from train_service.attempt.ray_run import capacity_was_taken

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """`own`: the first error of our own that a worker raised, as a record; `ranks`: those that failed, with commas."""

    own: dict[str, Any] | None
    ranks: str
    lacks_resources: bool
    text: str

    @classmethod
    def of(cls, error: TrainingFailedError) -> Failure:
        failures = list(getattr(error, "worker_failures", {}).items())
        known = next((own for _, raised in failures if (own := _own_error(raised)) is not None), None)
        return cls(
            own=known.as_record() if known is not None else None,
            ranks=",".join(str(rank) for rank, _ in failures),
            lacks_resources=capacity_was_taken(error),
            text=str(error),
        )

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Failure:
        return cls(
            own=message["own"], ranks=message["ranks"], lacks_resources=message["lacks_resources"], text=message["text"]
        )

    def cause(self, ended_for: MillraceError | None) -> MillraceError:
        """What a worker raised, else what we ended the attempt for, else that the workers were lost.

        A change of size ends no worker: one that is lost before it has stopped by itself is a fault.
        """
        if self.own is not None:
            return error_from_record(self.own)
        if ended_for is not None and ended_for.specific_reason != RESIZED:
            return ended_for
        if self.lacks_resources:
            return Unavailable("room was taken while the workers started", reason=INSUFFICIENT_RESOURCES)
        logger.warning("attempt lost: %s", self.text)
        return Unavailable(
            f"the workers were lost{self.ranks and f'; first on rank {self.ranks}'}",
            reason="WORKERS_LOST",
            metadata={"ranks": self.ranks},
        )


def _own_error(raised: BaseException | None) -> MillraceError | None:
    """Follows causes down to an error of ours; Ray wraps what workers raise."""
    while raised is not None:
        if isinstance(raised, MillraceError):
            return raised
        raised = getattr(raised, "cause", None) or raised.__cause__
    return None
