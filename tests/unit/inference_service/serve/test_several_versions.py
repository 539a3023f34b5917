"""Which version answers, by weight, header and name, and copies for a shadow, over a real server."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from inference import grpc_service_pb2 as oip
from inference_service.domain.deployment import Deployment, HeaderRoute, Shadow
from inference_service.domain.signature import Outputs, Rows
from tests.support.grpc_kit import call_error, everything
from tests.support.inference_server import Classifier, Server, ask, attach, deployment, inference_server, until

CANARY = (("x-canary", "yes"),)


def versions(*weights: int, **changes: Any) -> Deployment:
    """READY, with a loaded version for each weight."""
    one = deployment()
    (first,) = one.versions
    numbered = (replace(first, number=str(place), weight=weight) for place, weight in enumerate(weights, 1))
    return replace(one, versions=tuple(numbered), numbers_used=len(weights), **changes)


def shadowed(server: Server, number: str = "2") -> dict[str, int]:
    (one,) = server.models.listed_of("m", number)
    return one.statistics.shadowed


def was_copied(server: Server, times: int) -> bool:
    return sum(shadowed(server).values()) == times


async def answered_by(server: Server, times: int, **fields: Any) -> Counter[str]:
    metadata = fields.pop("metadata", ())
    answers = await asyncio.gather(*(server.stub.ModelInfer(ask(1, **fields), metadata=metadata) for _ in range(times)))
    return Counter(answer.model_version for answer in answers)


async def test_requests_are_shared_out_by_weight_among_the_versions_that_have_replicas() -> None:
    async with inference_server(versions(50, 50, 0)) as server:
        assert await answered_by(server, 20) == {"1": 20}  # nothing of version 2 is there yet
        attach(server.models, versions(50, 50, 0), Classifier(), number="2")
        attach(server.models, versions(50, 50, 0), Classifier(), number="3")
        counts = await answered_by(server, 60)
        assert counts.keys() == {"1", "2"}
        assert await answered_by(server, 5, model_version="3") == {"3": 5}


async def test_a_header_of_the_call_or_of_the_request_leads_to_its_version() -> None:
    one = versions(100, 0, routes=(HeaderRoute("x-canary", "yes", "2"),))

    async with inference_server(one) as server:
        attach(server.models, one, Classifier(), number="2")
        assert await answered_by(server, 5) == {"1": 5}
        assert await answered_by(server, 5, metadata=CANARY) == {"2": 5}
        own = {"headers": {"string_param": '{"x-canary": "yes"}'}}
        assert await answered_by(server, 5, parameters=own) == {"2": 5}
        assert await answered_by(server, 5, metadata=CANARY, model_version="1") == {"1": 5}
        requests = [ask(1), ask(2, parameters={"headers": {"string_param": '{"x-canary": "no"}'}})]
        answers = await everything(server.stub.ModelStreamInfer(iter(requests), metadata=CANARY))
        assert [answer.infer_response.model_version for answer in answers] == ["2", "1"]
        refusal = await call_error(
            server.stub.ModelInfer(ask(1, parameters={"headers": {"string_param": "x-canary: yes"}}))
        )
        assert (refusal.code, refusal.violations[0][0]) == (grpc.StatusCode.INVALID_ARGUMENT, "parameters.headers")


async def test_metadata_lists_the_versions_that_can_be_asked_and_the_index_every_one() -> None:
    one = versions(100, 0, 0)
    loading, going = replace(one.versions[1], signature=None), replace(one.versions[2], retired_at=1.0)
    one = replace(one, versions=(one.versions[0], loading, going))

    async with inference_server(one) as server:
        assert (await server.stub.ServerReady(oip.ServerReadyRequest())).ready
        metadata = await server.stub.ModelMetadata(oip.ModelMetadataRequest(name="m"))
        assert list(metadata.versions) == ["1"]
        index = await server.stub.RepositoryIndex(oip.RepositoryIndexRequest())
        assert [(found.version, found.state, found.reason) for found in index.models] == [
            ("1", "READY", ""),
            ("2", "LOADING", "the version is being rolled out"),
            ("3", "UNLOADING", "the version is going"),
        ]
        refusal = await call_error(server.stub.ModelInfer(ask(1, model_version="2")))
        assert refusal.code is grpc.StatusCode.UNAVAILABLE
        server.deployments.create(one)
        await server.stub.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name="m"))


async def test_a_shadow_gets_copies_whose_answers_nobody_gets() -> None:
    one = versions(100, 0, shadow=Shadow("2", 100))
    shadow = Classifier()

    async with inference_server(one) as server:
        attach(server.models, one, shadow, number="2")
        for first in range(3):
            answer = await server.stub.ModelInfer(ask(first))
            assert answer.model_version == "1"
            await until(partial(was_copied, server, first + 1), "the copy is answered")
        assert shadowed(server) == {"OK": 3}
        assert shadow.batches == [[0], [1], [2]]
        (statistics,) = server.models.listed_of("m", "2")
        assert statistics.statistics.requests == {}  # copies are no requests of the version
        assert statistics.statistics.batch_rows.count == 0


async def test_copies_share_no_batch_with_requests_that_name_the_shadow() -> None:
    one = versions(100, 0, shadow=Shadow("2", 100))
    shadow = Classifier()

    async with inference_server(one) as server:
        attach(server.models, one, shadow, number="2")
        shadow.may_work.clear()
        calls = [asyncio.ensure_future(server.stub.ModelInfer(ask(8, model_version="2")))]
        await until(lambda: shadow.at_work == 1, "the shadow is at work")
        await server.stub.ModelInfer(ask(1))
        calls.append(asyncio.ensure_future(server.stub.ModelInfer(ask(9, model_version="2"))))
        # The first, its copy and this one are all there, wherever they wait.
        await until(lambda: shadow.at_work + sum(one.queued_rows for one in server.models.listed()) == 3, "it waits")
        shadow.may_work.set()
        await asyncio.gather(*calls)
        await until(partial(was_copied, server, 1), "the copy is answered")
        assert sorted(shadow.batches) == [[1], [8], [9]]


async def test_a_shadow_that_hangs_or_fails_neither_delays_nor_fails_a_request() -> None:
    one = versions(100, 0, shadow=Shadow("2", 100))
    shadow = Classifier()

    async with inference_server(one) as server:
        attach(server.models, one, shadow, number="2")
        shadow.may_work.clear()
        for _ in range(5):
            assert (await server.stub.ModelInfer(ask(1), timeout=60)).model_version == "1"
        # One is at work, one waits for it, and what came after that was left out.
        await until(lambda: shadow.at_work == 1, "the copy is at work")
        assert (shadow.at_work, shadowed(server)) == (1, {"SHED": 3})

        class Broken:
            async def forward(self, rows: Rows) -> Outputs:
                raise RuntimeError(f"no {len(rows)}")

        attach(server.models, one, Broken(), number="2")
        assert (await server.stub.ModelInfer(ask(1), timeout=60)).model_version == "1"
        await until(lambda: shadowed(server).get("INTERNAL") == 1, "the failure is counted")
        shadow.may_work.set()


async def test_copies_are_left_out_while_real_requests_wait() -> None:
    one = versions(100, 0, shadow=Shadow("2", 100))
    shadow = Classifier()

    async with inference_server(one) as server:
        attach(server.models, one, shadow, number="2")
        server.model.may_work.clear()
        calls = [asyncio.ensure_future(server.stub.ModelInfer(ask(1)))]
        await until(lambda: server.model.at_work == 1, "the model is at work")
        calls.append(asyncio.ensure_future(server.stub.ModelInfer(ask(2))))
        await until(lambda: sum(one.queued_rows for one in server.models.listed()) == 1, "one waits")
        calls.append(asyncio.ensure_future(server.stub.ModelInfer(ask(3))))
        await until(lambda: shadowed(server).get("SHED", 0) == 1, "its copy is left out")
        server.model.may_work.set()
        await asyncio.gather(*calls)
        assert [3] not in shadow.batches


@pytest.mark.parametrize(("percent", "weight"), [(0, 0), (100, 1)])
async def test_no_share_and_a_version_with_traffic_of_its_own_get_no_copies(percent: int, weight: int) -> None:
    one = versions(1000, weight, shadow=Shadow("2", percent))

    async with inference_server(one) as server:
        attach(server.models, one, Classifier(), number="2")
        await answered_by(server, 10, model_version="1")
        assert shadowed(server) == {}
