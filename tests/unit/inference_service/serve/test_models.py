"""What a process says that it can answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from inference_service.domain.batch_policy import BatchTimes, Limits
from inference_service.domain.deployment import Deployment, application_name
from inference_service.domain.signature import Outputs, RequestedOutput, Rows
from inference_service.domain.statistics import Statistics
from inference_service.serve.batcher import Batcher
from inference_service.serve.infer import Dispatcher
from inference_service.serve.models import Answer, Models
from shared.errors import InvalidArgument, NotFound, Unavailable
from tests.support.inference_server import until
from tests.unit.inference_service.doubling import READY, VERSION, Doubler, attach, tensor


def test_before_the_logs_are_read_nothing_is_known_to_be_missing() -> None:
    models = Models()
    with pytest.raises(Unavailable):
        models.signature("m", "")
    assert (models.is_ready("m", ""), models.all_ready()) == (False, False)


def test_a_model_that_no_log_names_is_not_found() -> None:
    models = Models()
    models.replace([])
    with pytest.raises(NotFound, match="'m'"):
        models.signature("m", "")
    assert models.all_ready()


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Models().is_ready("", "")


async def test_a_ready_deployment_answers_only_once_its_replicas_do() -> None:
    models = Models()
    models.replace([READY])
    assert (models.is_ready("m", "1"), models.all_ready()) == (False, False)
    with pytest.raises(Unavailable, match="loaded again"):
        await Dispatcher(models).infer(*models.choose("m", ""), [tensor(1)], [], None)
    attach(models)
    assert (models.is_ready("m", "1"), models.is_ready("m", "2"), models.all_ready()) == (True, False, True)
    asked = [RequestedOutput("same"), RequestedOutput("double")]
    answer = await Dispatcher(models).infer(*models.choose("m", ""), [tensor(1, 2)], asked, None)
    assert [(spec.name, values.tolist()) for spec, values in answer.outputs] == [
        ("same", [1, 2]),
        ("double", [2, 4]),
    ]
    assert answer.version.number == "1"


async def test_a_version_that_has_lost_its_replicas_does_not_answer_and_what_comes_waits_for_one_that_comes_back() -> (
    None
):
    name = application_name(READY, VERSION)

    models = Models(lost_after_s=0.0)
    dispatcher = Dispatcher(models)
    models.replace([READY])
    doubler = attach(models)
    models.scaled({name: 1})
    assert (models.is_ready("m", ""), models.is_ready("m", "1"), models.all_ready()) == (True, True, True)
    models.scaled({name: 0})
    doubler.has_replica.clear()
    assert (models.is_ready("m", ""), models.is_ready("m", "1"), models.all_ready()) == (False, False, False)
    assert [one.answers for one in models.listed()] == [False]
    ready = asyncio.create_task(models.wait_until_ready("m"))
    by_weight = asyncio.create_task(dispatcher.infer(*models.choose("m", ""), [tensor(1)], [], 240.0))
    by_name = asyncio.create_task(dispatcher.infer(*models.choose("m", "1"), [tensor(2)], [], 240.0))
    await asyncio.sleep(0.05)
    assert (ready.done(), by_weight.done(), by_name.done()) == (False, False, False)
    doubler.has_replica.set()
    models.scaled({name: 1})
    await asyncio.wait_for(ready, 60)
    answers = [await by_weight, await by_name]
    assert [answer.outputs[0][1].tolist() for answer in answers] == [[2], [4]]
    assert models.is_ready("m", "")


async def test_the_statistics_of_a_version_are_made_once_however_often_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Statistics] = []

    def make() -> Statistics:
        made.append(Statistics())
        return made[-1]

    monkeypatch.setattr("inference_service.serve.models.Statistics", make)

    models = Models()
    made.clear()  # what is not of any version
    assert {id(models.statistics(READY, VERSION)) for _ in range(3)} == {id(made[0])}
    assert len(made) == 1


async def test_rows_that_nobody_asked_for_share_no_batch_with_requests_and_are_counted_nowhere() -> None:
    models, statistics, doubler = Models(), Statistics(), Doubler()
    dispatcher = Dispatcher(models)
    models.replace([READY])
    attach(models, doubler=doubler, statistics=statistics)
    holdout_rows = Rows("raw", {"x": np.array([7, 8], np.uint8)})
    (double, _) = await models.try_out(READY, VERSION, holdout_rows)
    assert double.tolist() == [14, 16]
    assert statistics.batch_rows.count == 0
    doubler.has_replica.clear()
    tasks = [asyncio.create_task(dispatcher.infer(*models.choose("m", ""), [tensor(1)], [], 240.0)) for _ in range(2)]
    tried = asyncio.create_task(models.try_out(READY, VERSION, holdout_rows))
    await asyncio.sleep(0.01)
    doubler.has_replica.set()
    await asyncio.gather(*tasks, tried)
    assert sorted(doubler.sizes) == [1, 1, 2, 2]
    assert (statistics.batch_rows.count, statistics.batch_rows.sum) == (2, 2)


async def test_rows_that_nobody_asked_for_are_sent_when_no_request_waits_any_longer() -> None:
    models, doubler = Models(), Doubler()
    dispatcher = Dispatcher(models)
    models.replace([READY])
    attach(models, doubler=doubler)
    doubler.has_replica.clear()

    def asked(*values: int) -> asyncio.Task[Answer]:
        return asyncio.create_task(dispatcher.infer(*models.choose("m", ""), [tensor(*values)], [], 240.0))

    requests = [asked(1)]
    await until(lambda: doubler.sizes == [1], "a batch to be at work")
    requests += [asked(1, 2, 3), asked(1, 2, 3)]
    await until(lambda: models.batcher(READY, VERSION).queued_rows == 6, "two to wait")
    tried = asyncio.create_task(models.try_out(READY, VERSION, Rows("raw", {"x": np.array([7, 8], np.uint8)})))
    await asyncio.sleep(0.01)
    doubler.has_replica.set()
    await asyncio.gather(tried, *requests)
    assert doubler.sizes == [1, 3, 3, 2]


class Timed(Doubler):
    """One replica, which takes 2 ms for a batch; the next one waits there meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._replica = asyncio.Lock()

    async def forward(self, rows: Rows) -> Outputs:
        async with self._replica:
            await asyncio.sleep(0.002)
        return await super().forward(rows)


