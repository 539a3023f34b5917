"""Whether a front process hangs, by the signs of life that it gives several times a second."""

from __future__ import annotations

import asyncio
from pathlib import Path

from inference_service.fronts.siblings import beat_of

LOOK_EVERY_S = 5.0
# In a row. They are counted, not timed: who was stopped with its parent has its time once both go on.
SILENT_LOOKS = 12


async def hangs(folder: Path, number: int, pid: int) -> None:
    """Returns once the front of this number has given no sign of life for a minute, having given one before. A folder
    in which no file can be touched, read-only by now, says nothing of those who try."""
    beat_before, silent = None, 0
    while silent < SILENT_LOOKS:
        await asyncio.sleep(LOOK_EVERY_S)
        beat_at = _touched_at(beat_of(folder, number, pid))
        can_touch = _touch(folder / "parent")
        silent = silent + 1 if can_touch and beat_at is not None and beat_at == beat_before else 0
        beat_before = beat_at


def _touched_at(path: Path) -> int | None:
    """None where this process has not begun."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _touch(path: Path) -> bool:
    try:
        path.touch()
    except OSError:
        return False
    return True
