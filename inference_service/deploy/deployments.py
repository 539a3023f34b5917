"""Deployments in the object store, one resource log each.

How they are read and changed, their operations, and the checks and records that create and delete them. One check is
whether the cluster could ever hold the replicas, on the Ray nodes that this process has seen lately.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from google.longrunning import operations_pb2

from inference_service.convert import deployment_to_proto, metadata_to_proto, rollout_metadata_to_proto
from inference_service.deploy.live_deployments import LiveDeployments
from inference_service.domain.deployment import (
    FIRST_VERSION,
    Creation,
    Deployment,
    ModelVersion,
    Spec,
    State,
    deleting,
    with_deletion,
)
from inference_service.domain.rollout_transitions import with_traffic_back
from shared import names
from shared.checkpoint import CheckpointEntry, resolve_any
from shared.checkpoint import references as checkpoint_references
from shared.checkpoint.references import release, using
from shared.dataset_version.version import mark_used, unmark
from shared.errors import (
    Cancelled,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    already_exists,
    error_from_record,
    invalid_field,
    not_found,
)
from shared.grpc_errors import status_proto
from shared.resource_log import Record, ResourceLog, claimed
from shared.settings import OwnCode
from shared.storage import ObjectMissing, ObjectStore
from shared.streaming import operation_ids_after

# --- Fitting ---
# Checks whether a cluster could ever hold a deployment's replicas, by its nodes' total resources, as plain values.

Resources = Mapping[str, float]

# Ray's amounts are multiples of a ten-thousandth, and sums of fractions are not exact.
TOLERANCE = 1e-6


# During a rollout the new version runs next to the old one.
VERSIONS_OF_A_ROLLOUT = 2


def check_fits(spec: Spec, nodes: Sequence[Resources], versions: int = 1) -> None:
    """Raise `FailedPrecondition` naming the field that no cluster of these nodes could satisfy.

    A node must hold one replica, and all nodes together the minimum replicas of `versions` versions. Without nodes
    nothing is checked.
    """
    need = _need(spec)
    if not nodes:
        return
    for name, amount in need.items():
        most = max(node.get(name, 0.0) for node in nodes)
        if most + TOLERANCE < amount:
            raise _never(_field(spec, name), f"a replica takes {amount:g} {name}, and no node has more than {most:g}")
    places = sum(_places(node, need) for node in nodes)
    if places == 0:
        raise _never(_field(spec, "CPU"), f"no node has {_described(need)} together, which a replica takes")
    if places < versions * spec.num_replicas:
        raise _too_many(spec, versions, need, f"there is room for {places}")


def check_within(spec: Spec, most: Resources, versions: int = 1) -> None:
    """Check the same for a cluster with at most `most` resources; missing resources are unlimited."""
    for name, amount in _need(spec).items():
        if name in most and amount > most[name] + TOLERANCE:
            why = f"a replica takes {amount:g} {name}, and the cluster never has more than {most[name]:g}"
            raise _never(_field(spec, name), why)
        if name in most and amount * versions * spec.num_replicas > most[name] + TOLERANCE:
            raise _too_many(spec, versions, {name: amount}, f"the cluster never has more than {most[name]:g}")


def _need(spec: Spec) -> dict[str, float]:
    """Return the resources of one replica, without zeros."""
    scale = spec.scale()
    return {name: amount for name, amount in (("CPU", scale.cpus), ("GPU", scale.gpus)) if amount}


def _places(node: Resources, need: Resources) -> int:
    return min(int((node.get(name, 0.0) + TOLERANCE) / amount) for name, amount in need.items())


def _field(spec: Spec, resource: str) -> str:
    if resource == "GPU":
        return "spec.gpus_per_replica"
    return "spec.threads_per_replica" if spec.cpus_per_replica is None else "spec.cpus_per_replica"


def _too_many(spec: Spec, versions: int, need: Resources, bound: str) -> FailedPrecondition:
    if versions == 1:
        field = "spec.autoscaling.min_replicas" if spec.autoscaling else "spec.num_replicas"
        return _never(field, f"{spec.num_replicas} replicas take {_described(need)} each, and {bound}")
    # A rollout's request has no replica counts: its deployment has.
    why = (
        f"while it rolls out it has {versions} versions of {spec.num_replicas} replicas, which take "
        f"{_described(need)} each"
    )
    return _never("name", f"{why}, and {bound}")


def _described(need: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in need.items())


def _never(field: str, why: str) -> FailedPrecondition:
    remedy = "ask for less; of a cluster that grows, its operator sets MILLRACE_CLUSTER_MAX"
    return FailedPrecondition(
        f"{field}: this can never be placed: {why}; {remedy}",
        reason="NEVER_SCHEDULABLE",
        fields=[(field, f"{why}; {remedy}")],
    )


# --- Cluster ---
# The Ray nodes that this process has seen lately: deployments that none of them could hold are refused.

# A missing node may be restarting, or be replaced by a similar one.
REMEMBERED_S = 3600.0


class Cluster:
    """Remembers the cluster's nodes.

    `most` is the operator's limit of a growing cluster, None without a limit. `clock` returns seconds. Safe to read
    from any thread.
    """

    def __init__(self, most: Resources | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._seen: dict[str, tuple[Resources, float]] = {}  # by id

    def note(self, nodes: Mapping[str, Resources]) -> None:
        """Record the total resources of the present nodes, by their ids."""
        now_s = self._clock()
        kept = {name: one for name, one in self._seen.items() if now_s - one[1] < REMEMBERED_S}
        self._seen = {**kept, **{name: (resources, now_s) for name, resources in nodes.items()}}

    def check_fits(self, spec: Spec, versions: int = 1) -> None:
        """Raise `FailedPrecondition` if the replicas of `versions` versions could never be placed together, as far as
        known.
        """
        if self._most is not None:
            check_within(spec, self._most, versions)
        else:
            check_fits(spec, [resources for resources, _ in self._seen.values()], versions)


# --- Registry ---

logger = logging.getLogger(__name__)


# Deployments in the object store: one resource log each, below `deployments/{m}/log`.


DEPLOYMENTS = "deployments"
# The kind of the reference markers at dataset versions and checkpoints.
REFERENCE_KIND = "deployment"

Step = Callable[[Deployment], Deployment | None]


class Deployments:
    """Reads and writes the deployments' logs.

    Safe to call from several threads. Every read raises `DataLoss` if the log cannot be read: a record is damaged, or a
    later release wrote it.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._live = LiveDeployments(store, self.log, _deployment)

    def create(self, deployment: Deployment) -> Deployment:
        """Store a new deployment and return it.

        If the existing deployment came from the same `request_id`, returns that one.

        Raises `AlreadyExists` if the id is taken, and `NotFound` if the request's own deployment was deleted. The id of
        a deleted deployment is free for other requests.
        """

        def decide(record: Record | None) -> dict[str, object] | None:
            there = _deployment(deployment.name, record)
            if there is not None and deployment.request_id and there.request_id == deployment.request_id:
                check_not_gone(there)
                return None
            if there is None or there.state is State.GONE:
                return deployment.as_record()
            raise already_exists(deployment.name)

        self._live.mark(deployment)
        made = _deployment(deployment.name, self.log(deployment.name).update(decide))
        assert made is not None
        self._live.mark_again(made)
        return made

    def find(self, name: str) -> Deployment | None:
        """Return the newest state in the log, even of a deleted deployment."""
        return _deployment(name, self.log(name).head())

    def follow(self, name: str) -> FollowedDeployment:
        """Open the deployment of that name for repeated reads."""
        return FollowedDeployment(name, self.log(name))

    def get(self, name: str) -> Deployment:
        """Return the deployment; raise `NotFound`."""
        found = self.find(name)
        if found is None or found.state is State.GONE:
            raise not_found(name)
        return found

    def exists(self, name: str) -> bool:
        found = self.find(name)
        return found is not None and found.state is not State.GONE

    def history(self, name: str, uid: str) -> Deployment | None:
        """Return the last known state of the deployment with this uid.

        Its id may belong to another deployment by now.
        """
        return self._newest(name, lambda deployment: deployment.uid == uid)

    def made_by(self, name: str, request_id: str) -> Deployment | None:
        """Return the last known state of the deployment that this request created."""
        return self._newest(name, lambda deployment: deployment.request_id == request_id)

    def _newest(self, name: str, fits: Callable[[Deployment], bool]) -> Deployment | None:
        log = self.log(name)
        record = log.head()
        while record is not None:
            deployment = _deployment(name, record)
            if deployment is not None and fits(deployment):
                return deployment
            record = log.read(record.number - 1)
        return None

    def page(self, size: int, token: str) -> tuple[list[Deployment], str]:
        """Return one page of deployments, in the order of names.

        Deleted and unreadable deployments are left out, so a page may be short.
        """
        ids = self._live.marked() if self.has_read_all else self._store.folders(DEPLOYMENTS)
        ids, next_token = names.page(ids, size, token)
        found, unreadable = self._read(ids)
        for error in unreadable.values():
            logger.error("left out of a list: %s", error.message)
        return found, next_token

    @property
    def has_read_all(self) -> bool:
        """Whether `all` has returned all deployments, also those of an earlier release. See `LiveDeployments`."""
        return self._live.has_read_all

    def all(self) -> tuple[list[Deployment], dict[str, DataLoss]]:
        """Return all deployments that are not deleted, and the errors of unreadable logs by name."""
        poll = self._live.poll()
        return poll.found, poll.unreadable

    def _read(self, ids: Iterable[str]) -> tuple[list[Deployment], dict[str, DataLoss]]:
        found: list[Deployment] = []
        unreadable: dict[str, DataLoss] = {}
        for name in (f"{DEPLOYMENTS}/{one}" for one in ids):
            try:
                deployment = self.find(name)
            except DataLoss as error:
                unreadable[name] = error
                continue
            if deployment is not None and deployment.state is not State.GONE:
                found.append(deployment)
        return found, unreadable

    def delete(self, name: str, etag: str, now_s: float) -> Deployment:
        """Record the deletion request; raise `NotFound` and `Conflict`."""
        return self.request(name, lambda before: with_deletion(before, name, etag, now_s))

    def request(self, name: str, decide: Callable[[Deployment | None], Deployment | None]) -> Deployment:
        """Append the state that `decide` returns for the newest state, and return the newest.

        Raises the errors of `decide`, which must raise if there is no such deployment.
        """

        def appended(record: Record | None) -> dict[str, object] | None:
            after = decide(_deployment(name, record))
            return after.as_record() if after is not None else None

        newest = _deployment(name, self.log(name).update(appended))
        assert newest is not None
        return newest

    def transition(self, name: str, uid: str, step: Step) -> Deployment | None:
        """Append the state that `step` returns for the deployment with this uid.

        Appends nothing if `step` returns None. Return the newest state, None if the uid is no longer there.
        """

        def decide(record: Record | None) -> dict[str, object] | None:
            before = _deployment(name, record)
            after = step(before) if before is not None and before.uid == uid else None
            return after.as_record() if after is not None else None

        newest = _deployment(name, self.log(name).update(decide))
        return newest if newest is not None and newest.uid == uid else None

    def rollout_made_by(self, name: str, request_id: str) -> Deployment | None:
        """Return the last known state with this request's rollout as the newest."""
        return self._newest(name, lambda one: one.rollout is not None and one.rollout.request_id == request_id)

    def rollout(self, name: str, rollout_uid: str) -> Deployment | None:
        """Return the last known state with this rollout as the newest."""
        return self._newest(name, lambda one: one.rollout is not None and one.rollout.uid == rollout_uid)

    def mark_datasets(self, deployment: Deployment, versions: Iterable[ModelVersion]) -> None:
        """Mark the dataset versions of these loaded models as used, until `release`.

        A version that was already deleted is no error: a served model does not read it.
        """
        for name in _dataset_versions(versions):
            try:
                mark_used(self._store, name, REFERENCE_KIND, deployment.uid, deployment.name, is_job=False)
            except (DataLoss, FailedPrecondition, InvalidArgument, NotFound) as error:
                logger.warning("%s: its dataset version cannot be kept: %s", deployment.name, error.message)

    def keep_checkpoints(self, deployment: Deployment, versions: Iterable[ModelVersion]) -> None:
        """Mark the checkpoints of these versions as used, until `release`.

        The request for a version has already marked its checkpoint, unless the deployment is older than these marks.
        """
        for version in versions:
            named = checkpoint_references.keep(
                self._store,
                version.checkpoint,
                version.folder,
                REFERENCE_KIND,
                deployment.uid,
                deployment.name,
                ends_in=State.GONE,
            )
            if not named:
                logger.warning("%s: its job no longer names %s", deployment.name, version.checkpoint)

    def release(self, deployment: Deployment, versions: Sequence[ModelVersion]) -> None:
        """Remove the marks of these versions' checkpoints and dataset versions.

        Those that other versions of the deployment use stay marked. A missing mark is no error.
        """
        going = {version.number for version in versions}
        others = [version for version in deployment.versions if version.number not in going]
        for name in {*_dataset_versions(versions)} - {*_dataset_versions(others)}:
            unmark(self._store, name, REFERENCE_KIND, deployment.uid)
        for name in {version.checkpoint for version in versions} - {version.checkpoint for version in others}:
            checkpoint_references.release(self._store, name, REFERENCE_KIND, deployment.uid)

    def log(self, name: str) -> ResourceLog:
        """Open the log of the deployment of that name, for one thread."""
        return _Log(self._store, name)


