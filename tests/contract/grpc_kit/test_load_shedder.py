"""Where calls wait long before they are taken, some are turned away before they are read: those that cannot wait."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import grpc
import pytest

from millrace.data.v1 import data_service_pb2, resources_pb2
from shared.errors import ResourceExhausted
from shared.grpc_server import interceptor as load_shedder_module
from shared.grpc_server.interceptor import ALL_FROM_S, BUSY_FROM_S, FULLY_BUSY_S, SOME_FROM_S, LoadShedder
from tests.support.grpc_kit import GET_DATASET, Kit, call_error, echo, kit_server, with_kit
from tests.support.inference_server import until

# A hundred times what they are elsewhere, so that a busy machine answers an impatient call, too.
IMPATIENT_S, MIN_TIME_LEFT_S = 90.0, 240.0


@pytest.fixture(autouse=True)
def patient_from_100_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_shedder_module, "MIN_TIME_LEFT_S", 100.0)


class Watched(LoadShedder):
    """Before GetDataset; `waits_s` is what calls are said to wait, None for what they do."""

    def __init__(self, waits_s: float | None = None) -> None:
        super().__init__([GET_DATASET], self._count)
        self.waits_s = waits_s
        self.turned = 0

    def wait_s(self) -> float:
        return super().wait_s() if self.waits_s is None else self.waits_s

    def _count(self) -> None:
        self.turned += 1


async def test_every_call_comes_in_where_none_waits() -> None:
    load_shedder = Watched(SOME_FROM_S)  # the model answers each, so none is admitted only to be refused

    async with kit_server(load_shedder=load_shedder) as kit:
        for number in range(20):
            assert (await kit.get(f"n{number}", timeout=IMPATIENT_S)).name == f"n{number}"

    assert load_shedder.turned == 0


async def test_a_call_that_cannot_wait_is_turned_away_without_being_read() -> None:
    load_shedder, asked = Watched(ALL_FROM_S), []

    async def remember(request: Any, _: Any) -> resources_pb2.Dataset:
        asked.append(request.name)
        return resources_pb2.Dataset()

    async with kit_server(remember, load_shedder=load_shedder) as kit:
        answer = await call_error(kit.get(timeout=IMPATIENT_S, metadata=[("x-request-id", "mine")]))
        assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer.info.reason == "OVERLOADED"
        assert answer.trailers["x-request-id"] == "mine"
        assert answer.retry_after_s
        # Not even what could not be parsed is looked at.
        unreadable = kit.raw.unary_unary(GET_DATASET)(b"\xff\xff", timeout=IMPATIENT_S)
        assert (await call_error(unreadable)).code is grpc.StatusCode.RESOURCE_EXHAUSTED

    assert load_shedder.turned == 2
    assert not asked


async def test_who_can_wait_is_let_in_however_many_come() -> None:
    async with kit_server(load_shedder=Watched(ALL_FROM_S)) as kit:
        assert (await kit.get("patient", timeout=MIN_TIME_LEFT_S)).name == "patient"
        assert (await kit.get("without a deadline")).name == "without a deadline"


def turned_of_1000(share: float, remaining_s: float = IMPATIENT_S) -> int:
    """Where calls wait for such a share of the way between the thresholds, and all that are let in are served."""
    load_shedder = Watched(SOME_FROM_S + share * (ALL_FROM_S - SOME_FROM_S))

    async def scenario() -> None:
        for _ in range(1000):
            if not load_shedder.turns_away(remaining_s):
                load_shedder.ended(in_vain=False)

    asyncio.run(scenario())
    return load_shedder.turned


def test_the_longer_calls_wait_the_more_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", random.Random(1).random)
    assert turned_of_1000(0.0) == 0
    assert 150 < turned_of_1000(0.2) < 250
    assert turned_of_1000(1.0) == 1000


def test_a_call_without_any_time_left_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 1.0)
    assert turned_of_1000(0.2, remaining_s=0.0) == 1000


def test_a_call_that_would_be_refused_later_is_refused_unread_under_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No count decays while a slow machine answers the calls, and chance turns the same ones away each time.
    monkeypatch.setattr(load_shedder_module, "REMEMBERED_S", 1e6)
    monkeypatch.setattr(random, "random", random.Random(1).random)

    async def refuse(_: Any, __: Any) -> resources_pb2.Dataset:
        raise ResourceExhausted("full", reason="QUEUE_FULL")

    async def scenario(kit: Kit) -> None:
        for _ in range(200):
            assert (await call_error(kit.get(timeout=IMPATIENT_S))).code is grpc.StatusCode.RESOURCE_EXHAUSTED

    busy, idle = Watched((FULLY_BUSY_S + SOME_FROM_S) / 2), Watched(BUSY_FROM_S)
    with_kit(scenario, refuse, load_shedder=busy)
    with_kit(scenario, refuse, load_shedder=idle)
    assert busy.turned > 100
    assert idle.turned == 0


async def test_the_probe_measures_how_long_calls_wait_and_when_the_wait_ends() -> None:
    load_shedder = Watched()

    async def work(request: Any, _: Any) -> resources_pb2.Dataset:
        time.sleep(0.002)  # noqa: ASYNC251 - a loop that is busy is what this is about
        return resources_pb2.Dataset(name=request.name)

    async with kit_server(work, load_shedder=load_shedder) as kit:
        enough = asyncio.Event()

        async def ask_on() -> None:
            while not enough.is_set():
                await kit.get(timeout=MIN_TIME_LEFT_S)

        flood = [asyncio.ensure_future(ask_on()) for _ in range(60)]
        await until(lambda: load_shedder.wait_s() > SOME_FROM_S, "calls to wait")
        enough.set()
        await asyncio.gather(*flood)
        await until(lambda: load_shedder.wait_s() < SOME_FROM_S, "calls to wait no longer")

    assert load_shedder.turned == 0


class ProbingOnRequest(Watched):
    """Begins a probe only when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_probe = asyncio.Event()
        self.probes = 0
        self.longest_s = 0.0

    @property
    def is_probing(self) -> bool:
        return self._probed_s is not None

    @property
    def last_found_s(self) -> float:
        return self._found_s[-1]

    async def _probe(self, probe: Any) -> None:
        await self.may_probe.wait()
        self.may_probe.clear()
        await super()._probe(probe)
        self.probes += 1

    def _find(self, wait_s: float) -> None:
        super()._find(wait_s)
        self.longest_s = max(self.longest_s, wait_s)


