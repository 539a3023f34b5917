"""A supervised child hears at once that there is something to do."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from pathlib import Path

import pytest

from shared.process_supervisor import ChildRefused, WakeSignal, supervise
from tests.support.waiting import wait_until


async def appeared(path: Path) -> None:
    await asyncio.to_thread(wait_until, path.exists, path.name)


async def test_a_wake_reaches_the_child_and_one_without_a_child_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUDGED", str(tmp_path))
    wake = WakeSignal()
    wake()

    stop = asyncio.Event()
    supervised = asyncio.create_task(supervise("tests.support.woken_child", stop, wake))
    await appeared(tmp_path / "started")
    for count in (1, 2):
        await asyncio.to_thread(wake)
        await appeared(tmp_path / f"nudge-{count}")
    stop.set()
    await supervised

    wake()
    assert not (tmp_path / "nudge-3").exists()


def test_only_the_first_child_can_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTS", str(tmp_path))
    monkeypatch.setattr("shared.process_supervisor.FIRST_DELAY_S", 0.01)

    async def supervised(ending: str, number: str) -> None:
        monkeypatch.setenv("ENDING", ending)
        stop = asyncio.Event()
        running = asyncio.create_task(
            supervise("tests.support.ending_child", stop, arguments=(number,), refusal=2, stop_within_s=5)
        )
        if ending != "2":
            await appeared(tmp_path / f"{number}-3")
            stop.set()
        await asyncio.wait_for(running, 240)

    with pytest.raises(ChildRefused):
        asyncio.run(supervised("2", "0"))
    asyncio.run(supervised("1,2,2", "1"))
    assert not (tmp_path / "0-1").exists()


def test_a_child_that_does_not_die_when_it_is_killed_keeps_nobody_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stuck in a call to the kernel, on a disk that does not answer."""

    async def scenario() -> None:
        killed, stop = asyncio.Queue[Process](), asyncio.Event()

        async def hangs(_: int) -> None:
            await appeared(tmp_path / "0-0")

        monkeypatch.setattr(Process, "terminate", lambda _: None)
        monkeypatch.setattr(Process, "kill", lambda child: killed.put_nowait(child))
        running = asyncio.create_task(
            supervise("tests.support.ending_child", stop, arguments=("0",), stop_within_s=0.1, hangs=hangs)
        )
        child = await asyncio.wait_for(killed.get(), 240)
        await asyncio.sleep(0.1)
        assert not running.done()
        stop.set()
        try:
            await asyncio.wait_for(running, 240)
            assert child.returncode is None
        finally:
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()

    for name, value in {"STARTS": str(tmp_path), "ENDING": "0", "ENDS": "another"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shared.process_supervisor.KILLED_TIMEOUT_S", 0.1)
    asyncio.run(scenario())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0"]
