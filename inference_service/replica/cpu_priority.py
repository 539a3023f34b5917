"""A replica's share of the CPUs beside the frontend."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

# Ray starts its workers with 15, so that its own processes come first.
NICENESS = 0


def raise_priority() -> None:
    """Gives all threads of this process, and those that they start, the niceness that a frontend has by default.

    With Ray's own a replica gets what a busy frontend and its clients leave of the CPUs, so under overload its batches
    take several times as long as expected, and requests that were admitted are late. Logs a warning where the operating
    system forbids it.
    """
    try:
        for thread in Path("/proc/self/task").iterdir():
            if os.getpriority(os.PRIO_PROCESS, int(thread.name)) > NICENESS:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), NICENESS)
    except ProcessLookupError:  # a thread that ended meanwhile
        raise_priority()
    except PermissionError:
        logger.warning(
            "this replica keeps Ray's niceness of %d, and gets little CPU beside a busy frontend: start Ray with "
            "RAY_worker_niceness=0, or give its workers CAP_SYS_NICE",
            os.getpriority(os.PRIO_PROCESS, 0),
        )
