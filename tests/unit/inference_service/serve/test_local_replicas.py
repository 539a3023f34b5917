"""Batches over a replica's own socket: between the frontend's side and the replica's, in one process or in two."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from inference_service.domain.signature import Outputs, Rows
from inference_service.serve import sockets
from inference_service.serve.sockets import SETTLED_NS, SUFFIX, LocalReplicas, ReplicaLost, listen
from shared.errors import FailedPrecondition, Internal
from tests.support.garbage import uncollected


class Doubler:
    """A replica's model: twice its input. It works while `may_work` is set."""

    def __init__(self) -> None:
        self.may_work = threading.Event()
        self.may_work.set()
        self.at_work = threading.Event()
        self.seen: list[int] = []

    def forward(self, rows: Rows) -> Outputs:
        values = rows.values["x"]
        self.seen.append(int(values.flat[0]))
        self.at_work.set()
        assert self.may_work.wait(timeout=240)
        if values.flat[0] < 0:
            raise FailedPrecondition("no negative numbers")
        if values.flat[0] == 0:
            raise ZeroDivisionError("zero")
        values *= 2  # the batch is the model's own, as torch wants it
        return Outputs([values], {0: "odd"}, 0.25, 0.5)


def rows(*values: int) -> Rows:
    return Rows("raw", {"x": np.array(values)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "sockets"


def replica(folder: Path) -> Doubler:
    model = Doubler()
    listen(folder, ThreadPoolExecutor(1), model.forward)
    return model


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def on_a_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(240):
            await scenario()

    asyncio.run(bounded())


async def call(local: LocalReplicas, what: Rows) -> Outputs:
    one = await local.least_loaded()
    assert one is not None
    return await one.forward(what)


async def begin(local: LocalReplicas, model: Doubler, what: Rows) -> asyncio.Task[Outputs]:
    """A call that the model works on."""
    model.may_work.clear()
    model.at_work.clear()
    task = asyncio.create_task(call(local, what))
    assert await asyncio.to_thread(model.at_work.wait, 240)
    return task


async def test_a_batch_comes_back_with_all_that_the_model_said(folder: Path) -> None:
    replica(folder)
    outputs = await call(LocalReplicas(folder), rows(1, 2, 3))
    assert outputs.arrays[0].tolist() == [2, 4, 6]
    assert (outputs.refused, outputs.input_s, outputs.infer_s) == ({0: "odd"}, 0.25, 0.5)


async def test_strings_nulls_and_large_batches_arrive_as_they_are(folder: Path) -> None:
    given = Rows(
        "raw",
        {"x": np.arange(1, 1_000_001).reshape(2, -1), "town": np.array([b"Ulm", b""], object)},
        {"town": np.array([False, True])},
        {"traceparent": "t"},
    )
    seen: list[Rows] = []

    def forward(what: Rows) -> Outputs:
        seen.append(what)
        return Outputs([what.values["x"]])

    async with asyncio.timeout(240):
        listen(folder, ThreadPoolExecutor(1), forward)
        outputs = await call(LocalReplicas(folder), given)
        assert np.array_equal(outputs.arrays[0], given.values["x"])
        (what,) = seen
        assert what.form == "raw"
        assert what.values["town"].tolist() == [b"Ulm", b""]
        assert what.nulls["town"].tolist() == [False, True]
        assert what.trace == {"traceparent": "t"}


async def test_an_error_of_the_model_is_raised_at_the_caller(folder: Path) -> None:
    replica(folder)
    local = LocalReplicas(folder)
    with pytest.raises(FailedPrecondition, match="no negative numbers"):
        await call(local, rows(-1))
    with pytest.raises(Internal, match="quote the correlation id"):
        await call(local, rows(0))
    assert (await call(local, rows(4))).arrays[0].tolist() == [8]


def test_a_batch_that_failed_waits_for_no_garbage_collector(folder: Path) -> None:
    async def scenario() -> None:
        replica(folder)
        local = LocalReplicas(folder)
        batch = rows(-1)
        kept = weakref.ref(batch.values["x"])
        try:
            await call(local, batch)
        except FailedPrecondition:
            del batch
        await asyncio.sleep(0)  # the loop itself keeps what it is at
        assert kept() is None

    with uncollected():
        on_a_loop(scenario)


async def test_a_batch_given_up_while_it_waits_never_reaches_the_model(folder: Path) -> None:
    model = replica(folder)
    local = LocalReplicas(folder)
    first = await begin(local, model, rows(1))
    second = asyncio.create_task(call(local, rows(2)))
    await asyncio.sleep(0)
    while (await local.least_loaded()) is not None:  # noqa: ASYNC110 - until it is on its way
        await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    while (await local.least_loaded()) is None:  # noqa: ASYNC110 - until the replica has said that it gave it up
        await asyncio.sleep(0.001)
    third = asyncio.create_task(call(local, rows(3)))
    await asyncio.sleep(0)
    model.may_work.set()
    assert [(await one).arrays[0].tolist() for one in (first, third)] == [[2], [6]]
    assert model.seen == [1, 3]


async def test_the_least_busy_replica_is_free_and_none_is_where_all_have_two_batches(folder: Path) -> None:
    models = [replica(folder), replica(folder)]
    local = LocalReplicas(folder)
    for model in models:
        model.may_work.clear()
    tasks = []
    for number in range(1, 5):
        tasks.append(asyncio.create_task(call(local, rows(number))))
        # So that each sees those before it.
        while sum(one.in_flight for one in local._connections.values()) < number:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0)
    assert await local.least_loaded() is None
    assert await local.least_loaded(busy_too=True) is not None
    for model in models:
        model.may_work.set()
    await asyncio.gather(*tasks)
    assert sorted(len(model.seen) for model in models) == [2, 2]
    assert await local.least_loaded() is not None


async def test_a_replica_that_comes_later_is_found(folder: Path) -> None:
    local = LocalReplicas(folder)
    assert await local.least_loaded() is None
    replica(folder)
    assert (await call(local, rows(1))).arrays[0].tolist() == [2]
    second = replica(folder)
    second.may_work.clear()
    tasks = [asyncio.create_task(call(local, rows(number))) for number in (5, 6)]
    assert await asyncio.to_thread(second.at_work.wait, 240)
    second.may_work.set()
    await asyncio.gather(*tasks)


def _serve(folder: Path) -> None:
    def never(_: Rows) -> Outputs:
        signal.pause()
        raise AssertionError

    thread = ThreadPoolExecutor(1)
    listen(folder, thread, lambda what: never(what) if what.values["x"][0] else Outputs([what.values["x"]]))
    threading.Event().wait()


async def test_a_replica_that_is_killed_loses_its_batches_and_its_socket_goes(folder: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder,), daemon=True)
    process.start()

    try:
        async with asyncio.timeout(240):
            local = LocalReplicas(folder)
            while await local.least_loaded() is None:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.05)
            await call(local, rows(0))
            task = asyncio.create_task(call(local, rows(1)))
            await asyncio.sleep(0)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(ReplicaLost):
                await task
            # A process that ends closes its connections and its listener one after the other.
            while (await LocalReplicas(folder).least_loaded()) is not None:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.05)
            assert names(folder) == []
    finally:
        process.kill()
        process.join()


