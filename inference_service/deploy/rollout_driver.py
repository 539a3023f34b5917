"""Rollouts: handles clients' requests about them, and drives them from step to step.

A request is checked, the checkpoint that it names is resolved, and the rollout is recorded. The driver then moves the
traffic, rolls back at a limit, and removes retired versions from the logs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from inference_service.deploy.deployments import (
    FIELD,
    SERVICE,
    VERSIONS_OF_A_ROLLOUT,
    Cluster,
    DeploymentOperations,
    Deployments,
    Step,
    check_code,
    new_uid,
    rollout_operation_name,
    version_of,
)
from inference_service.domain.batch_policy import pieces
from inference_service.domain.deployment import (
    Deployment,
    ModelVersion,
    State,
    TrafficChange,
    application_name,
    checked,
)
from inference_service.domain.rollout import (
    Compared,
    Comparison,
    Difference,
    Rollout,
    RolloutChange,
    RolloutState,
    falls_short,
)
from inference_service.domain.rollout_transitions import (
    begun,
    check_can_begin,
    next_number,
    with_change,
    with_compared,
    with_next_step,
    with_retired_gone,
    with_rollback,
    with_traffic_back,
    with_unlike,
)
from inference_service.domain.signature import PREPARED, RAW, Array, Rows, Signature, TensorSpec
from inference_service.domain.statistics import Seen, passed_limit
from inference_service.frontend_processes import Peers
from inference_service.serve.models import Models, find_version
from inference_service.serve.preprocessing import tensor_of_column, values_of_column
from inference_service.settings import InferenceSettings
from shared import names
from shared.checkpoint import CheckpointEntry, resolve_any
from shared.checkpoint.references import release, using
from shared.dataset_version import VersionReader, load_version
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    MillraceError,
    ResourceExhausted,
    Unavailable,
)
from shared.logging_and_tracing import hidden
from shared.resource_log import claimed
from shared.settings import OwnCode
from shared.storage import ObjectStore
from shared.transforms.batch import ColumnType, batch_of, schema_of

# --- Requests of clients ---

logger = logging.getLogger(__name__)

# The kind of the reference to a checkpoint while its rollout is being recorded.
MARK_KIND = "rollout"


class RolloutManager:
    """Begins, changes and undoes rollouts.

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
        """Begin a rollout in state LOADING and return the deployment.

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
        """Roll back; raise `InvalidArgument`, `NotFound`, `FailedPrecondition` and `Conflict`."""
        names.parse("name", name, "deployments/{m}")
        made = self._deployments.request(name, lambda before: with_rollback(before, name, etag, time.time()))
        self._mark(made, [version for version in made.versions if version.weight])
        return made

    def change(self, name: str, change: TrafficChange, etag: str) -> Deployment:
        """Change the traffic; raise `InvalidArgument`, `NotFound`, `FailedPrecondition` and `Conflict`."""
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
        """Mark the checkpoint as the deployment's, and remove the rollout's own mark."""
        try:
            if deployment.rollout is not None and deployment.rollout.uid == uid:
                new = [version for version in deployment.versions if version.number == deployment.rollout.version]
                self._deployments.keep_checkpoints(deployment, new)
            release(self._store, entry.name, MARK_KIND, uid)
        except MillraceError as error:  # the rollout is recorded, and the reconciler marks it, too
            logger.warning("%s: the marks are left to the reconciler: %s", deployment.name, error.message)

    def _mark(self, deployment: Deployment, versions: Sequence[ModelVersion]) -> None:
        """Mark what these remaining versions use.

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


# --- Rollouts ---
# Decisions use the counts that this process and its peers have collected since they started. The rollout's step is in
# the log, so another process can continue it. Several processes may drive one rollout, since only one of them can
# write each step; of the frontend processes of one service only the leader tries.


POLL_INTERVAL_S = 0.2


