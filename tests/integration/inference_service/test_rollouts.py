"""Rollouts on the real service and Ray Serve: of real checkpoints, under load, damaged, too slow, and interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import rollout_pb2
from shared.checkpoint.format import WEIGHTS
from shared.settings import StoreSettings
from tests.integration.inference_service.checkpoints import write
from tests.integration.inference_service.client import Array, eventually
from tests.integration.inference_service.conftest import Stack, running_stack
from tests.integration.inference_service.moving import (
    JOB,
    moving,
    prepared_bias,
    seconds,
    versions_in_serve,
    write_versions,
)
from tests.support.asking import Load
from tests.support.ray_head import RayHead
from tests.support.refusals import refusal_of, refused
from tests.support.versions import commit_version, striped_digits

CLIENTS = 4
# Between the calls of each: or they would take the processors on which the next version starts.
PAUSE_S = 0.1
REPLICA = "ray::ServeReplica"


@pytest.fixture(scope="module")
def logits(stack: Stack) -> dict[str, Array]:
    return write_versions(stack.store)


def test_a_rollout_and_a_rollback_under_load_lose_and_wrongly_answer_nothing(
    stack: Stack, logits: dict[str, Array]
) -> None:
    with moving(stack.client, "moving", logits) as one, Load(one.ask, CLIENTS, PAUSE_S) as load:
        assert load.wait_for(20).keys() == {"1"}
        operation = one.rollout("c2", (20, 0.4), (60, 0.4), (100, 0.2))
        assert one.get().versions[1].state == pb.ModelVersion.STATE_LOADING
        done = stack.client.wait(operation)
        metadata, after = pb.RolloutMetadata(), pb.Deployment()
        assert done.metadata.Unpack(metadata)
        assert done.response.Unpack(after), done.error
        assert metadata.rollout.state == rollout_pb2.Rollout.STATE_SUCCEEDED
        assert (after.lineage.model_version, after.lineage.checkpoint) == ("2", f"{JOB}/checkpoints/c2")
        load.wait_for_those_under_way()
        assert load.wait_for(20).keys() == {"2"}
        eventually(lambda: one.weights() == {"2": 100}, 180, "version 1 is gone")
        eventually(lambda: versions_in_serve(stack, after.uid) == ["2"], 180, "its replica is gone")
        assert load.wait_for(20).keys() == {"2"}

        operation = one.rollout("c3", (50, 3600.0), (100, 1.0))
        one.wait_for_step(0)
        assert load.wait_for(60).keys() == {"2", "3"}
        etag = one.get().etag
        stale = pb.RollbackRequest(name=one.name, etag="stale")
        assert refused(lambda: stack.client.deployments.Rollback(stale)).code is grpc.StatusCode.ABORTED
        back = stack.client.deployments.Rollback(pb.RollbackRequest(name=one.name, etag=etag))
        assert back.rollout.state == rollout_pb2.Rollout.STATE_ROLLED_BACK
        load.wait_for_those_under_way()
        assert load.wait_for(20).keys() == {"2"}
        eventually(lambda: versions_in_serve(stack, after.uid) == ["2"], 180, "the replica of version 3 is gone")
        error = refusal_of(stack.client.wait(operation).error)
        assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, "ROLLED_BACK")
    assert load.errors == []


@pytest.mark.long
def test_a_version_that_is_damaged_too_slow_or_too_unlike_rolls_back_and_the_old_one_answers_on(
    stack: Stack, logits: dict[str, Array]
) -> None:
    damaged = write(stack.store, "c8", job=JOB, weights=b"some weights")
    stack.store.put(f"{damaged.entry.folder}/{WEIGHTS}", b"same wei\0hts")
    with moving(stack.client, "careful", logits) as one, Load(one.ask, CLIENTS) as load:
        operation = stack.client.wait(one.rollout("c8"))
        error = refusal_of(operation.error)
        assert error.code is grpc.StatusCode.DATA_LOSS
        assert one.get().state == pb.Deployment.STATE_READY
        assert one.get().rollout.state == rollout_pb2.Rollout.STATE_ROLLED_BACK
        assert {number: weight for number, weight in one.weights().items() if weight} == {"1": 100}

        limits = {"max_p99_latency": seconds(0.0002), "min_requests": 5}  # no model answers in a fifth of a millisecond
        operation = stack.client.wait(one.rollout("c2", (50, 3600.0), (100, 0.0), **limits))
        error = refusal_of(operation.error)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ROLLOUT_LIMIT_EXCEEDED")
        load.wait_for_those_under_way()
        assert load.wait_for(20).keys() == {"1"}

        held = "datasets/held/versions/v1"
        commit_version(stack.store, held, {"test": striped_digits(50)})
        # Its logits are those of c1 and 1 more, so all labels agree.
        alike = {"split": "test", "max_rows": 40, "min_agreement": 1.0, "max_difference": 0.5}
        operation = stack.client.wait(one.rollout("c2", (100, 0.0), comparison={"dataset_version": held, **alike}))
        error = refusal_of(operation.error)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ROLLOUT_COMPARISON_FAILED")
        seen = one.get().rollout.compared
        assert (seen.rows, seen.agreement) == (40, 1.0)
        assert seen.difference == pytest.approx(1.0, abs=1e-3)
        assert load.wait_for(20).keys() == {"1"}
    assert load.errors == []
    assert load.answers["3"] >= 5
    assert "4" not in load.answers


@pytest.mark.long
def test_a_version_whose_requests_fail_rolls_back_by_its_error_limit_under_load(
    stack: Stack, logits: dict[str, Array]
) -> None:
    written = write(stack.store, "c9", job=JOB, weights=prepared_bias(1.0))
    with moving(stack.client, "failing", {**logits, "c9": logits["c2"]}) as one:
        before = set(stack.head.processes(REPLICA))

        def ask() -> str:
            try:
                return one.ask()
            except grpc.RpcError as error:
                return str(error.code().name)

        with Load(ask, CLIENTS) as load:
            limits = {"max_error_share": 0.2, "min_requests": 20}
            operation = one.rollout("c9", (50, 3600.0), (100, 0.0), **limits)
            one.wait_for_step(0)
            # Well within its limit, and so many that a replica's death alone, which fails what it has, stays within it.
            load.wait_for(200)
            assert load.answers.keys() == {"1", "2"}
            assert one.get().rollout.state == rollout_pb2.Rollout.STATE_SHIFTING
            # From now on its replicas do not load: Serve goes on sending requests to the one that comes next.
            stack.store.put(f"{written.entry.folder}/{WEIGHTS}", b"damaged")
            (replica,) = set(stack.head.processes(REPLICA)) - before
            os.kill(replica, signal.SIGKILL)
            error = refusal_of(stack.client.wait(operation).error)
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ROLLOUT_LIMIT_EXCEEDED")
            assert error.metadata["model_version"] == "2"
            assert "requests" in error.message
            assert one.get().rollout.state == rollout_pb2.Rollout.STATE_ROLLED_BACK
            load.wait_for_those_under_way()
            assert load.wait_for(50).keys() == {"1"}
        assert load.errors == []
        assert load.answers["DATA_LOSS"] >= 20
        assert {number: weight for number, weight in one.weights().items() if weight} == {"1": 100}


@pytest.mark.usefixtures("deployed")
def test_an_impossible_rollout_or_rollback_is_refused_by_its_reason(stack: Stack, logits: dict[str, Array]) -> None:
    assert logits

    def rollout(name: str = "deployments/digits", checkpoint: str = JOB, **fields: Any) -> Any:
        spec = rollout_pb2.RolloutSpec(checkpoint=checkpoint, **fields)
        return stack.client.deployments.Rollout(pb.RolloutRequest(name=name, spec=spec), timeout=60)

    def rollback(name: str) -> Any:
        return stack.client.deployments.Rollback(pb.RollbackRequest(name=name), timeout=60)

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    for call, code, fields in (
        (lambda: rollout("digits"), invalid, ["name"]),
        (lambda: rollout(checkpoint="digits"), invalid, ["spec.checkpoint"]),
        (lambda: rollout(steps=[{"percent": 50}]), invalid, ["spec.steps[0].percent"]),
        (lambda: rollout(limits={"max_error_share": 2}), invalid, ["spec.limits.max_error_share"]),
        (lambda: rollout("deployments/nobody"), grpc.StatusCode.NOT_FOUND, []),
        (lambda: rollout(checkpoint="trainingJobs/nobody"), grpc.StatusCode.NOT_FOUND, ["spec.checkpoint"]),
        (lambda: rollback("digits"), invalid, ["name"]),
        (lambda: rollback("deployments/nobody"), grpc.StatusCode.NOT_FOUND, []),
        (lambda: rollback("deployments/digits"), grpc.StatusCode.FAILED_PRECONDITION, []),
    ):
        refusal = refused(call)
        assert (refusal.code, list(refusal.fields)) == (code, fields)
    missing = pb.RolloutRequest(name="deployments/digits")
    assert refused(lambda: stack.client.deployments.Rollout(missing)).fields.keys() == {"spec"}
    assert [version.number for version in stack.client.get("deployments/digits").versions] == ["1"]


@pytest.mark.chaos
def test_a_rollout_whose_service_is_killed_half_way_goes_on_in_the_next(inference_ray: RayHead, tmp_path: Path) -> None:
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    with running_stack(inference_ray, settings, tmp_path) as own:
        logits = write_versions(own.store)
        with moving(own.client, "killed", logits) as one:
            operation = one.rollout("c2", (30, 2.0), (70, 2.0), (100, 0.5))
            one.wait_for_step(0)
            own.service.kill()
            own.service.start()
            own.client.wait_until_healthy()
            eventually(lambda: one.ask() in ("1", "2"), 180, "it answers again")
            assert one.get().rollout.operation == operation.name
            assert own.client.wait(operation).HasField("response")
            assert {one.ask() for _ in range(10)} == {"2"}
            own.service.kill()  # once more, with nothing under way: the same is served
            own.service.start()
            eventually(lambda: one.ask() == "2", 180, "version 2 answers again")
            eventually(lambda: versions_in_serve(own, one.get().uid) == ["2"], 180, "version 1 is gone")