def test_a_folder_that_others_may_enter_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"theirs{SUFFIX}"))
    listener.listen()
    folder.chmod(0o755)

    async def scenario() -> None:
        assert await LocalReplicas(folder).least_loaded() is None
        replica(folder)
        assert names(folder) == [f"theirs{SUFFIX}"]

    on_a_loop(scenario)
    listener.close()


async def test_without_a_folder_there_is_none() -> None:
    assert await LocalReplicas(None).least_loaded() is None


async def test_a_search_that_was_cancelled_is_made_again_by_the_next(folder: Path) -> None:
    replica(folder)
    await asyncio.sleep(SETTLED_NS / 1e9 * 2)
    local = LocalReplicas(folder)
    search = asyncio.create_task(local.least_loaded())
    await asyncio.sleep(0)
    search.cancel()
    with pytest.raises(asyncio.CancelledError):
        await search
    assert await local.least_loaded() is not None


async def test_a_connection_that_is_lost_is_opened_again_while_its_replica_lives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "RETRY_DELAY_S", 0.05)

    replica(folder)
    await asyncio.sleep(SETTLED_NS / 1e9 * 2)
    local = LocalReplicas(folder)
    one = await local.least_loaded()
    assert one is not None
    assert one._transport is not None
    one._transport.abort()
    await asyncio.sleep(0)
    while await local.least_loaded() is None:  # noqa: ASYNC110 - until it is tried again
        await asyncio.sleep(0.001)
    assert (await call(local, rows(3))).arrays[0].tolist() == [6]