async def test_rows_that_nobody_asked_for_find_their_moment_while_clients_ask_one_request_after_another() -> None:
    models = Models()
    dispatcher = Dispatcher(models)
    models.replace([READY])
    limits = Limits(max_rows=4, max_delay_s=0.0, max_queued_rows=9, max_in_flight=2)
    batcher = Batcher(Timed(), limits, BatchTimes({1: 0.002, 4: 0.002}), Statistics())
    models.attach(application_name(READY, VERSION), batcher)

    async def client() -> None:
        while True:
            await dispatcher.infer(*models.choose("m", ""), [tensor(1)], [], None)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    async with asyncio.timeout(60):
        for _ in range(5):
            await models.try_out(READY, VERSION, Rows("raw", {"x": np.array([7], np.uint8)}))
    for one in clients:
        one.cancel()


def test_a_reader_during_the_takeover_of_logs_finds_the_earlier_state() -> None:
    models = Models()
    models.replace([READY])
    statistics = models.statistics(READY, VERSION)
    seen: list[str] = []

    def read() -> Iterator[Deployment]:
        seen.extend(one.deployment.name for one in models.listed())
        yield READY

    models.replace(read())
    assert seen == [READY.name]
    assert models.statistics(READY, VERSION) is statistics
    models.replace([])
    assert models.statistics(READY, VERSION) is not statistics


def test_of_statistics_that_two_threads_make_at_once_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models()
    by_another_thread: list[Statistics] = []

    def make() -> Statistics:
        if not by_another_thread:
            by_another_thread.append(Statistics())
            by_another_thread[:] = [models.statistics(READY, VERSION)]
        return Statistics()

    monkeypatch.setattr("inference_service.serve.models.Statistics", make)
    assert models.statistics(READY, VERSION) is by_another_thread[0]
