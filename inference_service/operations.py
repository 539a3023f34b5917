"""The operations of this service: each loads one deployment, and its state is read from that deployment's log."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from google.longrunning import operations_pb2

from inference_service.converters import deployment_to_proto, metadata_to_proto
from inference_service.domain.deployment import Deployment, State
from inference_service.registry import Deployments
from shared.errors import Cancelled, error_from_record, not_found
from shared.grpc_errors import status_proto
from shared.storage import ObjectMissing, ObjectStore

ROOT = "operations"
PREFIX = "deploy-"  # tells this service's operations from those of the others in the same folder


def operation_name(uid: str) -> str:
    return f"{ROOT}/{PREFIX}{uid}"


class DeploymentOperations:
    """An `OperationSource` over the deployments' logs."""

    def __init__(self, store: ObjectStore, deployments: Deployments) -> None:
        self._store = store
        self._deployments = deployments

    def record(self, deployment: Deployment) -> None:
        """Makes the operation findable, also after its deployment is gone. Writing it again changes nothing."""
        pointer = {"deployment": deployment.name, "uid": deployment.uid}
        self._store.put(f"{deployment.operation}/pointer.json", json.dumps(pointer).encode())

    def get(self, name: str) -> operations_pb2.Operation:
        return operation_of(self._deployment(name))

    def list_ids(self) -> list[str]:
        return [one for one in self._store.folders(ROOT) if one.startswith(PREFIX)]

    def cancel(self, name: str) -> None:
        """Deletes the deployment if it is still loading; afterwards there is nothing left to cancel."""
        deployment = self._deployment(name)

        def delete_if_loading(newest: Deployment) -> Deployment | None:
            if newest.state is not State.LOADING:
                return None
            return replace(newest, state=State.DELETING, generation=newest.generation + 1, update_time=time.time())

        self._deployments.transition(deployment.name, deployment.uid, delete_if_loading)

    def _deployment(self, name: str) -> Deployment:
        if not name.startswith(f"{ROOT}/{PREFIX}"):
            raise not_found(name)
        try:
            pointer = json.loads(self._store.get(f"{name}/pointer.json"))
        except ObjectMissing:
            raise not_found(name) from None
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


def checked_operation(deployment: Deployment) -> operations_pb2.Operation:
    """The answer to `validate_only`: done, nameless, with the deployment as it would begin."""
    operation = operations_pb2.Operation(done=True)
    operation.metadata.Pack(metadata_to_proto(deployment))
    operation.response.Pack(deployment_to_proto(deployment))
    return operation
