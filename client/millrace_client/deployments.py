"""The client of deployments: served checkpoints, and versions that stay loaded without traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import deployment_service_pb2_grpc
from millrace.inference.v1 import rollout_pb2 as pb_rollout
from millrace_client.calls import Caller, Operation, every_page, new_request_id

# --- Deployments ---


class DeploymentClient:
    """Creates and manages deployments, `deployments/{m}`.

    `m` is the model's name in the Open Inference Protocol.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = deployment_service_pb2_grpc.DeploymentServiceStub(caller.channel)

    def create_deployment(self, deployment_id: str, checkpoint: str, **fields: Any) -> Operation[pb.Deployment]:
        """Start to serve `trainingJobs/{j}/checkpoints/{c}`, or the best checkpoint of `trainingJobs/{j}`.

        `fields` are further fields of `DeploymentSpec`, e.g. `num_replicas=2`, `max_batch_size=64`,
        `autoscaling=mc.autoscaling(1, 4)`, `version_policy=mc.keep_latest(2)`, or `allow_non_finite=True`. For a
        checkpoint that a program reported, `predictor="serve:Predictor"` names the class of its bundle that serves it.
        """
        request = pb.CreateDeploymentRequest(
            deployment_id=deployment_id,
            spec=pb.DeploymentSpec(checkpoint=checkpoint, **fields),
            request_id=new_request_id(),
        )
        operation = self._caller.unary(self._stub.CreateDeployment, request, operations_pb2.Operation)
        return Operation(self._caller, operation, pb.Deployment, pb.DeploymentMetadata)

    def get_deployment(self, name: str) -> pb.Deployment:
        return self._caller.unary(self._stub.GetDeployment, pb.GetDeploymentRequest(name=name), pb.Deployment)

    def list_deployments(self) -> Iterator[pb.Deployment]:
        """Yield all deployments in the order of their names."""
        request = pb.ListDeploymentsRequest()
        return every_page(self._caller, self._stub.ListDeployments, request, "deployments")

    def rollout(
        self,
        name: str,
        checkpoint: str,
        *,
        steps: Sequence[tuple[int, float]] = (),
        max_error_share: float | None = None,
        max_p99_s: float | None = None,
        max_p99_ratio: float = 0.0,
        min_requests: int = 0,
        window_s: float | None = None,
        allow_new_signature: bool = False,
        compare: tuple[str, str] | None = None,
        min_agreement: float | None = None,
        max_difference: float | None = None,
        etag: str = "",
    ) -> Operation[pb.Deployment]:
        """Move a deployment's traffic to another checkpoint, without a dropped request.

        `steps` are (percent, seconds) each. Beyond a limit the service rolls back, and `wait` raises. Limits are the
        share of failed requests (0 to 1), the time in which 99 % are answered, and that time relative to the old
        version's. They apply once there are `min_requests` within `window_s`. Fields that are not given have the
        server's defaults. `compare` names rows, (dataset version, split), that both versions answer before any traffic
        moves; give the share of equal labels or the difference of outputs that is required.
        """
        limits = pb_rollout.RolloutLimits(
            max_error_share=max_error_share, max_p99_ratio=max_p99_ratio, min_requests=min_requests
        )
        if max_p99_s is not None:
            limits.max_p99_latency.CopyFrom(duration(max_p99_s))
        if window_s is not None:
            limits.window.CopyFrom(duration(window_s))
        comparison = None
        if compare is not None:
            comparison = pb_rollout.Comparison(
                dataset_version=compare[0],
                split=compare[1],
                min_agreement=min_agreement,
                max_difference=max_difference,
            )
        spec = pb_rollout.RolloutSpec(
            checkpoint=checkpoint,
            steps=[pb_rollout.RolloutStep(percent=percent, interval=duration(wait_s)) for percent, wait_s in steps],
            limits=limits,
            allow_new_signature=allow_new_signature,
            comparison=comparison,
        )
        request = pb.RolloutRequest(name=name, spec=spec, etag=etag, request_id=new_request_id())
        operation = self._caller.unary(self._stub.Rollout, request, operations_pb2.Operation)
        return Operation(self._caller, operation, pb.Deployment, pb.RolloutMetadata)

    def update_traffic(
        self,
        name: str,
        *,
        weights: Mapping[str, int] | None = None,
        routes: Sequence[tuple[str, str, str]] | None = None,
        shadow: tuple[str, int] | None = None,
        version_policy: pb.VersionPolicy | None = None,
        etag: str = "",
    ) -> pb.Deployment:
        """Redistribute the requests that name no version. Arguments that are not given change nothing.

        `weights` are by version number, `routes` are (header, value, version), and `shadow` is a version and the
        percentage of requests that are copied to it, 0 for no shadow. `version_policy` selects the versions that stay
        loaded without traffic: `mc.keep_latest(2)`, `mc.keep_all()` or `mc.keep_named("1", "3")`.
        """
        traffic = pb.Traffic(
            weights=weights,
            routes=[pb.HeaderRoute(header=header, value=value, version=to) for header, value, to in routes or ()],
            shadow=pb.Shadow(version=shadow[0], percent=shadow[1]) if shadow else None,
        )
        spec = pb.DeploymentSpec(version_policy=version_policy)
        changes = {
            "traffic.weights": weights,
            "traffic.routes": routes,
            "traffic.shadow": shadow,
            "spec.version_policy": version_policy,
        }
        request = pb.UpdateDeploymentRequest(
            deployment=pb.Deployment(name=name, etag=etag, traffic=traffic, spec=spec),
            update_mask=FieldMask(paths=[path for path, change in changes.items() if change is not None]),
        )
        return self._caller.unary(self._stub.UpdateDeployment, request, pb.Deployment)

    def watch_deployment(self, name: str) -> Iterator[pb.Deployment]:
        """Yield the deployment now and after each change, until it is deleted. Closing the iterator ends the call."""
        return self._caller.stream(self._stub.WatchDeployment, pb.WatchDeploymentRequest(name=name))

    def rollback(self, name: str, *, etag: str = "") -> pb.Deployment:
        """Return the traffic at once to the versions that had it before the newest roll-out."""
        request = pb.RollbackRequest(name=name, etag=etag)
        return self._caller.unary(self._stub.Rollback, request, pb.Deployment)

    def delete_deployment(self, name: str, *, etag: str = "") -> None:
        """Take a deployment out of service. Requests in flight are answered first.

        If `etag` is set, it must be the present one.
        """
        request = pb.DeleteDeploymentRequest(name=name, etag=etag)
        self._caller.unary(self._stub.DeleteDeployment, request, pb.DeleteDeploymentResponse)


