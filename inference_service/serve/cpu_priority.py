"""The CPU priority of a replica relative to the frontend."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

# Ray starts its workers with niceness 15, so that its own processes have priority. A frontend has 0.
NICENESS = -10


def raise_priority() -> None:
    """Gives all threads of this process, and those they start, priority over the frontend.

    A replica computes admitted requests, while a frontend may still refuse what it reads. At equal priority, a frontend
    that is flooded with calls doubles or triples the time of each batch: admitted requests become late, and batches
    become small. Logs a warning if the operating system forbids it.
    """
    try:
        for thread in Path("/proc/self/task").iterdir():
            if os.getpriority(os.PRIO_PROCESS, int(thread.name)) > NICENESS:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), NICENESS)
    except ProcessLookupError:  # a thread that ended meanwhile
        raise_priority()
    except PermissionError:
        logger.warning(
            "this replica keeps a niceness of %d, and gets little CPU beside a busy frontend: give Ray's workers "
            "CAP_SYS_NICE, or start Ray with RAY_worker_niceness=0 and the inference service with a niceness of 10",
            os.getpriority(os.PRIO_PROCESS, 0),
        )