class FollowedDeployment:
    """Reads one deployment again and again, see `shared.streaming.Follower`. Not safe for several threads."""

    def __init__(self, name: str, log: ResourceLog) -> None:
        self._name = name
        self._log = log

    @property
    def number(self) -> int:
        return self._log.newest_known.number if self._log.newest_known else 0

    def read(self) -> Deployment:
        """Return the deployment, which may be another one than before. Costs one request if nothing changed.

        Raises `NotFound`.
        """
        found = _deployment(self._name, self._log.head())
        if found is None or found.state is State.GONE:
            raise not_found(self._name)
        return found


class _Log(ResourceLog):
    """The log of one deployment."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        super().__init__(store, f"{name}/log")
        self._name = name

    def read(self, number: int) -> Record | None:
        with _reading(self._name):
            return super().read(number)


def _dataset_versions(versions: Iterable[ModelVersion]) -> list[str]:
    return sorted({version.dataset_version for version in versions if version.dataset_version})


def check_not_gone(deployment: Deployment) -> None:
    """Raise `NotFound` if the deployment that a request made was deleted since.

    The request's first answer can no longer be repeated.
    """
    if deployment.state is State.GONE:
        made_it = f"request_id {deployment.request_id} made it, and it was deleted since"
        raise not_found(deployment.name, f"{made_it}; use a new UUID4")


def new_uid() -> str:
    return uuid.uuid4().hex


def _deployment(name: str, record: Record | None) -> Deployment | None:
    with _reading(name):
        return Deployment.from_record(record.state) if record else None


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn the errors of unreadable records into `DataLoss`; an outage of the store stays as it is."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataLoss(
            f"the log of {name} cannot be read: {type(error).__name__}: {error}; restore its newest record, or run the "
            "release that wrote it",
            reason="LOG_UNREADABLE",
            metadata={"resource": name},
        ) from error


# --- Manager ---
# Creates and deletes deployments: the checks, the checkpoint that a name resolves to, and the durable record.

SERVICE = "inference"
FIELD = "spec.checkpoint"


class DeploymentManager:
    """Creates, reads and deletes deployments.

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
        """`own_code` says whether users' own code may run in replicas; by default it may not."""
        self._own_code = own_code or OwnCode()
        self._store = store
        self._deployments = deployments
        self._operations = operations
        self._cluster = cluster

    def create(self, creation: Creation) -> Deployment:
        """Create a deployment in state LOADING.

        For a `request_id` seen before, returns the deployment of its first call.

        Raises `InvalidArgument`, `NotFound` (job or checkpoint; or the first call's deployment, if it was deleted
        since), `FailedPrecondition` (the job has no checkpoint; the cluster could never hold it; its model is built by
        a user's own code, which may not run here) and `AlreadyExists`.
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
        """Request the deletion; raise `InvalidArgument`, `NotFound` and `Conflict`."""
        names.parse("name", name, "deployments/{m}")
        return self._deployments.delete(name, etag, time.time())

    def get(self, name: str) -> Deployment:
        """Return the deployment; raise `InvalidArgument` and `NotFound`."""
        names.parse("name", name, "deployments/{m}")
        return self._deployments.get(name)

    def follow(self, name: str) -> FollowedDeployment:
        """Open the deployment of that name for repeated reads; raise `InvalidArgument`."""
        names.parse("name", name, "deployments/{m}")
        return self._deployments.follow(name)

    def page(self, size: int, token: str) -> tuple[list[Deployment], str]:
        """Return one page of deployments; raise `InvalidArgument`."""
        return self._deployments.page(size, token)

    def _make(self, name: str, request_id: str, spec: Spec) -> Deployment:
        self._cluster.check_fits(spec)
        uid = new_uid()
        # The mark keeps the checkpoint from now on. If this process dies, the mark counts until it is certain that no
        # deployment with this uid will be created.
        marked = using(
            self._store, FIELD, spec.checkpoint, REFERENCE_KIND, uid, name, ends_in=State.GONE, of_programs=True
        )
        with marked as entry:
            check_predictor(spec, entry)
            check_code(self._own_code, entry)
            deployment = _new(name, uid, request_id, spec, entry)
            # The pointer first: an answered operation must be found, wherever this process dies.
            self._operations.record(deployment)
            made = self._deployments.create(deployment)
        if made.uid != uid:  # the same request was sent twice at once, and the other call was faster
            release(self._store, entry.name, REFERENCE_KIND, uid)
        return made


def check_predictor(spec: Spec, entry: CheckpointEntry) -> None:
    """Raise `InvalidArgument` for a predictor that the checkpoint does not need."""
    if spec.predictor and not entry.is_of_program:
        remedy = f"{entry.name} is of a model, which is served as it is; leave it out"
        raise invalid_field("spec.predictor", spec.predictor, remedy)


def check_code(own_code: OwnCode, entry: CheckpointEntry) -> None:
    """Raise `FailedPrecondition` (OWN_CODE_OFF) if the checkpoint needs user code, which may not run."""
    if entry.code_bundle:
        own_code.require_own_code(f"{entry.name} is served by code of {entry.code_bundle}: ")


def version_of(entry: CheckpointEntry, number: str) -> ModelVersion:
    """Return a version that is still to be loaded."""
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


# --- Operations ---
# The operations of this service. Each loads one deployment or rolls a version out; its state is read from that
# deployment's log.

OPERATIONS = "operations"
# These prefixes distinguish this service's operations from those of the others in the same folder.
PREFIX = "deploy-"
ROLLOUT_PREFIX = "rollout-"


def operation_name(uid: str) -> str:
    return f"{OPERATIONS}/{PREFIX}{uid}"


def rollout_operation_name(uid: str) -> str:
    return f"{OPERATIONS}/{ROLLOUT_PREFIX}{uid}"


class DeploymentOperations:
    """An `OperationSource` over the deployments' logs."""

    def __init__(self, store: ObjectStore, deployments: Deployments) -> None:
        self._store = store
        self._deployments = deployments

    def record(self, deployment: Deployment) -> None:
        """Make the operation findable, even after its deployment is deleted; idempotent."""
        self._point(deployment.operation, deployment)

    def record_rollout(self, operation: str, deployment: Deployment) -> None:
        """Make a rollout's operation findable; idempotent."""
        self._point(operation, deployment)

    def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:  # noqa: ARG002
        """Return an operation; `brief` has no effect, since operations are short."""
        if name.startswith(f"{OPERATIONS}/{ROLLOUT_PREFIX}"):
            return rollout_operation_of(self._rolled_out(name))
        return operation_of(self._deployment(name))

    def follow(self, name: str) -> FollowedOperation:
        """Open an operation for repeated reads; raise `NotFound`."""
        if not name.startswith((f"{OPERATIONS}/{PREFIX}", f"{OPERATIONS}/{ROLLOUT_PREFIX}")):
            raise not_found(name)
        log = self._deployments.log(self._pointer(name)["deployment"])
        return FollowedOperation(log, lambda: self.get(name))

    def ids_after(self, after: str, most: int) -> Sequence[str]:
        return operation_ids_after(self._store, (PREFIX, ROLLOUT_PREFIX), after, most)

    def cancel(self, name: str) -> None:
        """Cancel an operation: deletes a loading deployment, or rolls back a rollout.

        A finished operation is left as it is.
        """
        if name.startswith(f"{OPERATIONS}/{ROLLOUT_PREFIX}"):
            self._cancel_rollout(name)
            return
        deployment = self._deployment(name)

        def delete_if_loading(newest: Deployment) -> Deployment | None:
            return deleting(newest, time.time()) if newest.state is State.LOADING else None

        self._deployments.transition(deployment.name, deployment.uid, delete_if_loading)

    def _cancel_rollout(self, name: str) -> None:
        deployment = self._rolled_out(name)
        rollout = deployment.rollout
        assert rollout is not None
        error = Cancelled(f"the rollout of version {rollout.version} was cancelled", reason="ROLLED_BACK")

        def rollback(newest: Deployment) -> Deployment | None:
            after = with_traffic_back(newest, rollout.uid, error, time.time())
            return replace(after, generation=after.generation + 1) if after is not None else None

        self._deployments.transition(deployment.name, deployment.uid, rollback)

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
        """Return the last known state of the deployment with this rollout."""
        uid = name.removeprefix(f"{OPERATIONS}/{ROLLOUT_PREFIX}")
        deployment = self._deployments.rollout(self._pointer(name)["deployment"], uid)
        if deployment is None:  # the rollout was refused after the pointer was written
            raise not_found(name)
        return deployment

    def _deployment(self, name: str) -> Deployment:
        if not name.startswith(f"{OPERATIONS}/{PREFIX}"):
            raise not_found(name)
        pointer = self._pointer(name)
        deployment = self._deployments.history(pointer["deployment"], pointer["uid"])
        if deployment is None:  # its creation was refused after the pointer was written
            raise not_found(name)
        return deployment