async def test_one_call_that_keeps_all_others_waiting_turns_none_away() -> None:
    load_shedder = ProbingOnRequest()

    async def work(request: Any, _: Any) -> resources_pb2.Dataset:
        if request.name == "long":
            load_shedder.may_probe.set()
            while not load_shedder.is_probing:  # noqa: ASYNC110 - nothing tells that it began
                await asyncio.sleep(0)
            time.sleep(ALL_FROM_S * 2)  # noqa: ASYNC251 - a loop that is busy is what this is about
        return resources_pb2.Dataset(name=request.name)

    async with kit_server(work, load_shedder=load_shedder) as kit:

        async def probe_once() -> None:
            before = load_shedder.probes
            load_shedder.may_probe.set()
            while load_shedder.probes == before:
                await kit.get(timeout=MIN_TIME_LEFT_S)  # it probes only while calls come

        for _ in range(3):
            await probe_once()
            load_shedder.longest_s = 0.0
            while load_shedder.last_found_s > BUSY_FROM_S:  # as other work on the machine may have it
                await probe_once()
            calls = [kit.get("long", timeout=MIN_TIME_LEFT_S), *(kit.get(timeout=IMPATIENT_S) for _ in range(10))]
            await asyncio.gather(*calls)
            await until(lambda: not load_shedder.is_probing, "the end of the probe that met the long call")
            assert load_shedder.longest_s >= ALL_FROM_S

    assert load_shedder.turned == 0


async def test_a_load_shedder_that_can_no_longer_probe_lets_all_in(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(LoadShedder):
        async def _probe(self, _: Any) -> None:
            raise RuntimeError("no thread for the probe")

    load_shedder = Broken([GET_DATASET], lambda: None)
    load_shedder._found_s = (ALL_FROM_S, ALL_FROM_S)
    assert load_shedder.turns_away(IMPATIENT_S)
    await asyncio.wait_for(load_shedder.watch("127.0.0.1:1"), 60)
    assert not load_shedder.turns_away(IMPATIENT_S)

    assert "turns none away" in caplog.text


async def test_behind_a_load_shedder_a_call_is_what_it_is_elsewhere() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(request: Any, context: Any) -> Any:
        if request.name != "wait":
            return await echo(request, context)
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    # Even where other work keeps this process waiting, none of these calls is to be turned away.
    async with kit_server(wait_for_ever, load_shedder=Watched(0.0)) as kit:
        answer = await call_error(kit.raw.unary_unary(GET_DATASET)(b"\xff\xff"))
        assert (answer.code, answer.info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
        answer = await call_error(kit.raw.stream_unary(GET_DATASET)(iter(())))
        assert (answer.code, answer.info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
        oversized = data_service_pb2.GetDatasetRequest(name="x" * (65 << 20))
        assert (await call_error(kit.data.GetDataset(oversized))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        while not began.is_set():  # on a busy machine a deadline may pass before the server has read the call
            assert (await call_error(kit.get("wait", timeout=0.05))).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(ended.wait(), 60)
        began.clear()
        ended.clear()
        given_up = kit.data.GetDataset(data_service_pb2.GetDatasetRequest(name="wait"))
        await asyncio.wait_for(began.wait(), 60)
        given_up.cancel()
        await asyncio.wait_for(ended.wait(), 60)
        assert (await kit.get("n")).name == "n"
