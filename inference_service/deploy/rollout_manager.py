"""Handles clients' requests about roll-outs: the checks, the checkpoint that a name resolves to, and the durable
record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from inference_service.deploy.capacity import VERSIONS_OF_A_ROLLOUT, Cluster
from inference_service.deploy.deployments import (
    FIELD,
    SERVICE,
    DeploymentOperations,
    Deployments,
    check_code,
    new_uid,
    rollout_operation_name,
    version_of,
)
from inference_service.domain.deployment import Deployment, ModelVersion, State, TrafficChange, checked
from inference_service.domain.rollout import Rollout, RolloutChange, RolloutState
from inference_service.domain.rollout_transitions import (
    begun,
    check_can_begin,
    next_number,
    with_change,
    with_rollback,
)
from shared import names
from shared.checkpoint import CheckpointEntry, resolve_any
from shared.checkpoint.references import release, using
from shared.errors import Conflict, MillraceError
from shared.log import claimed
from shared.settings import OwnCode
from shared.storage import ObjectStore

logger = logging.getLogger(__name__)

# The kind of the reference to a checkpoint while its roll-out is being recorded.
MARK_KIND = "rollout"


class RolloutManager:
    """Begins, changes and undoes roll-outs.

    Blocking; safe to call from several threads.
    """

    def __init__(
        self,
        store: ObjectStore,
        deployments: Deployments,
        operations: DeploymentOperations,
        cluster: Cluster,
        own_code: OwnCode | None = None,
    ) -> None:
        """`own_code` is as in `DeploymentManager`."""
        self._own_code = own_code or OwnCode()
        self._store = store
        self._deployments = deployments
        self._operations = operations
        self._cluster = cluster

    def begin(self, request: RolloutChange) -> Deployment:
        """Begins a roll-out in state LOADING and returns the deployment.

        For a `request_id` seen before, returns the result of its first call.

        Raises `InvalidArgument`, `NotFound`, `FailedPrecondition` (for example, the cluster could never hold both
        versions), `Conflict` (the etag) and `AlreadyExists` (the `request_id` was used with another body).
        """
        names.parse("name", request.name, "deployments/{m}")
        request_id = names.check_request_id("request_id", request.request_id)
        if request.validate_only:
            there = _checked(self._deployments.find(request.name), request)
            self._cluster.check_fits(there.spec, VERSIONS_OF_A_ROLLOUT)
            entry = resolve_any(self._store, FIELD, request.plan.checkpoint)
            check_code(self._own_code, entry)
            return _begun(there, request, request_id, new_uid(), entry)
        with claimed(self._store, SERVICE, request_id, request.digest, request.name) as claim:
            if claim.repeated and (made := self._deployments.rollout_made_by(request.name, request_id)):
                return made
            return self._begin(request, request_id)

    def back(self, name: str, etag: str) -> Deployment:
        """Rolls back; raises `InvalidArgument`, `NotFound`, `FailedPrecondition` and `Conflict`."""
        names.parse("name", name, "deployments/{m}")
        made = self._deployments.request(name, lambda before: with_rollback(before, name, etag, time.time()))
        self._mark(made, [version for version in made.versions if version.weight])
        return made

    def change(self, name: str, change: TrafficChange, etag: str) -> Deployment:
        """Changes the traffic; raises `InvalidArgument`, `NotFound`, `FailedPrecondition` and `Conflict`."""
        names.parse("deployment.name", name, "deployments/{m}")
        made = self._deployments.request(name, lambda before: with_change(before, name, change, etag, time.time()))
        if change.policy is not None:
            self._mark(made, [version for version in made.versions if version.retired_at is None])
        return made

    def _begin(self, request: RolloutChange, request_id: str) -> Deployment:
        before = self._deployments.find(request.name)
        if before is not None and _made_by(before, request_id):
            return before
        there, uid = _checked(before, request), new_uid()
        self._cluster.check_fits(there.spec, VERSIONS_OF_A_ROLLOUT)

        def decide(found: Deployment | None) -> Deployment | None:
            if found is not None and _made_by(found, request_id):
                return None  # the same request was sent twice at once, and the other call was faster
            newest = _checked(found, request)
            if newest.uid != there.uid:
                raise Conflict(f"{request.name} was deleted and created anew meanwhile; read it again")
            return _begun(newest, request, request_id, uid, entry)

        # A separate mark keeps the checkpoint meanwhile: the deployment's own mark may exist already for another
        # version, and must not be removed if this request is refused. If this process dies, the mark counts for ten
        # minutes.
        marked = using(
            self._store,
            FIELD,
            request.plan.checkpoint,
            MARK_KIND,
            uid,
            request.name,
            ends_in=State.GONE,
            of_programs=True,
        )
        with marked as entry:
            check_code(self._own_code, entry)
            # The pointer first: an answered operation must be found, wherever this process dies.
            self._operations.record_rollout(rollout_operation_name(uid), there)
            made = self._deployments.request(request.name, decide)
        self._keep(made, uid, entry)
        return made

    def _keep(self, deployment: Deployment, uid: str, entry: CheckpointEntry) -> None:
        """Marks the checkpoint as the deployment's, and removes the roll-out's own mark."""
        try:
            if deployment.rollout is not None and deployment.rollout.uid == uid:
                new = [version for version in deployment.versions if version.number == deployment.rollout.version]
                self._deployments.keep_checkpoints(deployment, new)
            release(self._store, entry.name, MARK_KIND, uid)
        except MillraceError as error:  # the roll-out is recorded, and the reconciler marks it, too
            logger.warning("%s: the marks are left to the reconciler: %s", deployment.name, error.message)

    def _mark(self, deployment: Deployment, versions: Sequence[ModelVersion]) -> None:
        """Marks what these remaining versions use.

        A version that had retired may have lost its marks by now, if the removal read the log before this request. A
        removal that reads the log afterwards marks them itself.
        """
        try:
            self._deployments.keep_checkpoints(deployment, versions)
            self._deployments.mark_datasets(deployment, versions)
        except MillraceError as error:  # the change is recorded, and the reconciler marks them, too
            logger.warning("%s: the marks are left to the reconciler: %s", deployment.name, error.message)


def _checked(deployment: Deployment | None, request: RolloutChange) -> Deployment:
    there = checked(deployment, request.name, request.etag)
    check_can_begin(there)
    return there


def _made_by(deployment: Deployment, request_id: str) -> bool:
    return bool(request_id) and deployment.rollout is not None and deployment.rollout.request_id == request_id


def _begun(
    deployment: Deployment, request: RolloutChange, request_id: str, uid: str, entry: CheckpointEntry
) -> Deployment:
    now_s = time.time()
    version = version_of(entry, next_number(deployment))
    rollout = Rollout(
        uid=uid,
        request_id=request_id,
        operation=rollout_operation_name(uid),
        plan=request.plan,
        state=RolloutState.LOADING,
        version=version.number,
        before={},
        create_time=now_s,
    )
    return begun(deployment, version, rollout, now_s)