class FollowedOperation:
    """Reads one operation again and again, see `shared.streaming.Follower`.

    `get` reads the operation. It is called again only when its deployment's log has a new record.
    """

    def __init__(self, log: ResourceLog, get: Callable[[], operations_pb2.Operation]) -> None:
        self._log = log
        self._get = get
        self._seen: Record | None = None
        self._operation = operations_pb2.Operation()

    @property
    def number(self) -> int:
        return self._seen.number if self._seen else 0

    def read(self) -> operations_pb2.Operation:
        """Return the operation; raise `NotFound`."""
        record = self._log.head()
        if record is None or record is not self._seen:
            self._operation = self._get()
            self._seen = record
        return self._operation


def operation_of(deployment: Deployment) -> operations_pb2.Operation:
    """Return the operation that loads, or loaded, this deployment."""
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


def rollout_operation_of(deployment: Deployment) -> operations_pb2.Operation:
    """Return the operation of the deployment's newest rollout."""
    rollout = deployment.rollout
    assert rollout is not None
    operation = operations_pb2.Operation(name=rollout.operation, done=not rollout.under_way)
    operation.metadata.Pack(rollout_metadata_to_proto(deployment))
    if rollout.error is not None:
        operation.error.CopyFrom(status_proto(error_from_record(rollout.error)))
    elif operation.done:
        operation.response.Pack(deployment_to_proto(deployment))
    return operation


def checked_operation(deployment: Deployment) -> operations_pb2.Operation:
    """Return the answer to `validate_only`: done, nameless, with the deployment as it would begin."""
    operation = operations_pb2.Operation(done=True)
    operation.metadata.Pack(metadata_to_proto(deployment))
    operation.response.Pack(deployment_to_proto(deployment))
    return operation


def checked_rollout_operation(deployment: Deployment) -> operations_pb2.Operation:
    """Return the answer to `validate_only` for a rollout."""
    operation = operations_pb2.Operation(done=True)
    operation.metadata.Pack(rollout_metadata_to_proto(deployment))
    operation.response.Pack(deployment_to_proto(deployment))
    return operation
