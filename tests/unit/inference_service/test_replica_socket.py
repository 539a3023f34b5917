"""A replica's socket by itself: fronts that stop, send rubbish or go, models that fail, and its end."""

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

from inference_service.domain.rows import Outputs, Rows
from inference_service.frames import Frame, Kind, encode
from inference_service.local_replicas import LocalReplicas, ReplicaLost
from inference_service.replica_socket import SUFFIX, listen
from shared.errors import Internal

WITHIN_S = 10.0


def rows(*values: int) -> Rows:
    return Rows("raw", {"x": np.array(values)})


def same(given: Rows) -> Outputs:
    return Outputs([given.values["x"]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "sockets"


def opened(folder: Path, forward: Callable[[Rows], Outputs]) -> socket.socket:
    """A front of a replica that listens from now on."""
    listen(folder, ThreadPoolExecutor(1), forward)
    (path,) = folder.glob(f"*{SUFFIX}")
    front = socket.socket(socket.AF_UNIX)
    front.settimeout(WITHIN_S)
    front.connect(str(path))
    return front


async def asked(folder: Path, what: Rows) -> Outputs:
    async with asyncio.timeout(WITHIN_S):
        one = await LocalReplicas(folder).free()
        assert one is not None
        return await one.forward(what)


def read_to_the_end(front: socket.socket) -> int:
    read = 0
    while got := len(front.recv(1 << 20)):
        read += got
    return read


def test_a_front_that_stops_reading_keeps_nobody_else_waiting(folder: Path) -> None:
    at_work = threading.Event()

    def forward(given: Rows) -> Outputs:
        at_work.set()
        return Outputs([np.zeros((len(given), 1_000_000))])

    front = opened(folder, forward)
    front.sendall(encode(Frame(1, Kind.FORWARD, rows(1, 2, 3))))
    assert at_work.wait(WITHIN_S)
    assert len(asyncio.run(asked(folder, rows(1))).arrays[0]) == 1
    front.close()


def test_a_front_that_does_not_take_its_answers_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_service.replica_socket.MAX_UNSENT", 2)
    front = opened(folder, lambda _: Outputs([np.zeros(1_000_000)]))
    for call in range(1, 5):  # one answer on its way, two that wait, and one that is too many
        front.sendall(encode(Frame(call, Kind.FORWARD, rows(1))))
    closed = select.poll()
    closed.register(front, 0)  # for its end, and not for what can be read
    assert closed.poll(WITHIN_S * 1000)
    assert read_to_the_end(front) < 8_000_000
    front.close()


def test_what_is_no_frame_ends_the_connection(folder: Path) -> None:
    front = opened(folder, same)
    whole = bytearray(encode(Frame(1, Kind.FORWARD, rows(1))))
    whole[8] = 99  # of no kind
    front.sendall(whole)
    assert read_to_the_end(front) == 0
    front.close()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_whatever_ends_a_batch_is_told(folder: Path, error: BaseException) -> None:
    def forward(_: Rows) -> Outputs:
        raise error

    listen(folder, ThreadPoolExecutor(1), forward)
    with pytest.raises(Internal, match=type(error).__name__):
        asyncio.run(asked(folder, rows(1)))


def test_an_answer_that_cannot_be_sent_is_told(folder: Path) -> None:
    listen(folder, ThreadPoolExecutor(1), lambda _: Outputs([threading.Lock()]))  # type: ignore[list-item]
    with pytest.raises(Internal, match="pickle"):
        asyncio.run(asked(folder, rows(1)))


def test_a_replica_that_stops_answers_what_it_has_takes_no_more_and_removes_its_socket(folder: Path) -> None:
    may_work, at_work = threading.Event(), threading.Event()

    def forward(given: Rows) -> Outputs:
        at_work.set()
        assert may_work.wait(WITHIN_S)
        return same(given)

    async def scenario() -> None:
        door = listen(folder, ThreadPoolExecutor(1), forward)
        assert door is not None
        local = LocalReplicas(folder)
        one = await local.free()
        assert one is not None
        tasks = [asyncio.create_task(one.forward(rows(number))) for number in (1, 2)]
        assert await asyncio.to_thread(at_work.wait, WITHIN_S)
        closing = asyncio.create_task(asyncio.to_thread(door.close, WITHIN_S))
        while await local.free(busy_too=True) is not None:  # noqa: ASYNC110 - until it has said so
            await asyncio.sleep(0.001)
        assert await asyncio.to_thread(lambda: list(folder.iterdir())) == []
        with pytest.raises(ReplicaLost):
            await one.forward(rows(3))
        may_work.set()
        assert [(await task).arrays[0].tolist() for task in tasks] == [[1], [2]]
        await closing
        assert one.in_flight == 0

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))
