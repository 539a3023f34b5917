"""The operations of this service: each loads one deployment or rolls a version out, and its state is read from that
deployment's log."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from google.longrunning import operations_pb2

from inference_service.converters.deployments import deployment_to_proto, metadata_to_proto, roll_out_metadata_to_proto
from inference_service.deployments.registry import Deployments
from inference_service.domain.deployment import Deployment, State, deleting
from inference_service.domain.rolling import with_traffic_back
from shared.errors import Cancelled, error_from_record, not_found
from shared.grpc_errors import status_proto
from shared.storage import ObjectMissing, ObjectStore

ROOT = "operations"
# These tell this service's operations from those of the others in the same folder.
PREFIX = "deploy-"
ROLL_OUT_PREFIX = "rollout-"


def operation_name(uid: str) -> str:
    return f"{ROOT}/{PREFIX}{uid}"


def roll_out_operation_name(uid: str) -> str:
    return f"{ROOT}/{ROLL_OUT_PREFIX}{uid}"


class DeploymentOperations:
    """An `OperationSource` over the deployments' logs."""

    def __init__(self, store: ObjectStore, deployments: Deployments) -> None:
        self._store = store
        self._deployments = deployments

    def record(self, deployment: Deployment) -> None:
        """Makes the operation findable, also after its deployment is gone. Writing it again changes nothing."""
        self._point(deployment.operation, deployment)

    def record_roll_out(self, operation: str, deployment: Deployment) -> None:
        """The same for the operation of a roll-out."""
        self._point(operation, deployment)

    def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:  # noqa: ARG002
        """The same in lists: nothing of it is long."""
        if name.startswith(f"{ROOT}/{ROLL_OUT_PREFIX}"):
            return roll_out_operation_of(self._rolled_out(name))
        return operation_of(self._deployment(name))

    def list_ids(self) -> list[str]:
        return [one for one in self._store.folders(ROOT) if one.startswith((PREFIX, ROLL_OUT_PREFIX))]

    def cancel(self, name: str) -> None:
        """Deletes the deployment if it is still loading, or rolls back; afterwards there is nothing left to cancel."""
        if name.startswith(f"{ROOT}/{ROLL_OUT_PREFIX}"):
            self._cancel_roll_out(name)
            return
        deployment = self._deployment(name)

        def delete_if_loading(newest: Deployment) -> Deployment | None:
            return deleting(newest, time.time()) if newest.state is State.LOADING else None

        self._deployments.transition(deployment.name, deployment.uid, delete_if_loading)

    def _cancel_roll_out(self, name: str) -> None:
        deployment = self._rolled_out(name)
        roll_out = deployment.roll_out
        assert roll_out is not None
        error = Cancelled(f"the roll-out of version {roll_out.version} was cancelled", reason="ROLLED_BACK")

        def roll_back(newest: Deployment) -> Deployment | None:
            after = with_traffic_back(newest, roll_out.uid, error, time.time())
            return replace(after, generation=after.generation + 1) if after is not None else None

        self._deployments.transition(deployment.name, deployment.uid, roll_back)

    def _point(self, operation: str, deployment: Deployment) -> None:
        pointer = {"deployment": deployment.name, "uid": deployment.uid}
        self._store.put(f"{operation}/pointer.json", json.dumps(pointer).encode())

    def _pointer(self, name: str) -> dict[str, str]:
        try:
            pointer: dict[str, str] = json.loads(self._store.get(f"{name}/pointer.json"))
        except ObjectMissing:
            raise not_found(name) from None
        return pointer

    def _rolled_out(self, name: str) -> Deployment:
        """The last known state of the deployment with this roll-out in it."""
        uid = name.removeprefix(f"{ROOT}/{ROLL_OUT_PREFIX}")
        deployment = self._deployments.roll_out(self._pointer(name)["deployment"], uid)
        if deployment is None:  # it was refused after the pointer was written
            raise not_found(name)
        return deployment

    def _deployment(self, name: str) -> Deployment:
        if not name.startswith(f"{ROOT}/{PREFIX}"):
            raise not_found(name)
        pointer = self._pointer(name)
        deployment = self._deployments.history(pointer["deployment"], pointer["uid"])
        if deployment is None:  # its creation was refused after the pointer was written
            raise not_found(name)
        return deployment


def operation_of(deployment: Deployment) -> operations_pb2.Operation:
    """The operation that loads, or loaded, this deployment."""
    operation = operations_pb2.Operation(name=deployment.operation)
    operation.metadata.Pack(metadata_to_proto(deployment))
    if deployment.was_loaded:
        operation.done = True
        operation.response.Pack(deployment_to_proto(deployment))
    elif deployment.error is not None:
        operation.done = True
        operation.error.CopyFrom(status_proto(error_from_record(deployment.error)))
    elif deployment.state is not State.LOADING:
        operation.done = True
        operation.error.CopyFrom(
            status_proto(Cancelled(f"{deployment.name} was deleted before it was ready", reason="DELETED"))
        )
    return operation


def roll_out_operation_of(deployment: Deployment) -> operations_pb2.Operation:
    """The operation of the deployment's newest roll-out."""
    roll_out = deployment.roll_out
    assert roll_out is not None
    operation = operations_pb2.Operation(name=roll_out.operation, done=not roll_out.under_way)
    operation.metadata.Pack(roll_out_metadata_to_proto(deployment))
    if roll_out.error is not None:
        operation.error.CopyFrom(status_proto(error_from_record(roll_out.error)))
    elif operation.done:
        operation.response.Pack(deployment_to_proto(deployment))
    return operation


def checked_operation(deployment: Deployment) -> operations_pb2.Operation:
    """The answer to `validate_only`: done, nameless, with the deployment as it would begin."""
    operation = operations_pb2.Operation(done=True)
    operation.metadata.Pack(metadata_to_proto(deployment))
    operation.response.Pack(deployment_to_proto(deployment))
    return operation


def checked_roll_out_operation(deployment: Deployment) -> operations_pb2.Operation:
    """The same for a roll-out."""
    operation = operations_pb2.Operation(done=True)
    operation.metadata.Pack(roll_out_metadata_to_proto(deployment))
    operation.response.Pack(deployment_to_proto(deployment))
    return operation
