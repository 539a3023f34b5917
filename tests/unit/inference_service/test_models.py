from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from inference_service.batcher import Batcher
from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import Limits
from inference_service.domain.deployment import Deployment, ModelVersion, State, check_spec
from inference_service.domain.held_bytes import HeldBytes
from inference_service.domain.request_parameters import RequestedOutput
from inference_service.domain.rows import Outputs, Rows
from inference_service.domain.signature import Signature, TensorSpec
from inference_service.domain.statistics import Statistics
from inference_service.domain.tensors import WireTensor
from inference_service.models import Models, application_name
from inference_service.shadowing import Shadowing
from shared.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable

SIGNATURE = Signature(
    (TensorSpec("x", "UINT8", (-1,)),),
    TensorSpec("x", "FP32", (-1,)),
    (TensorSpec("double", "UINT8", (-1,)), TensorSpec("same", "UINT8", (-1,))),
)
VERSION = ModelVersion(
    number="1",
    checkpoint="trainingJobs/j/checkpoints/c",
    folder="f",
    checkpoint_sha256="00",
    training_job="trainingJobs/j",
    signature=SIGNATURE,
)
READY = Deployment(
    name="deployments/m",
    uid="u",
    spec=check_spec(
        checkpoint="trainingJobs/j",
        num_replicas=0,
        threads_per_replica=0,
        max_batch_size=0,
        max_batch_delay_s=None,
        max_queued_rows=0,
    ),
    state=State.READY,
    generation=1,
    operation="operations/o",
    request_id="",
    versions=(VERSION,),
    create_time=1.0,
    update_time=1.0,
)


class Doubler:
    """Answers while it has a replica, and keeps what comes before that waiting."""

    def __init__(self) -> None:
        self.has_replica = asyncio.Event()
        self.has_replica.set()
        self.sizes: list[int] = []

    async def forward(self, rows: Rows) -> Outputs:
        self.sizes.append(len(rows))
        await self.has_replica.wait()
        return Outputs([rows.values["x"] * 2, rows.values["x"]])


def attach(
    models: Models, one: Deployment = READY, doubler: Doubler | None = None, statistics: Statistics | None = None
) -> Doubler:
    limits = Limits(max_rows=4, max_delay_s=0, max_queued_rows=9, max_in_flight=1)
    doubler = doubler or Doubler()
    batcher = Batcher(doubler, limits, BatchTimes(), statistics or Statistics())
    models.attach(application_name(one, VERSION), batcher)
    return doubler


def tensor(*values: int) -> WireTensor:
    return WireTensor("inputs[0]", "x", "UINT8", (len(values),), bytes(values), {})


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


def test_a_ready_deployment_answers_only_once_its_replicas_do() -> None:
    async def scenario() -> None:
        models = Models()
        models.replace([READY])
        assert (models.is_ready("m", "1"), models.all_ready()) == (False, False)
        with pytest.raises(Unavailable, match="loaded again"):
            await models.infer(*models.choose("m", ""), [tensor(1)], [], None)
        attach(models)
        assert (models.is_ready("m", "1"), models.is_ready("m", "2"), models.all_ready()) == (True, False, True)
        asked = [RequestedOutput("same"), RequestedOutput("double")]
        answer = await models.infer(*models.choose("m", ""), [tensor(1, 2)], asked, None)
        assert [(spec.name, values.tolist()) for spec, values in answer.outputs] == [
            ("same", [1, 2]),
            ("double", [2, 4]),
        ]
        assert answer.version.number == "1"

    asyncio.run(scenario())


def test_a_version_that_has_lost_its_replicas_does_not_answer_and_what_comes_waits_for_one_that_comes_back() -> None:
    name = application_name(READY, VERSION)

    async def scenario() -> None:
        models = Models(lost_after_s=0.0)
        models.replace([READY])
        doubler = attach(models)
        models.scaled({name: 1})
        assert (models.is_ready("m", ""), models.is_ready("m", "1"), models.all_ready()) == (True, True, True)
        models.scaled({name: 0})
        doubler.has_replica.clear()
        assert (models.is_ready("m", ""), models.is_ready("m", "1"), models.all_ready()) == (False, False, False)
        assert [one.answers for one in models.listed()] == [False]
        ready = asyncio.create_task(models.wait_until_ready("m"))
        by_weight = asyncio.create_task(models.infer(*models.choose("m", ""), [tensor(1)], [], 5.0))
        by_name = asyncio.create_task(models.infer(*models.choose("m", "1"), [tensor(2)], [], 5.0))
        await asyncio.sleep(0.05)
        assert (ready.done(), by_weight.done(), by_name.done()) == (False, False, False)
        doubler.has_replica.set()
        models.scaled({name: 1})
        await asyncio.wait_for(ready, 1)
        answers = [await by_weight, await by_name]
        assert [answer.outputs[0][1].tolist() for answer in answers] == [[2], [4]]
        assert models.is_ready("m", "")

    asyncio.run(scenario())


def test_a_deployment_written_while_the_logs_are_read_is_not_lost() -> None:
    models = Models()
    models.replace([])
    models.begin_reading()
    models.put(replace(READY, state=State.LOADING))
    models.replace([])  # read before it was written
    with pytest.raises(Unavailable):
        models.signature("m", "")
    models.begin_reading()
    models.replace([])
    with pytest.raises(NotFound):
        models.signature("m", "")