class Rollouts:
    """Drives all rollouts.

    Lives on the event loop of `models`. `changed` is called with each deployment whose log was written.
    """

    def __init__(
        self,
        store: ObjectStore,
        deployments: Deployments,
        models: Models,
        settings: InferenceSettings,
        changed: Callable[[Deployment], None],
        peers: Peers,
    ) -> None:
        self._store = store
        self._deployments = deployments
        self._models = models
        self._settings = settings
        self._changed = changed
        self._peers = peers
        self._watching = PhaseTimer()
        self._comparing: dict[str, asyncio.Task[None]] = {}  # by uid

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            for deployment in self._models.deployments():
                if deployment.state is State.READY:
                    try:
                        await self.poll(deployment)
                    except Exception as error:  # one failing deployment must not hold up the others
                        logger.warning("%s: %r; trying again", deployment.name, error)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def poll(self, deployment: Deployment) -> None:
        """Check a READY deployment once and take the steps that are due."""
        due_s = time.time() - self._settings.retired_for_s
        going = [
            version for version in deployment.versions if version.retired_at is not None and version.retired_at < due_s
        ]
        if going:
            await self._let_go(deployment, going)
        rollout = deployment.rollout
        if rollout is None:
            return
        if not rollout.under_way:
            self._watching.forget(rollout.uid)
            return
        if rollout.state is not RolloutState.SHIFTING:
            await self._prepare(deployment, rollout)
            return
        timeout_s = self._settings.rollout_load_timeout_s
        answers = self._answers(deployment, rollout)
        # One timer per phase: losing the replicas ends a step's time, and getting an answer ends the loss.
        lasts_s = self._watching.lasts_s(rollout.uid, rollout.step if answers else UNRESPONSIVE)
        passed = self._passed_limit(deployment, rollout)
        if passed:
            error = FailedPrecondition(
                f"version {rollout.version} of {deployment.name}: {passed}",
                reason="ROLLOUT_LIMIT_EXCEEDED",
                metadata={"resource": deployment.name, "model_version": rollout.version},
            )
            await self._back(deployment, rollout, error)
        elif not answers:
            if lasts_s >= timeout_s:
                await self._back(deployment, rollout, _late(deployment, rollout, timeout_s))
        elif lasts_s >= rollout.present.interval_s and self._has_replicas(deployment, rollout):
            await self._write(deployment, lambda before: with_next_step(before, rollout.uid, rollout.step, time.time()))

    async def _prepare(self, deployment: Deployment, rollout: Rollout) -> None:
        """Handle the phases before any traffic moves.

        Rolls back after the timeout, and starts the comparison.
        """
        timeout_s = self._settings.rollout_load_timeout_s
        if self._watching.lasts_s(rollout.uid, PREPARING) >= timeout_s:
            await self._back(deployment, rollout, _late(deployment, rollout, timeout_s))
        elif (
            rollout.state is RolloutState.COMPARING
            and rollout.uid not in self._comparing
            and all(self._models.answers(deployment, version) for version in _compared_versions(deployment, rollout))
        ):
            task = asyncio.create_task(self._compare(deployment, rollout))
            self._comparing[rollout.uid] = task
            task.add_done_callback(lambda _: self._comparing.pop(rollout.uid))

    async def _compare(self, deployment: Deployment, rollout: Rollout) -> None:
        wanted = rollout.plan.comparison
        assert wanted is not None
        try:
            seen = await compared(
                self._store, self._models, deployment, _compared_versions(deployment, rollout), wanted
            )
        except (Unavailable, ResourceExhausted, DeadlineExceeded) as error:
            logger.warning("%s is not compared yet: %s; trying again", deployment.name, error.message)
            return
        except MillraceError as error:
            await self._back(deployment, rollout, error)
            return
        except Exception as unexpected:
            await self._back(deployment, rollout, hidden(unexpected, logger, f"{deployment.name} is not compared"))
            return
        short = falls_short(wanted, seen)
        if short:
            unlike = FailedPrecondition(
                f"version {rollout.version} of {deployment.name}: {short}",
                reason="ROLLOUT_COMPARISON_FAILED",
                metadata={"resource": deployment.name, "model_version": rollout.version},
            )
            await self._write(deployment, lambda before: with_unlike(before, rollout.uid, seen, unlike, time.time()))
        else:
            await self._write(deployment, lambda before: with_compared(before, rollout.uid, seen, time.time()))

    def _passed_limit(self, deployment: Deployment, rollout: Rollout) -> str:
        limits = rollout.plan.limits
        return passed_limit(
            limits,
            self._seen(deployment, rollout.version, limits.window_s),
            self._seen(deployment, rollout.main, limits.window_s),
        )

    def _seen(self, deployment: Deployment, number: str, window_s: float) -> Seen:
        for version in deployment.versions:
            if version.number == number:
                own = self._models.statistics(deployment, version).recent.counts(time.time(), window_s)
                return sum(self._peers.counts(application_name(deployment, version)), own).seen()
        return Seen(0, 0, 0.0)

    def _answers(self, deployment: Deployment, rollout: Rollout) -> bool:
        """Return whether the new version answers, even if it has had no replica for a moment."""
        version = find_version(deployment, rollout.version)
        return version is not None and self._models.answers(deployment, version)

    def _has_replicas(self, deployment: Deployment, rollout: Rollout) -> bool:
        """Return whether the new version has replicas now.

        Without replicas no step is taken, since it may be the last one.
        """
        version = find_version(deployment, rollout.version)
        return version is not None and self._models.replicas(deployment, version) != 0

    async def _back(self, deployment: Deployment, rollout: Rollout, error: MillraceError) -> None:
        logger.error("%s is rolled back: %s", deployment.name, error.message)
        await self._write(deployment, lambda before: with_traffic_back(before, rollout.uid, error, time.time()))

    async def _let_go(self, deployment: Deployment, going: Sequence[ModelVersion]) -> None:
        """Remove all due versions at once.

        One by one, two with the same checkpoint would each keep the other's mark.
        """
        # The marks first: once no log names the versions, no process would remove them.
        await asyncio.to_thread(self._deployments.release, deployment, going)
        # A version that was requested meanwhile may share the checkpoint or dataset version, and has lost its mark. Any
        # version that is requested after this read is marked after it.
        newest = await asyncio.to_thread(self._deployments.find, deployment.name)
        if newest is not None and newest.uid == deployment.uid and newest.state is State.READY:
            await asyncio.to_thread(self._deployments.keep_checkpoints, newest, _sharing(newest, going, "checkpoint"))
            await asyncio.to_thread(self._deployments.mark_datasets, newest, _sharing(newest, going, "dataset_version"))
        numbers = [version.number for version in going]
        await self._write(deployment, lambda before: with_retired_gone(before, numbers, time.time()))

    async def _write(self, deployment: Deployment, step: Step) -> None:
        newest = await asyncio.to_thread(self._deployments.transition, deployment.name, deployment.uid, step)
        if newest is not None:
            self._changed(newest)


