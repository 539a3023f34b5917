"""What frontend processes report to each other, and what follows."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_service import __main__ as service
from inference_service.domain.statistics import Counts, Recent
from inference_service.frontend_processes import REFUSED, Peers, PeerState, hangs, run_frontends
from inference_service.frontend_tasks import PeerReports
from inference_service.serve.models import Models
from inference_service.serve.repository import SummedStatistics
from inference_service.settings import metrics_of, settings_from
from shared.settings import SettingsError
from tests.support.inference_server import until
from tests.support.ports import free_ports
from tests.support.process_states import stop_process
from tests.unit.inference_service.serve.test_ray_serve import ENVIRON

# How long a report counts here: however long a busy machine takes over a test, it is recent.
UNRESPONSIVE_AFTER_S = 3600.0


@pytest.fixture(autouse=True)
def _reports_stay_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_service.frontend_processes.UNRESPONSIVE_AFTER_S", UNRESPONSIVE_AFTER_S)


def ended() -> int:
    """The pid of a process that was."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def reported(
    *holds: str, listens: bool = True, ready: bool = True, pid: int = 0, counts: dict[str, Counts] | None = None
) -> PeerState:
    return PeerState(pid=pid or os.getpid(), listens=listens, ready=ready, holds=list(holds), counts=counts or {})


def test_one_frontend_alone_leads_listens_and_waits_for_nobody() -> None:
    alone = Peers()
    alone.publish(reported("a"))
    assert alone.is_leader
    assert alone.may_listen(False, [])
    assert list(alone.counts("a")) == []
    asyncio.run(asyncio.wait_for(alone.let_go("a", time.time(), 60.0), 240))


def test_the_first_listens_at_once_only_while_nobody_answers_and_the_others_when_all_are_ready(tmp_path: Path) -> None:
    first, second = Peers(tmp_path, 0), Peers(tmp_path, 1)
    assert (first.is_leader, second.is_leader) == (True, False)
    assert first.may_listen(False, [])
    assert not second.may_listen(False, [])
    first.publish(reported(ready=False))
    assert not second.may_listen(True, [])
    first.publish(reported(ready=True))
    assert second.may_listen(True, [])
    # The first is started again, while the second answers.
    second.publish(reported())
    assert not first.may_listen(False, [])
    assert first.may_listen(True, [])
    second.publish(reported(pid=ended()))
    assert first.may_listen(False, [])


def test_an_applications_removal_is_known_to_other_frontends_while_its_process_reports(tmp_path: Path) -> None:
    first, second = Peers(tmp_path, 0), Peers(tmp_path, 1)
    first.publish(replace(reported("b"), going=["a"]))
    assert (first.going(), second.going()) == (set(), {"a"})
    assert second.news() == {os.getpid(): (0, ["b"], ["a"])}
    silence(tmp_path, 0, UNRESPONSIVE_AFTER_S + 1)
    assert second.going() == set()
    first.publish(replace(reported("b", pid=ended()), going=["a"]))
    assert second.going() == set()


def silence(folder: Path, number: int, for_s: float) -> None:
    long_ago = time.time() - for_s
    os.utime(folder / f"{number}.json", (long_ago, long_ago))


@pytest.mark.parametrize("number", [0, 1])
def test_a_frontend_that_starts_listens_once_it_reaches_what_those_reach_that_have_the_port(
    tmp_path: Path, number: int
) -> None:
    starting, there, third = Peers(tmp_path, number), Peers(tmp_path, 1 - number), Peers(tmp_path, 2)
    there.publish(reported("a", "b"))
    third.publish(reported("c", listens=False))
    assert not starting.may_listen(True, [])
    assert not starting.may_listen(True, ["a", "c"])
    assert not starting.may_listen(False, ["a", "b"])
    assert starting.may_listen(True, ["c", "b", "a"])


def test_a_frontend_that_has_long_been_silent_is_not_waited_for_to_listen(tmp_path: Path) -> None:
    first, second = Peers(tmp_path, 0), Peers(tmp_path, 1)
    second.publish(reported("a", ready=False))
    assert not first.may_listen(True, [])
    silence(tmp_path, 1, UNRESPONSIVE_AFTER_S + 1)
    assert first.may_listen(True, [])
    # It may have the port all the same, and answer: who cannot yet should not take calls from it.
    assert not first.may_listen(False, [])


