"""Between the messages of a deployment's traffic and plain values."""

from __future__ import annotations

from inference_service.converters.roll_outs import policy_from_proto
from inference_service.domain.deployment import Deployment
from inference_service.domain.traffic import MAX_ROUTES, MAX_WEIGHTS, HeaderRoute, Shadow, TrafficChange, check_change
from millrace.inference.v1 import deployment_service_pb2 as pb
from shared.errors import check_count, invalid_field

PATHS = ("traffic.weights", "traffic.routes", "traffic.shadow", "spec.version_policy")

MAX_PATHS = 100


def change_from_proto(request: pb.UpdateDeploymentRequest) -> tuple[str, TrafficChange, str]:
    """The deployment's name, the change and the etag. Raises `InvalidArgument`."""
    if not request.HasField("deployment"):
        raise invalid_field("deployment", None, "give its name, and what is to be otherwise")
    check_count("update_mask", request.update_mask.paths, MAX_PATHS)
    check_count("deployment.traffic.weights", request.deployment.traffic.weights, MAX_WEIGHTS)
    check_count("deployment.traffic.routes", request.deployment.traffic.routes, MAX_ROUTES)
    paths = {*request.update_mask.paths}
    if not paths or paths - {*PATHS}:
        raise invalid_field("update_mask", sorted(paths), f"name what is to be otherwise, of: {', '.join(PATHS)}")
    given, traffic = request.deployment, request.deployment.traffic
    routes = tuple(HeaderRoute(route.header, route.value, route.version) for route in traffic.routes)
    policy = given.spec.version_policy
    change = TrafficChange(
        weights=dict(traffic.weights) if "traffic.weights" in paths else None,
        routes=routes if "traffic.routes" in paths else None,
        shadow=Shadow(traffic.shadow.version, traffic.shadow.percent) if "traffic.shadow" in paths else None,
        policy=policy_from_proto("deployment.spec.version_policy", policy) if "spec.version_policy" in paths else None,
    )
    return given.name, check_change(change), given.etag


def traffic_to_proto(deployment: Deployment) -> pb.Traffic:
    shadow = deployment.shadow
    return pb.Traffic(
        weights={version.number: version.weight for version in deployment.versions if version.weight},
        routes=[
            pb.HeaderRoute(header=route.header, value=route.value, version=route.version) for route in deployment.routes
        ],
        shadow=pb.Shadow(version=shadow.version, percent=shadow.percent) if shadow else None,
    )
