"""A replica's socket by itself: frontends that stop, send rubbish or go, models that fail, and its end."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from inference_service.domain.signature import Outputs, Rows
from inference_service.serve.sockets import (
    SUFFIX,
    Frame,
    Kind,
    LocalReplicas,
    ReplicaLost,
    encode,
    listen,
    make_private,
)
from shared.errors import Internal
from tests.unit.inference_service.serve.test_socket_folders import left_by_a_killed_replica

TIMEOUT_S = 240.0


def rows(*values: int) -> Rows:
    return Rows("raw", {"x": np.array(values)})


def same(given: Rows) -> Outputs:
    return Outputs([given.values["x"]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "sockets"


def opened(folder: Path, forward: Callable[[Rows], Outputs]) -> socket.socket:
    """A frontend of a replica that listens from now on."""
    listen(folder, ThreadPoolExecutor(1), forward)
    (path,) = folder.glob(f"*{SUFFIX}")
    frontend = socket.socket(socket.AF_UNIX)
    frontend.settimeout(TIMEOUT_S)
    frontend.connect(str(path))
    return frontend


async def asked(folder: Path, what: Rows) -> Outputs:
    async with asyncio.timeout(TIMEOUT_S):
        one = await LocalReplicas(folder).least_loaded()
        assert one is not None
        return await one.forward(what)


def read_to_the_end(frontend: socket.socket) -> int:
    read = 0
    while got := len(frontend.recv(1 << 20)):
        read += got
    return read


def test_a_frontend_that_stops_reading_keeps_no_other_waiting(folder: Path) -> None:
    at_work = threading.Event()

    def forward(given: Rows) -> Outputs:
        at_work.set()
        return Outputs([np.zeros((len(given), 1_000_000))])

    frontend = opened(folder, forward)
    frontend.sendall(encode(Frame(1, Kind.FORWARD, rows(1, 2, 3))))
    assert at_work.wait(TIMEOUT_S)
    assert len(asyncio.run(asked(folder, rows(1))).arrays[0]) == 1
    frontend.close()


def test_a_frontend_that_does_not_take_its_answers_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_service.serve.sockets.MAX_UNSENT", 2)
    frontend = opened(folder, lambda _: Outputs([np.zeros(1_000_000)]))
    for call in range(1, 5):  # one answer on its way, two that wait, and one that is too many
        frontend.sendall(encode(Frame(call, Kind.FORWARD, rows(1))))
    closed = select.poll()
    closed.register(frontend, 0)  # for its end, and not for what can be read
    assert closed.poll(TIMEOUT_S * 1000)
    assert read_to_the_end(frontend) < 8_000_000
    frontend.close()


def test_an_invalid_frame_ends_the_connection(folder: Path) -> None:
    frontend = opened(folder, same)
    whole = bytearray(encode(Frame(1, Kind.FORWARD, rows(1))))
    whole[8] = 99  # of no kind
    frontend.sendall(whole)
    assert read_to_the_end(frontend) == 0
    frontend.close()


def assert_error_has_correlation_id(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the frontend gets of an unexpected failure: what finds it in the log, and no more."""
    with pytest.raises(Internal) as raised:
        asyncio.run(asked(folder, rows(1)))
    correlation_id = raised.value.metadata["correlation_id"]
    assert raised.value.message == f"internal error; quote the correlation id {correlation_id}"
    assert correlation_id in caplog.text


@pytest.mark.parametrize("error", [SystemExit("secret"), KeyboardInterrupt("secret"), ValueError("secret")])
def test_whatever_ends_a_batch_is_reported_without_its_internals(
    folder: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(_: Rows) -> Outputs:
        raise error

    listen(folder, ThreadPoolExecutor(1), forward)
    assert_error_has_correlation_id(folder, caplog)
    assert f"{type(error).__name__}: secret" in caplog.text


def test_an_answer_that_cannot_be_sent_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    listen(folder, ThreadPoolExecutor(1), lambda _: Outputs([threading.Lock()]))  # type: ignore[list-item]
    assert_error_has_correlation_id(folder, caplog)
    assert "pickle" in caplog.text


async def test_a_replica_that_stops_answers_what_it_has_takes_no_more_and_removes_its_socket(folder: Path) -> None:
    may_work, at_work = threading.Event(), threading.Event()

    def forward(given: Rows) -> Outputs:
        at_work.set()
        assert may_work.wait(TIMEOUT_S)
        return same(given)

    async with asyncio.timeout(TIMEOUT_S):
        socket_server = listen(folder, ThreadPoolExecutor(1), forward)
        assert socket_server is not None
        local = LocalReplicas(folder)
        one = await local.least_loaded()
        assert one is not None
        tasks = [asyncio.create_task(one.forward(rows(number))) for number in (1, 2)]
        assert await asyncio.to_thread(at_work.wait, TIMEOUT_S)
        closing = asyncio.create_task(asyncio.to_thread(socket_server.close, TIMEOUT_S))
        while await local.least_loaded(busy_too=True) is not None:  # noqa: ASYNC110 - until it has said so
            await asyncio.sleep(0.001)
        assert not await asyncio.to_thread(folder.exists)
        with pytest.raises(ReplicaLost):
            await one.forward(rows(3))
        may_work.set()
        assert [(await task).arrays[0].tolist() for task in tasks] == [[1], [2]]
        await closing
        assert one.in_flight == 0


def test_the_last_replica_that_stops_takes_the_folder_away(folder: Path) -> None:
    socket_servers = [listen(folder, ThreadPoolExecutor(1), same) for _ in range(2)]
    for number, socket_server in enumerate(socket_servers):
        assert len(list(folder.iterdir())) == 2 - number
        assert socket_server is not None
        socket_server.close(0.0)
    assert not folder.exists()


def test_a_replica_that_starts_takes_away_what_killed_ones_have_left(folder: Path) -> None:
    killed = left_by_a_killed_replica(folder)
    of_an_application_that_is_gone = left_by_a_killed_replica(folder.parent / "gone")
    listen(folder, ThreadPoolExecutor(1), same)
    assert not killed.exists()
    assert not of_an_application_that_is_gone.parent.exists()
    assert len(asyncio.run(asked(folder, rows(1))).arrays[0]) == 1


def test_a_folder_that_another_takes_away_just_now_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Path] = []

    def made_and_taken(one: Path) -> None:
        make_private(one)
        if one == folder and not taken:
            one.rmdir()
            taken.append(one)

    monkeypatch.setattr("inference_service.serve.sockets.make_private", made_and_taken)
    listen(folder, ThreadPoolExecutor(1), same)
    assert taken == [folder]
    assert len(asyncio.run(asked(folder, rows(1))).arrays[0]) == 1
