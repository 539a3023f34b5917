"""Calls that send chunks hold much memory each, and are counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import google_crc32c
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from data_service import servicer as upload_servicer
from data_service.servicer import UploadServicerPart
from millrace.data.v1 import data_service_pb2 as pb
from millrace_client.uploads import upload
from shared import streaming
from shared.errors import DeadlineExceeded
from shared.storage import ObjectStore
from shared.streaming import Slots
from tests.support.upload_server import DATASET, UploadServer, calling, stub_of, upload_server, uploads_of
from tests.support.waiting import wait_until


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[Slots]:
    """Those of the server, once it runs."""
    made: list[Slots] = []

    def noted(*given: Any, **named: Any) -> Slots:
        made.append(Slots(*given, **named))
        return made[-1]

    monkeypatch.setattr(upload_servicer, "Slots", noted)
    return made


@pytest.fixture
def server(store: ObjectStore, slots: list[Slots], monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadServer]:
    """Take two calls at a time."""
    monkeypatch.setattr(upload_servicer, "MAX_SENDS", 2, raising=False)
    with upload_server(store) as running:
        assert slots
        yield running


class Sending:
    """A call that has sent one chunk, and goes on as it is told."""

    def __init__(self, stub: Any, upload_id: str) -> None:
        self.name = stub.StartUpload(pb.StartUploadRequest(parent=DATASET, upload_id=upload_id)).name
        self._go = threading.Semaphore(0)
        self._over = False
        self.call = stub.UploadChunks(self._requests(), timeout=60)
        assert next(self.call).acknowledged_size == 1

    def more(self) -> int:
        """How much is acknowledged with one chunk more."""
        self._go.release()
        return int(next(self.call).acknowledged_size)

    def end(self) -> None:
        self._over = True
        self._go.release()
        assert list(self.call) == []

    def _requests(self) -> Iterator[pb.UploadChunksRequest]:
        offset = 0
        while not self._over:
            yield pb.UploadChunksRequest(name=self.name, offset=offset, data=b"x", crc32c=google_crc32c.value(b"x"))
            offset += 1
            self._go.acquire()


def refusal(stub: Any, upload_id: str) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        Sending(stub, upload_id)
    return raised.value


def reason_of(error: Any) -> str:
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return str(info.reason)


def test_one_call_more_than_there_is_room_for_is_refused_until_one_ends(server: UploadServer) -> None:
    with stub_of(server) as stub:
        first, second = Sending(stub, "a"), Sending(stub, "b")
        error: Any = refusal(stub, "c")
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(error) == "TOO_MANY_UPLOADS"
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in rpc_status.from_call(error).details)
        assert first.more() == 2
        first.end()
        third = Sending(stub, "d")
        third.end()
        second.end()


def test_a_client_that_sends_nothing_gives_its_place_to_one_that_waits(
    server: UploadServer, slots: list[Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_of(server) as stub:
        silent, busy = Sending(stub, "a"), Sending(stub, "b")
        monkeypatch.setattr(streaming, "STALLED_AFTER_S", 0.2)
        wait_until(lambda: min(slot.stalled_s for slot in slots[0]._taken) >= 0.2, "both to be stalled")
        assert busy.more() == 2  # from now on the other has waited longest
        third = Sending(stub, "c")
        with pytest.raises(grpc.RpcError) as raised:
            next(silent.call)
        error: Any = raised.value
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason_of(error) == "SENDER_STALLED"
        there = stub.GetUpload(pb.GetUploadRequest(name=silent.name))
        assert there.acknowledged_size == 1
        busy.end()
        third.end()


def test_the_client_waits_for_its_turn(server: UploadServer) -> None:
    with stub_of(server) as stub, calling(server) as (caller, calls):
        others = [Sending(stub, "a"), Sending(stub, "b")]
        done: list[Any] = []
        waiting = threading.Thread(target=lambda: done.append(upload(caller, calls, DATASET, b"patient")))
        waiting.start()
        waiting.join(1)
        assert waiting.is_alive()
        others[0].end()
        wait_until(lambda: bool(done), "the upload")
        waiting.join()
        assert done[0].size_bytes == len(b"patient")
        others[1].end()


async def test_a_call_that_lost_its_place_leaves_nothing_behind(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client takes nothing and sends nothing, so two of its tasks wait when both are told."""
    monkeypatch.setattr(streaming, "STALLED_AFTER_S", 0.0)
    monkeypatch.setattr(upload_servicer, "MAX_SENDS", 1)
    servicer: Any = UploadServicerPart(uploads_of(store))

    all_sent = asyncio.Event()

    async def requests(name: str, answered: asyncio.Event) -> Any:
        for offset in range(4):
            if offset:
                await answered.wait()
            yield pb.UploadChunksRequest(name=name, offset=offset, data=b"x", crc32c=google_crc32c.value(b"x"))
        all_sent.set()
        await asyncio.Event().wait()

    async def take_one(name: str) -> None:
        answered = asyncio.Event()
        async with aclosing(servicer.UploadChunks(requests(name, answered), None)) as answers:
            async for _ in answers:
                answered.set()
                await asyncio.Event().wait()

    names = [
        (await servicer.StartUpload(pb.StartUploadRequest(parent=DATASET, upload_id=one), None)).name for one in "ab"
    ]
    stalled = asyncio.create_task(take_one(names[0]))
    await asyncio.wait_for(all_sent.wait(), 60)
    other = asyncio.create_task(take_one(names[1]))
    with pytest.raises(DeadlineExceeded, match="sent or taken"):
        await stalled
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    # What it was writing is written; after that nothing of it is left.
    async with asyncio.timeout(60):
        while asyncio.all_tasks() != {asyncio.current_task()}:  # noqa: ASYNC110 - what is waited for says nothing
            await asyncio.sleep(0.01)
