"""What front processes tell each other, and what follows from it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inference_service.domain.recent import Counts, Recent
from inference_service.fronts import run_fronts
from inference_service.settings import metrics_of, settings_from
from inference_service.siblings import Siblings, Told
from shared.settings import SettingsError
from tests.support.ports import free_ports
from tests.unit.inference_service.test_ray_serve import ENVIRON


def ended() -> int:
    """The pid of a process that was."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def told(
    *holds: str, listens: bool = True, ready: bool = True, pid: int = 0, counts: dict[str, Counts] | None = None
) -> Told:
    return Told(pid=pid or os.getpid(), listens=listens, ready=ready, holds=list(holds), counts=counts or {})


def test_one_front_alone_leads_listens_and_waits_for_nobody() -> None:
    alone = Siblings()
    alone.tell(told("a"))
    assert alone.leads
    assert alone.may_listen(ready=False)
    assert list(alone.counts("a")) == []
    asyncio.run(asyncio.wait_for(alone.let_go("a", 60.0), 5))


def test_the_first_listens_at_once_only_while_nobody_answers_and_the_others_when_all_are_ready(tmp_path: Path) -> None:
    first, second = Siblings(tmp_path, 0), Siblings(tmp_path, 1)
    assert (first.leads, second.leads) == (True, False)
    assert first.may_listen(ready=False)
    assert not second.may_listen(ready=False)
    first.tell(told(ready=False))
    assert not second.may_listen(ready=True)
    first.tell(told(ready=True))
    assert second.may_listen(ready=True)
    # The first is started again, while the second answers.
    second.tell(told())
    assert not first.may_listen(ready=False)
    assert first.may_listen(ready=True)
    second.tell(told(pid=ended()))
    assert first.may_listen(ready=False)


def test_an_application_goes_once_no_front_that_lives_sends_there(tmp_path: Path) -> None:
    first, second, third = (Siblings(tmp_path, number) for number in range(3))

    async def scenario() -> None:
        second.tell(told("a", "b"))
        third.tell(told("a", pid=ended()))
        going = asyncio.create_task(first.let_go("a", 60.0))
        await asyncio.sleep(0.4)
        assert not going.done()
        second.tell(told("b"))
        await asyncio.wait_for(going, 5)

    asyncio.run(scenario())


def test_a_front_that_has_hung_for_long_is_not_waited_for(tmp_path: Path) -> None:
    first, second = Siblings(tmp_path, 0), Siblings(tmp_path, 1)
    second.tell(told("a"))
    long_ago = time.time() - 61
    os.utime(tmp_path / "1.json", (long_ago, long_ago))
    asyncio.run(asyncio.wait_for(first.let_go("a", 60.0), 5))


def test_counts_of_several_fronts_add_up_to_those_of_one(tmp_path: Path) -> None:
    whole, parts = Recent(), [Recent(), Recent()]
    for place in range(200):
        for one in (whole, parts[place % 2]):
            one.answered(100.0, 0.001 * (place + 1))
    for one in (whole, parts[1]):
        one.failed(101.0, "UNAVAILABLE", 0.5)
    first, second = Siblings(tmp_path, 0), Siblings(tmp_path, 1)
    second.tell(told(counts={"a": parts[1].counts(101.0, 60.0)}))
    added = sum(first.counts("a"), parts[0].counts(101.0, 60.0))
    assert added.seen() == whole.seen(101.0, 60.0)
    assert list(first.counts("b")) == []


@pytest.mark.parametrize(("text", "fronts"), [(None, 1), ("", 1), ("1", 1), ("4", 4)])
def test_the_number_of_fronts_is_a_setting(text: str | None, fronts: int) -> None:
    assert settings_from(ENVIRON if text is None else {**ENVIRON, "MILLRACE_FRONTS": text}).fronts == fronts


@pytest.mark.parametrize("text", ["0", "-1", "two", "65", "1.5"])
def test_another_number_of_fronts_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"MILLRACE_FRONTS=.*use 1 to 64"):
        settings_from({**ENVIRON, "MILLRACE_FRONTS": text})


def test_each_front_has_metrics_of_its_own() -> None:
    assert [metrics_of("[::1]:9400", front) for front in (0, 2)] == ["[::1]:9400", "[::1]:9402"]
    assert metrics_of("", 3) == ""
    with pytest.raises(SettingsError, match="leave ports above it for 3 fronts"):
        settings_from({**ENVIRON, "MILLRACE_FRONTS": "3", "MILLRACE_METRICS_LISTEN": "127.0.0.1:65534"})


def test_a_port_that_another_service_has_is_refused() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        taken.listen()
        with pytest.raises(SettingsError, match="Address already in use; use another port"):
            asyncio.run(run_fronts("nothing", f"127.0.0.1:{taken.getsockname()[1]}", 2))
