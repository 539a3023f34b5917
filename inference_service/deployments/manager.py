"""Creating and deleting deployments: checks, the checkpoint that a name means, and the record that makes it durable."""

from __future__ import annotations

import time
from collections.abc import Callable

from inference_service.deployments.cluster import Cluster
from inference_service.deployments.operations import DeploymentOperations, operation_name
from inference_service.deployments.registry import USER_KIND, Deployments, check_not_gone, new_uid
from inference_service.domain.deployment import FIRST_VERSION, Creation, Deployment, ModelVersion, Spec, State
from shared import names
from shared.checkpoint import CheckpointEntry, resolve_any
from shared.checkpoint.users import release, using
from shared.errors import already_exists, invalid_field
from shared.own_code import OwnCode
from shared.requests import claimed
from shared.storage import ObjectStore

SERVICE = "inference"
FIELD = "spec.checkpoint"


class DeploymentManager:
    """Blocking; safe to call from several threads."""

    def __init__(
        self,
        store: ObjectStore,
        deployments: Deployments,
        operations: DeploymentOperations,
        cluster: Cluster,
        own_code: OwnCode | None = None,
    ) -> None:
        """`own_code` says whether users' own code may run in replicas; None: it may not."""
        self._own_code = own_code or OwnCode()
        self._store = store
        self._deployments = deployments
        self._operations = operations
        self._cluster = cluster

    def create(self, creation: Creation) -> Deployment:
        """The durable deployment, LOADING; or, for a `request_id` seen before, what its first call made.

        Raises `InvalidArgument`, `NotFound` (job or checkpoint; or what the first call made, where that was deleted
        since), `FailedPrecondition` (the job has no checkpoint; the cluster could never hold it; its model is made by a
        user's own code, which does not run here) and `AlreadyExists`.
        """
        wanted_name = f"deployments/{names.check_id('deployment_id', creation.deployment_id)}"
        request_id = names.check_request_id("request_id", creation.request_id)
        if creation.validate_only:
            if self._deployments.exists(wanted_name):
                raise already_exists(wanted_name)
            self._cluster.check_fits(creation.spec)
            entry = resolve_any(self._store, FIELD, creation.spec.checkpoint)
            check_predictor(creation.spec, entry)
            check_code(self._own_code, entry)
            return _new(wanted_name, new_uid(), request_id, creation.spec, entry)
        with claimed(self._store, SERVICE, request_id, creation.digest, wanted_name) as claim:
            if claim.repeated and (made := self._deployments.made_by(claim.name, request_id)):
                check_not_gone(made)
                return made
            if not claim.repeated and self._deployments.exists(wanted_name):
                raise already_exists(wanted_name)
            return self._make(wanted_name, request_id, creation.spec)

    def delete(self, name: str, etag: str) -> Deployment:
        """Raises `InvalidArgument`, `NotFound` and `Conflict`."""
        names.parse("name", name, "deployments/{m}")
        return self._deployments.delete(name, etag, time.time())

    def get(self, name: str) -> Deployment:
        """Raises `InvalidArgument` and `NotFound`."""
        names.parse("name", name, "deployments/{m}")
        return self._deployments.get(name)

    def follow(self, name: str) -> Callable[[], Deployment | None]:
        """Its state at each call, None once it is gone. Raises `InvalidArgument` and `NotFound`."""
        first, newest = self.get(name), self._deployments.follow(name)

        def look() -> Deployment | None:
            found = newest()
            return found if found is not None and found.uid == first.uid and found.state is not State.GONE else None

        return look

    def page(self, size: int, token: str) -> tuple[list[Deployment], str]:
        """Raises `InvalidArgument`."""
        return self._deployments.page(size, token)

    def _make(self, name: str, request_id: str, spec: Spec) -> Deployment:
        self._cluster.check_fits(spec)
        uid = new_uid()
        # Its mark keeps the checkpoint from the first moment on; should this process die, it counts until it is plain
        # that no deployment of this uid comes.
        marked = using(self._store, FIELD, spec.checkpoint, USER_KIND, uid, name, ends_in=State.GONE, of_programs=True)
        with marked as entry:
            check_predictor(spec, entry)
            check_code(self._own_code, entry)
            deployment = _new(name, uid, request_id, spec, entry)
            # The pointer first: an operation that was answered must be found, whatever dies in between.
            self._operations.record(deployment)
            made = self._deployments.create(deployment)
        if made.uid != uid:  # the same request, sent twice at once, was faster
            release(self._store, entry.name, USER_KIND, uid)
        return made


def check_predictor(spec: Spec, entry: CheckpointEntry) -> None:
    """Raises `InvalidArgument` for a predictor of a checkpoint that needs none."""
    if spec.predictor and not entry.is_of_program:
        remedy = f"{entry.name} is of a model, which is served as it is; leave it out"
        raise invalid_field("spec.predictor", spec.predictor, remedy)


def check_code(own_code: OwnCode, entry: CheckpointEntry) -> None:
    """Raises `FailedPrecondition` (OWN_CODE_OFF) for a checkpoint that needs a user's own code to be served, where such
    code does not run."""
    if entry.code_bundle:
        own_code.require_own_code(f"{entry.name} is served by code of {entry.code_bundle}: ")


def version_of(entry: CheckpointEntry, number: str) -> ModelVersion:
    """A version that is still to be loaded."""
    return ModelVersion(
        number=number,
        checkpoint=entry.name,
        folder=entry.folder,
        checkpoint_sha256=entry.manifest_sha256,
        training_job=entry.name.partition("/checkpoints/")[0],
        code_bundle=entry.code_bundle,
    )


def _new(name: str, uid: str, request_id: str, spec: Spec, entry: CheckpointEntry) -> Deployment:
    version = version_of(entry, FIRST_VERSION)
    now_s = time.time()
    return Deployment(
        name=name,
        uid=uid,
        spec=spec,
        state=State.LOADING,
        generation=1,
        operation=operation_name(uid),
        request_id=request_id,
        versions=(version,),
        create_time=now_s,
        update_time=now_s,
    )