def test_counts_of_a_silent_frontend_are_dropped(tmp_path: Path) -> None:
    first, second = Peers(tmp_path, 0), Peers(tmp_path, 1)
    second.publish(reported(counts={"a": Recent().counts(0.0, 1.0)}))
    assert len(list(first.counts("a"))) == 1
    silence(tmp_path, 1, UNRESPONSIVE_AFTER_S + 1)
    assert list(first.counts("a")) == []


async def test_a_folder_that_cannot_be_written_ends_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "frontends"
    folder.mkdir()
    tried = 0

    class Holding:
        def holds(self) -> list[str]:
            nonlocal tried
            tried += 1
            return []

        def going(self) -> list[str]:
            return []

        def on_going(self, _: Any) -> None: ...

        def wake(self) -> None: ...

    monkeypatch.setattr("inference_service.frontend_tasks.POLL_INTERVAL_S", 0.01)
    with caplog.at_level(logging.ERROR):
        reconciler: Any = Holding()
        peers, models = Peers(folder, 0), Models()
        reports = PeerReports(peers, reconciler, models, SummedStatistics(models, peers), asyncio.Event())
        running = asyncio.create_task(reports.run())
        await until((folder / "0.json").exists, "it tells")
        shutil.rmtree(folder)
        before = tried
        await until(lambda: running.done() or tried > before + 3, "it tries again")
        await reports.turn_to_listen()
        assert not running.done()
        assert caplog.text.count("do not hear of each other") == 1
        folder.mkdir()
        await until((folder / "0.json").exists, "it tells again")
        running.cancel()


async def test_a_frontend_whose_turn_to_listen_fails_does_not_listen() -> None:
    async def fails() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        await service._first_of(fails(), asyncio.Event().wait())
    assert await service._first_of(asyncio.sleep(0), asyncio.Event().wait())
    assert not await service._first_of(asyncio.sleep(60), asyncio.sleep(0))


DYING = """
import asyncio, threading
from inference_service import __main__ as service

async def run(*_):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    raise ExceptionGroup("tasks", [OSError("disk")])

service.run = run
service.main()
"""


def test_an_unexpected_error_ends_the_process_whatever_its_threads_wait_for(tmp_path: Path) -> None:
    environ = {**os.environ, **ENVIRON, "MILLRACE_STORE": tmp_path.as_uri()}
    ended = subprocess.run([sys.executable, "-c", DYING], env=environ, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert "disk" in ended.stdout + ended.stderr


async def test_an_application_goes_once_no_frontend_that_lives_sends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (Peers(tmp_path, number) for number in range(3))
    monkeypatch.setattr("inference_service.frontend_processes.POLL_INTERVAL_S", 0)

    second.publish(reported("a", "b"))
    third.publish(reported("a", pid=ended()))
    going = asyncio.create_task(first.let_go("a", 0.0, 3600.0))
    for _ in range(5):  # looks
        await asyncio.sleep(0)
    assert not going.done()
    second.publish(reported("b"))
    await asyncio.wait_for(going, 240)


async def test_let_go_waits_for_a_peer_report_newer_than_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Peers(tmp_path, 0), Peers(tmp_path, 1)
    monkeypatch.setattr("inference_service.frontend_processes.POLL_INTERVAL_S", 0)

    second.publish(reported())
    silence(tmp_path, 1, 2)
    going = asyncio.create_task(first.let_go("a", time.time() - 1, 3600.0))
    for _ in range(5):  # looks
        await asyncio.sleep(0)
    assert not going.done()
    second.publish(reported("a"))  # it has taken it over meanwhile
    for _ in range(5):
        await asyncio.sleep(0)
    assert not going.done()
    second.publish(reported())
    await asyncio.wait_for(going, 240)


def test_a_frontend_that_has_hung_for_long_is_not_waited_for(tmp_path: Path) -> None:
    first, second = Peers(tmp_path, 0), Peers(tmp_path, 1)
    second.publish(reported("a"))
    silence(tmp_path, 1, 61)
    asyncio.run(asyncio.wait_for(first.let_go("a", time.time(), 60.0), 240))


def test_counts_of_several_frontends_add_up_to_those_of_one(tmp_path: Path) -> None:
    whole, parts = Recent(), [Recent(), Recent()]
    for place in range(200):
        for one in (whole, parts[place % 2]):
            one.answered(100.0, 0.001 * (place + 1))
    for one in (whole, parts[1]):
        one.failed(101.0, "UNAVAILABLE", 0.5)
    first, second = Peers(tmp_path, 0), Peers(tmp_path, 1)
    second.publish(reported(counts={"a": parts[1].counts(101.0, 60.0)}))
    added = sum(first.counts("a"), parts[0].counts(101.0, 60.0))
    assert added.seen() == whole.seen(101.0, 60.0)
    assert list(first.counts("b")) == []


@pytest.mark.parametrize(("text", "frontends"), [(None, 1), ("", 1), ("1", 1), ("4", 4)])
def test_the_number_of_frontends_is_a_setting(text: str | None, frontends: int) -> None:
    assert settings_from(ENVIRON if text is None else {**ENVIRON, "MILLRACE_FRONTENDS": text}).frontends == frontends


@pytest.mark.parametrize("text", ["0", "-1", "two", "65", "1.5"])
def test_another_number_of_frontends_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"MILLRACE_FRONTENDS=.*use 1 to 64"):
        settings_from({**ENVIRON, "MILLRACE_FRONTENDS": text})


