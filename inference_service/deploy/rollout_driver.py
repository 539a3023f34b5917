"""Takes rollouts from step to step, back when a limit is passed, and versions that have retired out of the logs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from inference_service.deploy.deployments import Deployments, Step
from inference_service.domain.batch_policy import pieces
from inference_service.domain.deployment import Deployment, ModelVersion, State, application_name
from inference_service.domain.rollout import Compared, Comparison, Difference, Rollout, RolloutState, falls_short
from inference_service.domain.rollout_transitions import (
    with_compared,
    with_next_step,
    with_retired_gone,
    with_traffic_back,
    with_unlike,
)
from inference_service.domain.signature import PREPARED, RAW, Rows, Signature, TensorSpec
from inference_service.domain.statistics import Seen, passed_limit
from inference_service.domain.tensors import Array
from inference_service.peers import Peers
from inference_service.serve.models import Models, find_version
from inference_service.serve.preprocessing import tensor_of_column, values_of_column
from inference_service.settings import InferenceSettings
from shared.dataset_version import VersionReader, load_version
from shared.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    MillraceError,
    ResourceExhausted,
    Unavailable,
)
from shared.storage import ObjectStore
from shared.telemetry import hidden
from shared.transforms.batch import batch_of
from shared.transforms.schema import ColumnType, schema_of

logger = logging.getLogger(__name__)


# --- Rollouts ---
# Takes roll-outs from step to step, back when a limit is passed, and versions that have retired out of the logs.
#
# It decides by what this process and its siblings have seen since they began; where a roll-out stands is in the log, so
# whichever process comes next goes on from there. Several may drive one roll-out: of those that take the same step, one
# does; of the front processes of one service only the first tries.


POLL_INTERVAL_S = 0.2


class Rollouts:
    """Lives on the event loop of `models`. `changed` is told each deployment whose log was written."""

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
        """Until cancelled."""
        while True:
            for deployment in self._models.deployments():
                if deployment.state is State.READY:
                    try:
                        await self.poll(deployment)
                    except Exception as error:  # one that cannot be helped now must not hold up the others
                        logger.warning("%s: %r; trying again", deployment.name, error)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def poll(self, deployment: Deployment) -> None:
        """One look at a READY deployment, and what follows from it."""
        due_s = time.time() - self._settings.retired_for_s
        going = [one for one in deployment.versions if one.retired_at is not None and one.retired_at < due_s]
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
        # One look in one situation: silence ends a step's time, and an answer the silence.
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
        """Before any traffic moves: gives up what takes too long, and compares what is to be compared."""
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
        """Whether the new version does, be it that it has had no replica for a moment."""
        version = find_version(deployment, rollout.version)
        return version is not None and self._models.answers(deployment, version)

    def _has_replicas(self, deployment: Deployment, rollout: Rollout) -> bool:
        """Whether the new version has any at this moment: without, no step is taken, which may be the last one."""
        version = find_version(deployment, rollout.version)
        return version is not None and self._models.replicas(deployment, version) != 0

    async def _back(self, deployment: Deployment, rollout: Rollout, error: MillraceError) -> None:
        logger.error("%s is rolled back: %s", deployment.name, error.message)
        await self._write(deployment, lambda before: with_traffic_back(before, rollout.uid, error, time.time()))

    async def _let_go(self, deployment: Deployment, going: Sequence[ModelVersion]) -> None:
        """All that are due at once: of two with the same checkpoint, each would keep the other's mark."""
        # The marks first: once no log names the versions, nobody would come back for them.
        await asyncio.to_thread(self._deployments.release, deployment, going)
        # One that was wished for meanwhile may be of the same checkpoint or dataset version, and has lost its mark. Any
        # that is wished for after this look is marked after it.
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
    """The versions that stay, be it that they were rolled back to meanwhile, and have the same checkpoint, or dataset
    version, as one of those that were to go."""
    numbers, shared = {version.number for version in going}, {getattr(version, field) for version in going}
    stay = [one for one in newest.versions if one.number not in numbers or one.retired_at is None]
    return [one for one in stay if getattr(one, field) in shared]


def _compared_versions(deployment: Deployment, rollout: Rollout) -> tuple[ModelVersion, ModelVersion]:
    """The old one and the new one."""
    by_number = {version.number: version for version in deployment.versions}
    return by_number[rollout.main], by_number[rollout.version]


# --- Watching ---
# For how long this process itself has watched a roll-out in one situation: what nobody watched says nothing.

# What a roll-out waits for before any traffic moves, and when its version has lost its replicas; otherwise its step.
PREPARING = "PREPARING"
UNRESPONSIVE = "SILENT"


class PhaseTimer:
    """Begins anew with each process, and each time that the situation is another than at the last look."""

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[str | int, float]] = {}  # by uid

    def lasts_s(self, uid: str, situation: str | int) -> float:
        """Seconds since it was first seen in this situation; 0 at the first look."""
        now_s = time.monotonic()
        before = self._since_s.get(uid)
        if before is None or before[0] != situation:
            before = self._since_s[uid] = (situation, now_s)
        return now_s - before[1]

    def forget(self, uid: str) -> None:
        """After it has ended."""
        self._since_s.pop(uid, None)


# --- Comparison on held rows ---
# What the old and the new version of a roll-out answer to the same held rows, before any traffic moves.


async def compared(
    store: ObjectStore,
    models: Models,
    deployment: Deployment,
    versions: tuple[ModelVersion, ModelVersion],
    wanted: Comparison,
) -> Compared:
    """How the old and the new one of `versions` differ on the held rows that are `wanted`.

    Raises as `holdout_rows` and `Models.try_out`, and `FailedPrecondition` where both refuse every row.
    """
    signature = versions[0].signature
    assert signature is not None
    rows = await asyncio.to_thread(
        holdout_rows, store, wanted.dataset_version, wanted.split, wanted.max_rows, signature
    )
    comparing = _Comparing(models, deployment, versions, signature)
    for start, stop in pieces(len(rows), min(deployment.spec.max_batch_size, deployment.spec.max_queued_rows)):
        await comparing.add(rows.slice(start, stop))
    found = comparing.difference.told()
    if not found.rows:
        raise FailedPrecondition(
            f"both versions of {deployment.name} refuse all {found.refused} rows of split {wanted.split!r} of "
            f"{wanted.dataset_version}, one with: {comparing.refusal}",
            reason="NOTHING_TO_COMPARE",
            metadata={"resource": wanted.dataset_version},
        )
    return found


class _Comparing:
    """`refusal` is what was wrong with the last row that a version refused."""

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
        """As many as a queue and a batch have room for. Of those with a row that is refused each half is tried: a row
        is answered alike in any company."""
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
        """None where it refuses one of them."""
        try:
            return await self._models.try_out(self._deployment, version, rows)
        except InvalidArgument as error:
            self.refusal = error.message
            return None


# --- Held rows ---
# Rows of a dataset version, in the form in which a model takes them.


def holdout_rows(store: ObjectStore, version: str, split: str, most: int, signature: Signature) -> Rows:
    """The first `most` rows of the split, raw where the version has the columns that raw rows are made of, else the
    model's input itself, of a version that was transformed.

    Raises `NotFound`, `InvalidArgument` (the split), `DataLoss` and `FailedPrecondition` (it is not ACTIVE, its columns
    are not what the model takes, or it has no rows).
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
    if _is(schema, signature.prepared):
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