def _late(deployment: Deployment, rollout: Rollout, timeout_s: float) -> DeadlineExceeded:
    how = "without replicas" if rollout.state is RolloutState.SHIFTING else f"still {rollout.state}"
    remedy, reason = "see that Ray has CPUs for it beside the old one", "ROLLOUT_NOT_LOADED"
    if rollout.state is RolloutState.COMPARING:
        remedy = "both must answer the held rows while no request waits: give it more replicas, or compare fewer rows"
        reason = "ROLLOUT_NOT_COMPARED"
    return DeadlineExceeded(
        f"version {rollout.version} of {deployment.name} is {how} after {timeout_s:.0f} s; {remedy}", reason=reason
    )


def _sharing(newest: Deployment, going: Sequence[ModelVersion], field: str) -> list[ModelVersion]:
    """Return the remaining versions that share `field` with a removed one.

    `field` is the checkpoint or the dataset version. A version that was rolled back to meanwhile counts as remaining.
    """
    numbers, shared = {version.number for version in going}, {getattr(version, field) for version in going}
    stay = [one for one in newest.versions if one.number not in numbers or one.retired_at is None]
    return [one for one in stay if getattr(one, field) in shared]


def _compared_versions(deployment: Deployment, rollout: Rollout) -> tuple[ModelVersion, ModelVersion]:
    """Return the old and the new version."""
    by_number = {version.number: version for version in deployment.versions}
    return by_number[rollout.main], by_number[rollout.version]


# --- Watching ---
# Measures how long this process itself has seen a rollout in one phase. Time without a check does not count.

# The phases before any traffic moves, and after the version has lost its replicas; otherwise the phase is the step.
PREPARING = "PREPARING"
UNRESPONSIVE = "SILENT"