def test_each_frontend_has_metrics_of_its_own() -> None:
    assert [metrics_of("[::1]:9400", frontend) for frontend in (0, 2)] == ["[::1]:9400", "[::1]:9402"]
    assert metrics_of("", 3) == ""
    with pytest.raises(SettingsError, match="leave ports above it for 3 frontends"):
        settings_from({**ENVIRON, "MILLRACE_FRONTENDS": "3", "MILLRACE_METRICS_LISTEN": "127.0.0.1:65534"})


def test_a_port_that_another_service_has_is_refused() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        taken.listen()
        with pytest.raises(SettingsError, match="Address already in use; use another port"):
            asyncio.run(run_frontends("nothing", f"127.0.0.1:{taken.getsockname()[1]}", 2))


@pytest.mark.parametrize(
    ("listen", "metrics", "message"),
    [
        ("127.0.0.1:0", "", r"MILLRACE_LISTEN='127.0.0.1:0': .* give one"),
        ("127.0.0.1:{0}", "127.0.0.1:0", r"MILLRACE_METRICS_LISTEN='127.0.0.1:0': .* give one"),
        ("127.0.0.1:{0}", "127.0.0.1:{0}", r"MILLRACE_METRICS_LISTEN: .*{0}: Address already in use; use another port"),
        ("0.0.0.0:{1}", "127.0.0.1:{0}", r"MILLRACE_METRICS_LISTEN: .*{1}: Address already in use; use another port"),
    ],
)
def test_ports_that_frontends_cannot_have_are_refused_before_any_is_started(
    listen: str, metrics: str, message: str
) -> None:
    port = two_free_ports()
    listen, metrics, message = (text.format(port, port + 1) for text in (listen, metrics, message))
    with pytest.raises(SettingsError, match=message):
        asyncio.run(run_frontends("nothing", listen, 2, metrics))


def test_a_metrics_port_that_is_taken_is_refused_whichever_frontend_is_to_have_it() -> None:
    port = two_free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        with pytest.raises(SettingsError, match=f"{port + 1}: Address already in use"):
            asyncio.run(run_frontends("nothing", f"127.0.0.1:{free_ports(1)[0]}", 2, f"127.0.0.1:{port}"))