async def test_a_request_that_a_dying_replica_lost_is_not_sent_to_it_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "RETRY_DELAY_S", 3600.0)  # however long a busy machine takes over the test
    replica(folder)
    local = LocalReplicas(folder)
    while (dying := await local.least_loaded()) is None:  # noqa: ASYNC110 - until the replica is heard of
        await asyncio.sleep(0.001)
    other = replica(folder)
    while len(local._connections) < 2:
        await local.least_loaded()
        await asyncio.sleep(0.001)
    (busy,) = (one for one in local._connections.values() if one is not dying)
    other.may_work.clear()
    at_work = asyncio.create_task(busy.forward(rows(3)))
    assert await asyncio.to_thread(other.at_work.wait, 240)
    assert dying._transport is not None
    dying._transport.abort()  # the kernel closes the sockets of a killed process one by one
    await asyncio.sleep(0)
    assert await local.least_loaded(busy_too=True) is busy
    other.may_work.set()
    await at_work


async def test_a_call_that_was_given_up_counts_until_the_replica_has_answered_it(folder: Path) -> None:
    model = replica(folder)
    local = LocalReplicas(folder)
    first = await begin(local, model, rows(1))
    second = asyncio.create_task(call(local, rows(2)))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    while (one := await local.least_loaded()) is None:  # noqa: ASYNC110 - until the replica is heard of
        await asyncio.sleep(0.001)
    # The second, which never ran, is acknowledged; the model is at work on the first.
    assert one.in_flight == 1
    model.may_work.set()
    while one.in_flight:  # noqa: ASYNC110 - until its answer is here
        await asyncio.sleep(0.001)
    assert model.seen == [1]


async def test_a_replica_that_owes_an_answer_for_long_gets_no_more_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = replica(folder)
    local = LocalReplicas(folder)
    task = await begin(local, hung, rows(1))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    monkeypatch.setattr("inference_service.serve.sockets.OWED_S", 0.0)
    assert await local.least_loaded() is None
    monkeypatch.setattr("inference_service.serve.sockets.OWED_S", 3600.0)
    assert await local.least_loaded() is not None
    hung.may_work.set()


@pytest.mark.parametrize("given_up", [False, True])
def test_a_replica_that_has_not_read_a_large_batch_gets_one_more_and_no_third(folder: Path, given_up: bool) -> None:
    folder.mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"stopped{SUFFIX}"))
    listener.listen()

    async def scenario() -> None:
        local = LocalReplicas(folder)
        one = await local.least_loaded()
        assert one is not None
        batches = []
        for _ in range(2):
            # Far more than a socket holds: most of it waits here.
            assert await local.least_loaded() is one
            batches.append(asyncio.create_task(one.forward(Rows("raw", {"x": np.zeros(1_000_000)}))))
            await asyncio.sleep(0)
            if given_up:
                batches[-1].cancel()
                await asyncio.wait(batches)
        assert await local.least_loaded() is None
        assert await local.least_loaded(busy_too=True) is None
        for batch in batches:
            batch.cancel()
        await asyncio.gather(*batches, return_exceptions=True)

    on_a_loop(scenario)
    listener.close()


async def test_sockets_are_of_no_use_where_other_machines_have_replicas_too(folder: Path) -> None:
    replica(folder)
    local = LocalReplicas(folder, replicas=2)
    assert await local.least_loaded() is None
    assert await local.least_loaded(busy_too=True) is not None  # a batch whose replica died
    replica(folder)
    while (one := await local.least_loaded()) is None:  # noqa: ASYNC110 - until the replica is heard of
        await asyncio.sleep(0.001)
    assert one._transport is not None
    one._transport.abort()  # one that dies is started again, and the other goes on meanwhile
    await asyncio.sleep(0)
    assert await local.least_loaded() is not None


async def test_replicas_that_listen_elsewhere_are_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    replica(folder)
    for here in (LocalReplicas(folder, 1, "v1"), LocalReplicas(folder, 0, "v1"), LocalReplicas(None, 1, "v1")):
        await here.least_loaded()
    assert "v1" not in caplog.text
    elsewhere = LocalReplicas(folder, 2, "v2")
    for _ in range(3):
        assert await elsewhere.least_loaded() is None
    (reported,) = (record.getMessage() for record in caplog.records if "v2" in record.getMessage())
    assert "the sockets of 1 of 2 replicas are here" in reported
