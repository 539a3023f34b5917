"""Weights, header routes, a shadow and a version policy set by hand, as a real client meets them, before and after the
service is killed."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.inference.v1 import deployment_service_pb2 as pb
from shared.settings import StoreSettings
from tests.integration.inference_service.client import durable, eventually
from tests.integration.inference_service.conftest import Stack, running_stack
from tests.integration.inference_service.moving import IMAGE, Moving, moving, versions_in_serve, write_versions
from tests.integration.inference_service.tritonclient_scripts import run_triton_script
from tests.support.ray_head import RayHead


def update(one: Moving, traffic: pb.Traffic, spec: pb.DeploymentSpec, *paths: str) -> pb.Deployment:
    request = pb.UpdateDeploymentRequest(
        deployment=pb.Deployment(name=one.name, traffic=traffic, spec=spec), update_mask={"paths": paths}
    )
    after: pb.Deployment = one.client.deployments.UpdateDeployment(request, timeout=60)
    return after


def keep(*numbers: str) -> pb.DeploymentSpec:
    return pb.DeploymentSpec(version_policy=pb.VersionPolicy(named=pb.VersionPolicy.Named(versions=numbers)))


def versions_by_way_of_asking(stack: Stack, one: Moving, folder: Path) -> dict[str, Counter[str]]:
    """Of the real tritonclient's requests; each version must have answered what it is."""
    path = folder / "image.npy"
    np.save(path, IMAGE)
    seen: dict[str, Sequence[Any]] = run_triton_script("triton_headers.py", stack.service.address, one.id, str(path))
    for version, logits in (answer for answers in seen.values() for answer in answers):
        np.testing.assert_allclose(logits, one.logits[one.checkpoints[version]][0], rtol=1e-3, atol=1e-3)
    return {way: Counter(version for version, _ in answers) for way, answers in seen.items()}


def copies(stack: Stack, one: Moving, version: str) -> float:
    """Those that the shadow has answered since the service was started."""
    with urllib.request.urlopen(f"http://{stack.metrics}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    wanted = f'millrace_inference_shadow_requests_total{{model="{one.id}",status="OK",version="{version}"}}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))


def assert_steered(stack: Stack, one: Moving, folder: Path) -> None:
    """Versions 1 and 2 share the traffic as 20 to 80, the header leads to version 3, which gets copies of the rest."""
    seen = versions_by_way_of_asking(stack, one, folder)
    assert seen["plain"].keys() == {"1", "2"}
    assert seen["plain"]["2"] > seen["plain"]["1"]
    assert seen["another value"].keys() <= {"1", "2"}
    assert seen["named"].keys() == {"1"}
    ways = ("canary", "stream", "asyncio")
    assert [seen[way].keys() for way in ways] == [{"3"}] * len(ways)
    eventually(lambda: copies(stack, one, "3") > 0, 180, "the shadow has answered copies")


@pytest.mark.long
@pytest.mark.timeout(600)  # three versions are loaded, and the service is started twice
def test_weights_a_header_route_a_shadow_and_a_policy_hold_for_real_clients_and_after_a_restart(
    inference_ray: RayHead, tmp_path: Path
) -> None:
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    with (
        running_stack(inference_ray, settings, tmp_path) as own,
        moving(own.client, "steered", write_versions(own.store)) as one,
    ):
        update(one, pb.Traffic(), keep("1", "2"), "spec.version_policy")
        for checkpoint in ("c2", "c3"):
            assert own.client.wait(one.rollout(checkpoint, (100, 0.0))).HasField("response")
        assert {one.ask() for _ in range(5)} == {"3"}
        traffic = pb.Traffic(
            weights={"1": 20, "2": 80},
            routes=[pb.HeaderRoute(header="x-canary", value="yes", version="3")],
            shadow=pb.Shadow(version="3", percent=100),
        )
        paths = ("traffic.weights", "traffic.routes", "traffic.shadow", "spec.version_policy")
        set_by_hand = update(one, traffic, keep("1", "3"), *paths)
        assert (set_by_hand.traffic, set_by_hand.spec.version_policy) == (traffic, keep("1", "3").version_policy)
        assert_steered(own, one, tmp_path)
        before = durable(one.get())

        own.service.kill()
        own.service.start()
        own.client.wait_until_healthy()
        assert durable(one.get()) == before
        eventually(lambda: len(own.client.ready_versions(one.id)) == 3, 180, "all versions answer again")
        assert copies(own, one, "3") == 0
        assert_steered(own, one, tmp_path)
        assert durable(one.get()) == before

        # Version 2 had only its traffic to stay for, and version 3 has none but is named.
        update(one, pb.Traffic(weights={"1": 100}), pb.DeploymentSpec(), "traffic.weights")
        eventually(lambda: versions_in_serve(own, before.uid) == ["1", "3"], 180, "version 2 is gone")
        seen = versions_by_way_of_asking(own, one, tmp_path)
        assert (set(seen["plain"]), set(seen["canary"])) == ({"1"}, {"3"})