def test_a_refusal_of_the_first_frontends_start_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STARTS": str(tmp_path), "ENDING": str(REFUSED), "ENDS": "1"}.items():
        monkeypatch.setenv(name, value)
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    running = asyncio.wait_for(run_frontends("tests.support.ending_child", listen, 2), 240)
    assert asyncio.run(running) == REFUSED
    assert (tmp_path / "1-0").exists()
    assert not (tmp_path / "1-1").exists()
    for path in tmp_path.glob("0-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def starts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_frontend_that_hangs_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled: dict[int, list[int]] = {}

    async def watched(folder: Path, number: int, pid: int) -> None:
        polled[pid] = []

        async def note_beats() -> None:
            while True:
                with suppress(OSError):
                    polled[pid].append((folder / f"{number}.{pid}.beat").stat().st_mtime_ns)
                await asyncio.sleep(0.02)

        noting = asyncio.create_task(note_beats())
        try:
            await hangs(folder, number, pid)
        finally:
            noting.cancel()

    def lives_on(beats: list[int]) -> bool:
        return len(set(beats)) > 20

    monkeypatch.setenv("STARTS", str(tmp_path))
    monkeypatch.setattr("inference_service.frontend_processes.hangs", watched)
    # Silence of five seconds is a hang: a busy machine keeps no well process from its heartbeat for so long.
    monkeypatch.setattr("inference_service.frontend_processes.HEARTBEAT_POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr("inference_service.frontend_processes.UNRESPONSIVE_POLLS", 50)
    async with asyncio.timeout(240):
        listen = f"127.0.0.1:{free_ports(1)[0]}"
        running = asyncio.create_task(run_frontends("tests.support.hanging_frontend", listen, 2))
        await until(lambda: "0-1" in starts(tmp_path), "the one that hangs is replaced")
        await until(lambda: len([*filter(lives_on, polled.values())]) == 2, "both to live on")
        assert starts(tmp_path) == ["0-0", "0-1", "1-0"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0


BEATING = """
import sys
from pathlib import Path
from inference_service.frontend_processes import Peers

Peers(Path(sys.argv[1]), 0).heartbeat()
"""


def test_silence_is_a_hang_only_of_who_has_given_a_sign_of_life_in_a_folder_that_takes_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_hung(timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(hangs(tmp_path, 0, os.getpid()), timeout_s)
        except TimeoutError:
            return False
        return True

    monkeypatch.setattr("inference_service.frontend_processes.HEARTBEAT_POLL_INTERVAL_S", 0.01)
    assert not asyncio.run(is_hung(1.0))
    subprocess.run([sys.executable, "-c", BEATING, str(tmp_path)], check=True)  # the one before
    assert not asyncio.run(is_hung(1.0))
    Peers(tmp_path, 0).heartbeat()
    (tmp_path / "parent").unlink()
    (tmp_path / "parent").symlink_to(tmp_path / "gone" / "parent")
    assert not asyncio.run(is_hung(1.0))
    (tmp_path / "parent").unlink()
    assert asyncio.run(is_hung(240.0))


def test_a_frontend_leaves_no_signs_of_life_of_those_before_it(tmp_path: Path) -> None:
    Peers(tmp_path, 1).heartbeat()
    subprocess.run([sys.executable, "-c", BEATING, str(tmp_path)], check=True)
    Peers(tmp_path, 0).heartbeat()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{number}.{os.getpid()}.beat" for number in (0, 1)]


CANNOT_TOUCH = """
import asyncio, resource, sys
from pathlib import Path
from inference_service.serve.models import Models
from inference_service.frontend_tasks import PeerReports
from inference_service.frontend_processes import Peers
from inference_service.serve.repository import SummedStatistics

class Holding:
    def holds(self):
        return []

    def going(self):
        return []

    def on_going(self, _): ...

    def wake(self): ...

async def main():
    folder, limit = Path(sys.argv[1]), getattr(resource, sys.argv[2])
    peers, models = Peers(folder, 0), Models()
    reports = PeerReports(peers, Holding(), models, SummedStatistics(models, peers), asyncio.Event())
    running = asyncio.create_task(reports.run())
    while not (folder / "0.json").exists():
        await asyncio.sleep(0.01)
    resource.setrlimit(limit, (0, resource.getrlimit(limit)[1]))
    print("mute", flush=True)
    await running

asyncio.run(main())
"""


# No further descriptor; no further byte, as on a full disk.
@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE", "RLIMIT_FSIZE"])
def test_a_frontend_that_cannot_write_its_state_is_killed_only_once_it_hangs(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(frontend: int) -> None:
        watching = asyncio.create_task(hangs(tmp_path, 0, frontend))
        beats: set[int] = set()

        def lives_on() -> bool:
            beats.add((tmp_path / f"0.{frontend}.beat").stat().st_mtime_ns)
            return len(beats) > 12

        await until(lambda: lives_on() or watching.done(), "it to live on")
        assert not watching.done()
        await asyncio.to_thread(stop_process, frontend)
        await asyncio.wait_for(watching, 240)

    # Silence of five seconds is a hang: a busy machine keeps no well process from its heartbeat for so long.
    monkeypatch.setattr("inference_service.frontend_processes.HEARTBEAT_POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr("inference_service.frontend_processes.UNRESPONSIVE_POLLS", 50)
    command = [sys.executable, "-c", CANNOT_TOUCH, str(tmp_path), limit]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as frontend:
        try:
            assert frontend.stdout is not None
            assert frontend.stdout.readline() == "mute\n"
            asyncio.run(scenario(frontend.pid))
        finally:
            frontend.kill()


def two_free_ports() -> int:
    """The lower of two neighbours."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as above:
            try:
                above.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
        return port