class PhaseTimer:
    """Times the phases of rollouts.

    Restarts with each process, and whenever the phase differs from the last check.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[str | int, float]] = {}  # by uid

    def lasts_s(self, uid: str, situation: str | int) -> float:
        """Return the seconds since the rollout was first seen in this phase; 0 at first."""
        now_s = time.monotonic()
        before = self._since_s.get(uid)
        if before is None or before[0] != situation:
            before = self._since_s[uid] = (situation, now_s)
        return now_s - before[1]

    def forget(self, uid: str) -> None:
        """Forget a rollout that has ended."""
        self._since_s.pop(uid, None)


# --- Comparison on held rows ---
# Compares the answers of the old and the new version to the same held-out rows, before any traffic moves.


async def compared(
    store: ObjectStore,
    models: Models,
    deployment: Deployment,
    versions: tuple[ModelVersion, ModelVersion],
    comparison: Comparison,
) -> Compared:
    """Compare the old and the new version on the requested held-out rows.

    Raises the errors of `holdout_rows` and `Models.try_out`, and `FailedPrecondition` if both refuse every row.
    """
    signature = versions[0].signature
    assert signature is not None
    rows = await asyncio.to_thread(
        holdout_rows, store, comparison.dataset_version, comparison.split, comparison.max_rows, signature
    )
    comparing = _Comparing(models, deployment, versions, signature)
    for start, stop in pieces(len(rows), min(deployment.spec.max_batch_size, deployment.spec.max_queued_rows)):
        await comparing.add(rows.slice(start, stop))
    found = comparing.difference.result()
    if not found.rows:
        raise FailedPrecondition(
            f"both versions of {deployment.name} refuse all {found.refused} rows of split {comparison.split!r} of "
            f"{comparison.dataset_version}, one with: {comparing.refusal}",
            reason="NOTHING_TO_COMPARE",
            metadata={"resource": comparison.dataset_version},
        )
    return found


class _Comparing:
    """Compares two versions.

    `refusal` is the error of the last row that a version refused.
    """

    def __init__(
        self,
        models: Models,
        deployment: Deployment,
        versions: tuple[ModelVersion, ModelVersion],
        signature: Signature,
    ) -> None:
        self._models = models
        self._deployment = deployment
        self._versions = versions
        self._outputs = signature.outputs
        self.difference = Difference()
        self.refusal = ""

    async def add(self, rows: Rows) -> None:
        """Compare the answers to these rows, which must fit a queue and a batch.

        If a version refuses them, each half is tried: the answer to a row does not depend on the others in its batch.
        """
        old, new = [await self._answered(version, rows) for version in self._versions]
        if old is not None and new is not None:
            self.difference.add(self._outputs, old, new)
        elif len(rows) == 1:
            self.difference.add_refused(self._outputs, by_both=old is None and new is None)
        else:
            middle = len(rows) // 2
            await self.add(rows.slice(0, middle))
            await self.add(rows.slice(middle, len(rows)))

    async def _answered(self, version: ModelVersion, rows: Rows) -> Sequence[Array] | None:
        """Return the outputs; None if the version refuses one of the rows."""
        try:
            return await self._models.try_out(self._deployment, version, rows)
        except InvalidArgument as error:
            self.refusal = error.message
            return None


# --- Held rows ---
# Reads held-out rows of a dataset version, in the form that a model takes.


def holdout_rows(store: ObjectStore, version: str, split: str, most: int, signature: Signature) -> Rows:
    """Read the first `most` rows of the split.

    Rows are raw if the version has the columns of raw rows; otherwise they are the model's input, from a transformed
    version.

    Raises `NotFound`, `InvalidArgument` (the split), `DataLoss` and `FailedPrecondition` (it is not ACTIVE, its columns
    are not the model's, or it has no rows).
    """
    reader = VersionReader(store, load_version(store, version))
    schema = schema_of(reader.schema)
    form, tensors = _form(version, schema, signature)
    groups, rows = [], 0
    for group in reader.row_groups_from(split, 0):
        if rows >= most:
            break
        groups.append(group)
        rows += group.row_count
    if not rows:
        raise FailedPrecondition(f"split {split!r} of {version} has no rows", reason="NOTHING_TO_COMPARE")
    batch = batch_of(reader.read_many(groups, [spec.name for spec in tensors]).slice(0, most).combine_chunks())
    values: dict[str, Array] = {}
    nulls: dict[str, Array] = {}
    for spec in tensors:
        values[spec.name], where = values_of_column(schema[spec.name], batch[spec.name])
        if where.any():
            nulls[spec.name] = where
    return Rows(form, values, nulls)


def _form(version: str, schema: dict[str, ColumnType], signature: Signature) -> tuple[str, tuple[TensorSpec, ...]]:
    if all(_is(schema, spec) for spec in signature.raw):
        return RAW, signature.raw
    if signature.prepared is not None and _is(schema, signature.prepared):
        return PREPARED, (signature.prepared,)
    wanted = ", ".join(f"{spec.name} {spec}" for spec in signature.raw)
    raise FailedPrecondition(
        f"{version} does not have the columns that the model takes ({wanted}); compare on a version as it was ingested",
        reason="NOTHING_TO_COMPARE",
        metadata={"resource": version},
    )


def _is(schema: dict[str, ColumnType], spec: TensorSpec) -> bool:
    if spec.name not in schema:
        return False
    try:
        found = tensor_of_column(spec.name, schema[spec.name])
    except FailedPrecondition:  # a type that cannot be sent
        return False
    return (found.datatype, found.shape) == (spec.datatype, spec.shape)