def test_a_deployment_that_is_gone_is_kept_neither_from_a_call_nor_from_the_logs() -> None:
    gone = replace(READY, state=State.GONE)
    models = Models()
    models.begin_reading()
    models.put(gone)  # as the answer to a creation that is asked for again after the deployment went
    models.replace([])
    with pytest.raises(NotFound):
        models.signature("m", "")
    models.put(READY)
    models.put(gone)
    with pytest.raises(NotFound):
        models.signature("m", "")
    assert list(models.listed()) == []


def test_an_earlier_namesake_that_is_gone_takes_nothing_away() -> None:
    models = Models()
    models.replace([READY])
    models.put(replace(READY, uid="earlier", state=State.GONE))
    assert models.signature("m", "")[0] == READY


def test_a_request_larger_than_a_batch_is_answered_whole() -> None:
    async def scenario() -> None:
        models = Models()
        models.replace([READY])
        attach(models)
        values = np.arange(9, dtype=np.uint8)
        asked = [RequestedOutput("double")]
        answer = await models.infer(*models.choose("m", "1"), [tensor(*values.tolist())], asked, 5.0)
        assert answer.outputs[0][1].tolist() == (values * 2).tolist()

    asyncio.run(scenario())


def test_the_statistics_of_a_version_are_made_once_however_often_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Statistics] = []

    def make() -> Statistics:
        made.append(Statistics())
        return made[-1]

    monkeypatch.setattr("inference_service.models.Statistics", make)

    async def scenario() -> None:
        models = Models()
        made.clear()  # what is not of any version
        assert {id(models.statistics(READY, VERSION)) for _ in range(3)} == {id(made[0])}
        assert len(made) == 1

    asyncio.run(scenario())


def test_requests_of_all_models_are_bounded_in_bytes_and_one_alone_always_has_room() -> None:
    other = replace(READY, name="deployments/n", uid="other")

    async def scenario() -> None:
        models = Models(held=HeldBytes(3))
        models.replace([READY, other])
        doubler = attach(models)
        attach(models, other)
        doubler.has_replica.clear()
        large = asyncio.create_task(models.infer(*models.choose("m", ""), [tensor(1, 2, 3, 4)], [], 5.0))
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted, match="requests of 4 bytes wait already") as refused:
            await models.infer(*models.choose("n", ""), [tensor(1)], [], 5.0)
        assert refused.value.retry_after_s is not None
        load = models.load_of(application_name(other, other.versions[0]))
        assert load is not None
        assert load.refused == 1, "more replicas would make room"
        large.cancel()  # its bytes are free again, as those of one that is answered
        await asyncio.wait([large])
        doubler.has_replica.set()
        for name in ("m", "n", "m"):
            await models.infer(*models.choose(name, ""), [tensor(1, 2, 3)], [], 5.0)

    asyncio.run(scenario())


def test_copies_for_a_shadow_leave_half_of_the_bytes_to_requests() -> None:
    async def scenario() -> None:
        held, statistics, doubler = HeldBytes(10), Statistics(), Doubler()
        limits = Limits(max_rows=4, max_delay_s=0, max_queued_rows=9, max_in_flight=1)
        real, shadow = (Batcher(doubler, limits, BatchTimes(), Statistics()) for _ in range(2))
        shadowing = Shadowing(held)

        def copy(size_bytes: int) -> None:
            shadowing.copy(Rows("raw", {"x": np.zeros(1)}, size_bytes=size_bytes), real, shadow, statistics)

        copy(6)
        assert statistics.shadowed == {"SHED": 1}
        copy(5)
        assert not held.would_leave_half(1)
        while "OK" not in statistics.shadowed:  # noqa: ASYNC110 - nobody waits for it
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert held.would_leave_half(5)

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_rows_that_nobody_asked_for_share_no_batch_with_requests_and_are_counted_nowhere() -> None:
    async def scenario() -> None:
        models, statistics, doubler = Models(), Statistics(), Doubler()
        models.replace([READY])
        attach(models, doubler=doubler, statistics=statistics)
        held_rows = Rows("raw", {"x": np.array([7, 8], np.uint8)})
        (double, _) = await models.try_out(READY, VERSION, held_rows)
        assert double.tolist() == [14, 16]
        assert statistics.batch_rows.count == 0
        doubler.has_replica.clear()
        tasks = [asyncio.create_task(models.infer(*models.choose("m", ""), [tensor(1)], [], 5.0)) for _ in range(2)]
        tried = asyncio.create_task(models.try_out(READY, VERSION, held_rows))
        await asyncio.sleep(0.01)
        doubler.has_replica.set()
        await asyncio.gather(*tasks, tried)
        assert sorted(doubler.sizes) == [1, 1, 2, 2]
        assert (statistics.batch_rows.count, statistics.batch_rows.sum) == (2, 2)

    asyncio.run(scenario())


def test_whoever_reads_while_the_logs_are_taken_over_finds_what_was_there_before() -> None:
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

    monkeypatch.setattr("inference_service.models.Statistics", make)
    assert models.statistics(READY, VERSION) is by_another_thread[0]
