"""ModelConfig, ModelStatistics and the repository's methods, over a real server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest

from inference import grpc_service_pb2 as oip
from inference import model_config_pb2
from inference_service.domain.deployment import LATEST, Deployment, Kept, State, VersionPolicy
from inference_service.domain.signature import Signature, TensorSpec
from tests.support.grpc_kit import call_error
from tests.support.inference_server import IMAGES, Server, ask, attach, deployment, inference_server, until

FAILED = deployment("broken", signature=None, state=State.FAILED, error={"message": "no weights"})
LOADING = deployment("coming", signature=None, state=State.LOADING)
GOING = deployment("going", state=State.DELETING)


async def statistics(server: Server, **fields: str) -> list[oip.ModelStatistics]:
    answer = await server.stub.ModelStatistics(oip.ModelStatisticsRequest(**fields))
    return list(answer.model_stats)


async def test_the_configuration_reports_what_the_deployment_was_created_with() -> None:
    async with inference_server() as server:
        config = (await server.stub.ModelConfig(oip.ModelConfigRequest(name="m"))).config
        assert (config.name, config.platform, config.max_batch_size) == ("m", "millrace_pytorch", 8)
        assert config.dynamic_batching.max_queue_delay_microseconds == 1000
        assert (config.dynamic_batching.priority_levels, config.dynamic_batching.default_priority_level) == (10, 5)
        assert config.dynamic_batching.default_queue_policy.allow_timeout_override
        assert [(group.count, group.kind) for group in config.instance_group] == [
            (2, model_config_pb2.ModelInstanceGroup.KIND_CPU)
        ]
        assert [(one.name, one.data_type, list(one.dims)) for one in config.input] == [
            ("image", model_config_pb2.TYPE_UINT8, [4])
        ]
        assert [(one.name, list(one.dims), one.HasField("reshape")) for one in config.output] == [
            ("logits", [4], False),
            ("label", [1], True),
        ]
        assert config.parameters["checkpoint"].string_value == "trainingJobs/j/checkpoints/c"


async def test_the_configuration_reports_the_unit_of_times() -> None:
    times = TensorSpec("when", "INT64", (-1,), column_type="timestamp[ms]")
    made = replace(IMAGES, raw=(times, TensorSpec("mass", "FP64", (-1,))))
    async with inference_server(deployment(signature=Signature.from_record(made.as_record()))) as server:
        config = (await server.stub.ModelConfig(oip.ModelConfigRequest(name="m"))).config
        assert config.parameters["column_type.when"].string_value == "timestamp[ms]"
        assert "column_type.mass" not in config.parameters


async def test_the_configuration_reports_which_inputs_may_have_nulls_and_how() -> None:
    raw = (TensorSpec("mass", "FP64", (-1,), nullable=True), TensorSpec("grid", "FP32", (-1, 2)))

    async with inference_server(deployment(signature=replace(IMAGES, raw=raw))) as server:
        config = (await server.stub.ModelConfig(oip.ModelConfigRequest(name="m"))).config
        assert [(one.name, one.data_type, list(one.dims), one.optional) for one in config.input] == [
            ("mass", model_config_pb2.TYPE_FP64, [1], False),
            ("grid", model_config_pb2.TYPE_FP32, [2], False),
            ("mass.null", model_config_pb2.TYPE_BOOL, [1], True),
        ]
        # Which clients fill whole, as nothing there is optional.
        metadata = await server.stub.ModelMetadata(oip.ModelMetadataRequest(name="m"))
        assert [one.name for one in metadata.inputs] == ["mass", "grid"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (LATEST, {"latest": {"num_versions": 1}}),
        (VersionPolicy(Kept.LATEST, count=3), {"latest": {"num_versions": 3}}),
        (VersionPolicy(Kept.ALL), {"all": {}}),
        (VersionPolicy(Kept.NAMED, named=("2", "5")), {"specific": {"versions": [2, 5]}}),
    ],
)
async def test_the_configuration_reports_which_versions_stay(policy: VersionPolicy, expected: dict[str, Any]) -> None:
    one = deployment()

    async with inference_server(replace(one, spec=replace(one.spec, version_policy=policy))) as server:
        config = (await server.stub.ModelConfig(oip.ModelConfigRequest(name="m"))).config
        assert config.version_policy == model_config_pb2.ModelVersionPolicy(**expected)
        assert config.version_policy.WhichOneof("policy_choice") == next(iter(expected))


async def test_statistics_count_what_was_answered_and_what_was_not() -> None:
    async with inference_server() as server:
        began_ms = time.time() * 1000
        await asyncio.gather(server.stub.ModelInfer(ask(1, 2)), server.stub.ModelInfer(ask(3)))
        wrong = ask(4)
        wrong.inputs[0].datatype = "FP64"
        await call_error(server.stub.ModelInfer(wrong))
        await call_error(server.stub.ModelInfer(ask(4, model="nobody")))
        (found,) = await statistics(server, name="m", version="1")
        assert (found.name, found.version, found.inference_count) == ("m", "1", 3)
        assert (
            found.execution_count
            == len(server.model.batches)
            == sum(one.compute_infer.count for one in found.batch_stats)
        )
        assert sum(one.batch_size * one.compute_infer.count for one in found.batch_stats) == 3
        assert began_ms - 1 <= found.last_inference <= time.time() * 1000 + 1
        seen = found.inference_stats
        assert [one.count for one in (seen.success, seen.queue, seen.compute_input, seen.compute_infer)] == [2] * 4
        assert (seen.compute_output.count, seen.fail.count, seen.cache_hit.count) == (2, 1, 0)
        assert (seen.compute_input.ns, seen.compute_infer.ns) == (500_000_000, 1_000_000_000)
        assert seen.fail.ns > 0
        assert [one.compute_infer.ns for one in found.batch_stats] == [
            500_000_000 * one.compute_infer.count for one in found.batch_stats
        ]


async def test_statistics_of_a_call_that_its_client_leaves_count_it_as_failed() -> None:
    async with inference_server() as server:
        server.model.may_work.clear()
        call = server.stub.ModelInfer(ask(1))
        await until(lambda: server.model.at_work == 1, "the model is at work")
        call.cancel()
        await until(lambda: server.model.at_work == 0, "the batch is given up")
        (found,) = await statistics(server)
        assert (found.inference_stats.success.count, found.inference_stats.fail.count) == (0, 1)


async def test_statistics_survive_a_reload_and_end_with_the_deployment() -> None:
    async with inference_server() as server:
        one = deployment()
        await server.stub.ModelInfer(ask(1))
        attach(server.models, one, server.model)  # as after its replicas were lost
        server.models.replace([one])
        await server.stub.ModelInfer(ask(1))
        assert [found.inference_count for found in await statistics(server)] == [2]
        server.models.begin_reading()
        server.models.replace([])
        assert await statistics(server) == []
        server.models.replace([one])
        assert [found.inference_count for found in await statistics(server)] == [0]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ({"name": "m", "version": "9"}, grpc.StatusCode.NOT_FOUND),
        ({"version": "1"}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_statistics_of_nothing_are_refused(fields: dict[str, str], code: grpc.StatusCode) -> None:
    async with inference_server() as server:
        assert (await call_error(server.stub.ModelStatistics(oip.ModelStatisticsRequest(**fields)))).code is code


async def test_the_index_reports_the_state_of_every_deployment_and_why_it_does_not_answer() -> None:
    async with inference_server() as server:
        lost = deployment("lost")  # READY, and its replicas are not back yet
        server.models.replace([deployment(), FAILED, LOADING, GOING, lost])
        index = await server.stub.RepositoryIndex(oip.RepositoryIndexRequest())
        assert [(one.name, one.version, one.state, one.reason) for one in index.models] == [
            ("broken", "1", "UNAVAILABLE", "no weights"),
            ("coming", "1", "LOADING", "the deployment is LOADING"),
            ("going", "1", "UNLOADING", "the deployment is DELETING"),
            ("lost", "1", "LOADING", "the deployment is READY"),
            ("m", "1", "READY", ""),
        ]
        ready = await server.stub.RepositoryIndex(oip.RepositoryIndexRequest(ready=True))
        assert [one.name for one in ready.models] == ["m"]


def write(server: Server, *logs: Deployment) -> None:
    for one in logs:
        server.deployments.create(one)


def load(server: Server, name: str, **fields: Any) -> Any:
    return server.stub.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name=name, **fields))


async def is_done_after_a_call(server: Server, call: asyncio.Future[Any]) -> bool:
    """Whether `call` is answered, once two later ones are: by then the server has worked on it."""
    for _ in range(2):
        await server.stub.ServerLive(oip.ServerLiveRequest())
    return call.done()


async def test_loading_returns_once_the_deployment_answers() -> None:
    async with inference_server() as server:
        write(server, deployment(), LOADING)
        await load(server, "m")
        server.models.put(LOADING)
        call = asyncio.ensure_future(load(server, "coming"))
        assert not await is_done_after_a_call(server, call)
        # Newer than what the call reads, which may be done after this.
        loaded = replace(deployment("coming"), uid=LOADING.uid, update_time=LOADING.update_time + 1)
        server.models.put(loaded)
        assert not await is_done_after_a_call(server, call)  # READY, and its replicas are not there yet
        attach(server.models, loaded, server.model)
        await call


@pytest.mark.parametrize(
    ("name", "fields", "code", "said"),
    [
        ("broken", {}, grpc.StatusCode.FAILED_PRECONDITION, "no weights; delete it"),
        ("going", {}, grpc.StatusCode.FAILED_PRECONDITION, "DELETING"),
        ("nobody", {}, grpc.StatusCode.NOT_FOUND, "CreateDeployment"),
        ("", {}, grpc.StatusCode.INVALID_ARGUMENT, "model_name"),
        ("m", {"repository_name": "r"}, grpc.StatusCode.UNIMPLEMENTED, "one repository"),
        ("m", {"parameters": {"config": {"string_param": "{}"}}}, grpc.StatusCode.INVALID_ARGUMENT, "CreateDeployment"),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_refused_with_the_remedy(
    name: str, fields: dict[str, Any], code: grpc.StatusCode, said: str
) -> None:
    async with inference_server() as server:
        write(server, deployment(), FAILED, GOING)
        refusal = await call_error(load(server, name, **fields))
        assert refusal.code is code
        assert said in refusal.message


async def test_loading_a_deployment_that_is_deleted_meanwhile_ends() -> None:
    async with inference_server() as server:
        write(server, LOADING)
        call = asyncio.ensure_future(call_error(load(server, "coming")))
        await until(lambda: LOADING in server.models.deployments(), "the log to have been read")
        server.models.put(replace(LOADING, state=State.DELETING, update_time=2.0))
        assert (await call).code is grpc.StatusCode.FAILED_PRECONDITION


def unload(server: Server, name: str = "m", **fields: Any) -> Any:
    return server.stub.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(model_name=name, **fields))


async def test_a_model_that_is_unloaded_answers_nothing_and_is_loaded_again_as_it_was() -> None:
    async with inference_server() as server:
        write(server, deployment())
        await unload(server, parameters={"unload_dependents": {"bool_param": False}})
        refusal = await call_error(server.stub.ModelInfer(ask(1)))
        assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "UNLOADED" in refusal.message
        assert "RepositoryModelLoad" in refusal.message
        index = await server.stub.RepositoryIndex(oip.RepositoryIndexRequest())
        assert [(one.state, one.reason) for one in index.models] == [("UNAVAILABLE", "unloaded")]
        assert (await server.stub.ServerReady(oip.ServerReadyRequest())).ready
        await unload(server)  # again, which changes nothing
        assert server.deployments.get("deployments/m").generation == 2

        await load(server, "m")
        assert (await server.stub.ModelReady(oip.ModelReadyRequest(name="m"))).ready
        assert (await server.stub.ModelInfer(ask(1))).model_version == "1"
        there = server.deployments.get("deployments/m")
        assert replace(there, generation=1, update_time=1.0) == deployment()


async def test_loading_ends_where_another_caller_unloads_meanwhile() -> None:
    async with inference_server() as server:
        write(server, replace(LOADING, state=State.READY))
        call = asyncio.ensure_future(call_error(load(server, "coming")))
        await until(lambda: len(server.models.deployments()) == 2, "the log to have been read")
        await unload(server, "coming")
        refusal = await call
        assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "load it again" in refusal.message


@pytest.mark.parametrize(
    ("name", "fields", "code", "said"),
    [
        ("broken", {}, grpc.StatusCode.FAILED_PRECONDITION, "only when it is READY it can be unloaded"),
        ("coming", {}, grpc.StatusCode.FAILED_PRECONDITION, "LOADING"),
        ("nobody", {}, grpc.StatusCode.NOT_FOUND, "'nobody'"),
        ("No/Name", {}, grpc.StatusCode.NOT_FOUND, "'No/Name'"),
        ("", {}, grpc.StatusCode.INVALID_ARGUMENT, "model_name"),
        ("m", {"repository_name": "r"}, grpc.StatusCode.UNIMPLEMENTED, "one repository"),
        ("m", {"parameters": {"force": {"bool_param": True}}}, grpc.StatusCode.INVALID_ARGUMENT, "unload_dependents"),
    ],
)
async def test_a_model_that_cannot_be_unloaded_is_refused_and_goes_on_answering(
    name: str, fields: dict[str, Any], code: grpc.StatusCode, said: str
) -> None:
    async with inference_server() as server:
        write(server, deployment(), FAILED, LOADING)
        refusal = await call_error(unload(server, name, **fields))
        assert refusal.code is code
        assert said in refusal.message
        assert (await server.stub.ModelReady(oip.ModelReadyRequest(name="m"))).ready


async def test_only_extensions_that_are_served_are_named() -> None:
    async with inference_server() as server:
        metadata = await server.stub.ServerMetadata(oip.ServerMetadataRequest())
        wanted = ["classification", "model_configuration", "model_repository", "schedule_policy", "statistics"]
        assert list(metadata.extensions) == wanted
        for method in ("SystemSharedMemoryStatus", "CudaSharedMemoryStatus", "TraceSetting", "LogSettings"):
            call = server.kit.raw.unary_unary(f"/inference.GRPCInferenceService/{method}")
            assert (await call_error(call(b""))).code is grpc.StatusCode.UNIMPLEMENTED
