"""A supervised child hears at once that there is something to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.jobs.supervisor import Nudge, supervise
from tests.support.waiting import wait_until


async def appeared(path: Path) -> None:
    await asyncio.to_thread(wait_until, path.exists, path.name)


def test_a_nudge_reaches_the_child_and_one_without_a_child_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUDGED", str(tmp_path))
    nudge = Nudge()
    nudge()

    async def nudged_twice() -> None:
        stop = asyncio.Event()
        supervised = asyncio.create_task(supervise("tests.support.nudged_child", stop, nudge))
        await appeared(tmp_path / "started")
        for count in (1, 2):
            await asyncio.to_thread(nudge)
            await appeared(tmp_path / f"nudge-{count}")
        stop.set()
        await supervised

    asyncio.run(nudged_twice())

    nudge()
    assert not (tmp_path / "nudge-3").exists()