def autoscaling(
    min_replicas: int,
    max_replicas: int,
    *,
    rows_per_replica: int = 0,
    scale_up_after_s: float | None = None,
    scale_down_after_s: float | None = None,
) -> pb.Autoscaling:
    """Scale with the load: one replica for each `rows_per_replica` waiting or running rows.

    Arguments that are not given have the server's defaults.
    """
    return pb.Autoscaling(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        rows_per_replica=rows_per_replica,
        scale_up_after=None if scale_up_after_s is None else duration(scale_up_after_s),
        scale_down_after=None if scale_down_after_s is None else duration(scale_down_after_s),
    )


def duration(seconds: float) -> Duration:
    """Convert seconds to a Duration, to the nearest microsecond."""
    message = Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


# --- Version policies ---


def keep_latest(count: int) -> pb.VersionPolicy:
    """Keep `count` newest versions loaded. With 2, a roll-out that succeeded can be rolled back."""
    return pb.VersionPolicy(latest=pb.VersionPolicy.Latest(count=count))


def keep_all() -> pb.VersionPolicy:
    """Keep every version loaded."""
    return pb.VersionPolicy(all=pb.VersionPolicy.All())


def keep_named(*versions: str) -> pb.VersionPolicy:
    """Keep the versions of these numbers loaded, and no others."""
    return pb.VersionPolicy(named=pb.VersionPolicy.Named(versions=versions))
