"""Whether a front process hangs, by what it tells its siblings several times a second."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

LOOK_EVERY_S = 5.0
# In a row. They are counted, not timed: who was stopped with its parent has its time once both go on.
SILENT_LOOKS = 12


async def hangs(folder: Path, number: int, pid: int) -> None:
    """Returns once the front of this number has told nothing for a minute, having told something before. A folder that
    nobody can write says nothing of those who try."""
    told_before, silent = None, 0
    while silent < SILENT_LOOKS:
        await asyncio.sleep(LOOK_EVERY_S)
        told = _told_at(folder / f"{number}.json", pid)
        silent = silent + 1 if told is not None and told == told_before and _can_write(folder) else 0
        told_before = told


def _told_at(path: Path, pid: int) -> int | None:
    """None where this process has told nothing yet."""
    with suppress(OSError, ValueError):
        told_at = path.stat().st_mtime_ns
        if json.loads(path.read_text())["pid"] == pid:
            return told_at
    return None


def _can_write(folder: Path) -> bool:
    try:
        (folder / "parent").write_bytes(bytes(4096))
    except OSError:
        return False
    return True
