"""The models that this process serves at this moment.

The deployments as last read, the choice of the version that answers a request, and a batcher for each loaded version.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from inference_service.domain.deployment import Deployment, ModelVersion, State, application_name, routed
from inference_service.domain.signature import PRIORITY_LEVELS, Array, Rows, Signature, TensorSpec
from inference_service.domain.statistics import Statistics
from inference_service.serve.batcher import Batcher
from shared.errors import FailedPrecondition, NotFound, Unavailable, invalid_field, not_found

# --- Absences ---
# Detects applications that have lost all their replicas, whose requests would wait for an unknown time.
#
# Applications that get a replica back within seconds do not count, nor those that Serve's controller does not know for
# a moment after its own restart.

# An application is lost if readings that lie at least so many seconds apart, and all between them, found no replica.
LOST_AFTER_S = 3.0


class LossDetector:
    """Detects lost applications; `lost` is as of the last reading.

    Times are seconds on one clock.
    """

    def __init__(self, lost_after_s: float = LOST_AFTER_S) -> None:
        self._lost_after_s = lost_after_s
        self._since_s: dict[str, float] = {}
        self.lost: frozenset[str] = frozenset()

    def read(self, applications: Iterable[str], replicas: Mapping[str, int], now_s: float) -> None:
        """Record the running replicas of each application; a missing one has none."""
        self._since_s = {name: self._since_s.get(name, now_s) for name in applications if not replicas.get(name, 0)}
        self.lost = frozenset(name for name, since_s in self._since_s.items() if now_s - since_s >= self._lost_after_s)


# --- Models ---


@dataclass(frozen=True)
class Listed:
    """The present state of a version."""

    deployment: Deployment
    version: ModelVersion
    answers: bool
    statistics: Statistics
    queued_rows: int
    replicas: int | None


@dataclass(frozen=True)
class Answer:
    """The requested outputs of `rows` rows, and the version that computed them.

    `model_s` is the time in the batcher; `input_s` and `infer_s` are the preprocessing and compute times of its
    batches.
    """

    deployment: Deployment
    version: ModelVersion
    outputs: list[tuple[TensorSpec, Array]]
    rows: int
    model_s: float
    input_s: float
    infer_s: float


class Models:
    """Holds the models: read by the servicers, updated by the reconciler.

    All on one event loop. `unchosen` counts the requests for which no version was found or looked up; `written` counts
    the logs that this process has written.
    """

    def __init__(self, lost_after_s: float = LOST_AFTER_S) -> None:
        self._catalog = Catalog()
        self._batchers: dict[str, Batcher] = {}
        self._statistics: dict[str, Statistics] = {}
        self._replicas: Mapping[str, int] | None = None
        self._loss_detector = LossDetector(lost_after_s)
        self._changed = asyncio.Event()
        self.unchosen = Statistics()
        self.written = 0

    def choose(
        self, model_name: str, model_version: str, headers: Callable[[], Mapping[str, str]] = dict
    ) -> tuple[Deployment, ModelVersion]:
        """Choose the version that answers a request, anew for each request.

        `headers` is called only if routes need it. Raises `InvalidArgument` (no name), `NotFound`, `Unavailable` and
        `FailedPrecondition`.
        """
        deployment = self._catalog.find(model_name)
        return deployment, choose_version(
            deployment, model_version, random.random(), lambda version: self.answers(deployment, version), headers
        )

    def deployments(self) -> list[Deployment]:
        """Return the deployments as last read; none before that."""
        return self._catalog.deployments()

    async def try_out(self, deployment: Deployment, version: ModelVersion, rows: Rows) -> Sequence[Array]:
        """Return a version's outputs for rows that belong to no request.

        The outputs are in the order of its signature. The rows get batches of their own, which the statistics do not
        count, and are sent once no request waits for the version. Raises the errors of `batcher` and `Batcher.submit`.
        """
        batcher = self.batcher(deployment, version)
        await batcher.emptied()
        return (await batcher.background().submit(rows, None, PRIORITY_LEVELS)).arrays

    def signature(self, model_name: str, model_version: str) -> tuple[Deployment, ModelVersion, Signature]:
        """Return a model's signature.

        Raises `NotFound`, and `Unavailable` while it is not READY.
        """
        deployment = self._catalog.find(model_name, "name")
        version = choose_version(deployment, model_version, 0.0)
        return deployment, version, signature_of(deployment, version)

    def statistics(self, deployment: Deployment, version: ModelVersion) -> Statistics:
        """Return the statistics of a version.

        They live from the first call until the deployment is deleted.
        """
        name = application_name(deployment, version)
        found = self._statistics.get(name)
        if found is None:  # setdefault alone would create one for every request
            # Another thread may have created one since: the first one is kept.
            found = self._statistics.setdefault(name, Statistics())
        return found

    def listed(self) -> Iterator[Listed]:
        """Yield every version of every deployment, by name; nothing before the logs are read."""
        for deployment in sorted(self._catalog.deployments(), key=lambda one: one.model_name):
            yield from self._listed(deployment)

    def listed_of(self, model_name: str, model_version: str) -> list[Listed]:
        """Return the selected versions: without a name all, without a version all of that name.

        Raises `InvalidArgument`, `NotFound` and `Unavailable`.
        """
        if not self._catalog.is_read:
            raise starting()
        if not model_name:
            if model_version:
                raise invalid_field("name", model_name, "name the model whose version is meant")
            return list(self.listed())
        deployment = self._catalog.find(model_name, "name")
        found = [one for one in self._listed(deployment) if model_version in ("", one.version.number)]
        if not found:
            raise no_version(deployment, model_version)
        return found

    async def wait_until_ready(self, model_name: str) -> None:
        """Wait until the model answers.

        Raises `InvalidArgument` (no name), `Unavailable`, and `NotFound` or `FailedPrecondition` if it never will.
        """
        while True:
            changed = self._changed
            try:
                deployment = self._catalog.find(model_name)
            except NotFound as error:
                raise not_found(error.metadata["resource"], "CreateDeployment makes it, of a checkpoint") from None
            if deployment.state in (State.FAILED, State.UNLOADED, State.DELETING, State.GONE):
                why = f": {deployment.error['message']}" if deployment.error else ""
                unloaded = deployment.state is State.UNLOADED
                raise FailedPrecondition(
                    f"{deployment.name} is {deployment.state}{why}; "
                    + ("another client unloaded it: load it again" if unloaded else "delete it, and create it anew"),
                    reason="MODEL_NOT_READY",
                    metadata={"resource": deployment.name, "state": str(deployment.state)},
                )
            if self._all_answer(deployment):
                return
            await changed.wait()

    def answers(self, deployment: Deployment, version: ModelVersion) -> bool:
        """Return whether a request that names this version is answered now.

        The version may have no replica for a moment.
        """
        name = application_name(deployment, version)
        return deployment.state is State.READY and name in self._batchers and name not in self._loss_detector.lost

    def is_ready(self, model_name: str, model_version: str) -> bool:
        """Return whether a request that names this would be answered.

        Raises `InvalidArgument` for an empty name.
        """
        try:
            deployment = self._catalog.find(model_name, "name")
        except (NotFound, Unavailable):
            return False
        if not model_version:
            return bool(weighed_answering(deployment, lambda one: self.answers(deployment, one)))
        version = find_version(deployment, model_version)
        return version is not None and self.answers(deployment, version)

    def all_ready(self) -> bool:
        """Return whether the logs have been read, and every READY deployment answers."""
        return self._catalog.is_read and all(
            self._all_answer(deployment) for deployment in self.deployments() if deployment.state is State.READY
        )

    def begin_reading(self) -> None:
        """Mark the start of a read for `replace`.

        Deployments that are `put` after this may be newer than those read.
        """
        self._catalog.begin_reading()

    def replace(self, deployments: Iterable[Deployment]) -> None:
        """Replace the deployments by those in the logs."""
        self._catalog.replace(deployments)
        there = {
            application_name(deployment, version)
            for deployment in self.deployments()
            for version in deployment.versions
        }
        for name in list(self._statistics):
            if name not in there:
                del self._statistics[name]
        self._wake_waiters()

    def put(self, deployment: Deployment) -> None:
        """Update one deployment whose log was just written."""
        self.written += 1
        self._catalog.put(deployment)
        self._wake_waiters()

    def scaled(self, replicas: Mapping[str, int]) -> None:
        """Update the number of running replicas, by application.

        A version without replicas keeps its batcher: if no other version answers, requests wait there for a replica to
        come back.
        """
        self._replicas = replicas
        for name, batcher in self._batchers.items():
            batcher.scale(replicas.get(name, 0))
        self._loss_detector.read(self._batchers, replicas, time.monotonic())
        self._wake_waiters()

    def replicas(self, deployment: Deployment, version: ModelVersion) -> int | None:
        """Return the running replicas; None before the first `scaled`."""
        return None if self._replicas is None else self._replicas.get(application_name(deployment, version), 0)

    def attached(self) -> list[str]:
        """Return the applications that requests are sent to."""
        return list(self._batchers)

    def find_batcher(self, application: str) -> Batcher | None:
        return self._batchers.get(application)

    def batcher(self, deployment: Deployment, version: ModelVersion) -> Batcher:
        """Return the version's batcher; raise `Unavailable` if it has none."""
        batcher = self._batchers.get(application_name(deployment, version))
        if batcher is None:
            raise Unavailable(
                f"{deployment.name} is being loaded again; try again", reason="MODEL_NOT_READY", retry_after_s=1.0
            )
        return batcher

    def min_s(self, deployment: Deployment, rows: int) -> float:
        """Return the compute time of `rows` rows on the fastest version, in seconds.

        0 if one of them has no measurement.
        """
        attached = (self._batchers.get(application_name(deployment, version)) for version in deployment.versions)
        return min((batcher.computing_s(rows) for batcher in attached if batcher), default=0.0)

    def attach(self, application: str, batcher: Batcher) -> None:
        self._batchers[application] = batcher
        self._wake_waiters()

    def detach(self, application: str) -> Batcher | None:
        return self._batchers.pop(application, None)

    def close(self, why: str) -> None:
        """Refuse all further requests."""
        for batcher in self._batchers.values():
            batcher.close(why)

    def _listed(self, deployment: Deployment) -> Iterator[Listed]:
        for version in deployment.versions:
            batcher = self._batchers.get(application_name(deployment, version))
            yield Listed(
                deployment,
                version,
                self.answers(deployment, version),
                self.statistics(deployment, version),
                batcher.queued_rows if batcher else 0,
                self.replicas(deployment, version),
            )

    def _wake_waiters(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _all_answer(self, deployment: Deployment) -> bool:
        """Return whether every version with traffic answers.

        Versions without traffic may be loading or draining.
        """
        return all(self.answers(deployment, version) for version in deployment.versions if version.weight)


# --- Routing ---


def find_version(deployment: Deployment, wanted: str) -> ModelVersion | None:
    """Return the version with that number, in any state.

    Without a number, returns the one with the most traffic.
    """
    if wanted:
        return next((version for version in deployment.versions if version.number == wanted), None)
    return max(deployment.versions, key=lambda version: (version.weight, int(version.number)))


def choose_version(
    deployment: Deployment,
    wanted: str,
    draw: float,
    answers: Callable[[ModelVersion], bool] = lambda _: True,
    headers: Callable[[], Mapping[str, str]] = dict,
) -> ModelVersion:
    """Choose the version that answers a request.

    A named version comes first, then one that a header routes to. Otherwise `draw` in [0, 1) chooses by weight among
    the versions for which `answers` is true. If there is none, the versions with traffic before the present rollout
    are used. `headers` is called only if routes need it.

    Raises `NotFound` (no such version), `FailedPrecondition` (the deployment failed, or is unloaded: a retry does not
    help) and `Unavailable` (it is loading or being deleted).
    """
    if wanted and find_version(deployment, wanted) is None:
        raise no_version(deployment, wanted)
    if deployment.state is not State.READY:
        lasts = deployment.state in (State.FAILED, State.UNLOADED)
        kind = FailedPrecondition if lasts else Unavailable
        remedy = "; RepositoryModelLoad loads it again" if deployment.state is State.UNLOADED else ""
        raise kind(
            f"{deployment.name} is {deployment.state}, not READY{remedy}",
            reason="MODEL_NOT_READY",
            metadata={"resource": deployment.name, "state": str(deployment.state)},
        )
    if wanted:
        found = find_version(deployment, wanted)
        assert found is not None
        return found
    if deployment.routes:
        for number in routed(deployment.routes, headers()):
            found = find_version(deployment, number)
            if found is not None and answers(found):
                return found
    weights = {version.number: version.weight for version in deployment.versions}
    return _by_weight(weighed_answering(deployment, answers) or _weighed(deployment, weights), draw)


def weighed_answering(
    deployment: Deployment, answers: Callable[[ModelVersion], bool]
) -> list[tuple[ModelVersion, int]]:
    """Return the answering versions for requests without a version, with their weights."""
    rollout = deployment.rollout
    before = rollout.before if rollout is not None and rollout.under_way else {}
    for weights in ({version.number: version.weight for version in deployment.versions}, before):
        found = [(version, weight) for version, weight in _weighed(deployment, weights) if answers(version)]
        if found:
            return found
    return []


def no_version(deployment: Deployment, wanted: str) -> NotFound:
    numbers = ", ".join(version.number for version in deployment.versions)
    return NotFound(
        f"{deployment.name} has no version {wanted[:100]!r}; it has {numbers}",
        metadata={"resource": deployment.name, "model_version": wanted[:100]},
    )


def signature_of(deployment: Deployment, version: ModelVersion) -> Signature:
    """Return the version's signature; raise `Unavailable` until it is loaded."""
    if version.signature is None:
        raise Unavailable(f"{deployment.name} is loading", reason="MODEL_NOT_READY", retry_after_s=1.0)
    return version.signature


def _weighed(deployment: Deployment, weights: Mapping[str, int]) -> list[tuple[ModelVersion, int]]:
    return [(version, weights[version.number]) for version in deployment.versions if weights.get(version.number)]


def _by_weight(weighed: Sequence[tuple[ModelVersion, int]], draw: float) -> ModelVersion:
    point = draw * sum(weight for _, weight in weighed)
    for version, weight in weighed:
        point -= weight
        if point < 0:
            return version
    return weighed[-1][0]


# --- Catalog ---
# The deployments as last read from their logs, with this process's own writes since.

MAX_SHOWN_NAME = 100


class Catalog:
    """The known deployments.

    Changed on one event loop, and read from any thread.
    """

    def __init__(self) -> None:
        self._deployments: dict[str, Deployment] | None = None
        self._puts: list[Deployment] = []

    @property
    def is_read(self) -> bool:
        """Whether the logs have been read at all."""
        return self._deployments is not None

    def deployments(self) -> list[Deployment]:
        """Return the deployments; none before the logs are read."""
        return [*(self._deployments or {}).values()]

    def find(self, model_name: str, field: str = "model_name") -> Deployment:
        """Return the deployment of a model.

        Raises `InvalidArgument` naming the `field` (no name), `NotFound`, and `Unavailable` before the logs are read.
        """
        if not model_name:
            raise invalid_field(field, model_name, "name the model, which is the deployment's id")
        if self._deployments is None:
            raise starting()
        found = self._deployments.get(model_name)
        if found is None:
            raise not_found(f"model {model_name[:MAX_SHOWN_NAME]!r}")
        return found

    def begin_reading(self) -> None:
        """Mark the start of a read for `replace`.

        Deployments that are `put` after this may be newer than those read.
        """
        self._puts = []

    def replace(self, deployments: Iterable[Deployment]) -> None:
        """Replace the deployments by those in the logs."""
        read: dict[str, Deployment] = {}
        for one in (*deployments, *self._puts):
            _take_over(read, one)
        self._deployments = read  # one assignment, since other threads read it

    def put(self, deployment: Deployment) -> None:
        """Update one deployment whose log was just written."""
        self._puts.append(deployment)
        if self._deployments is not None:
            _take_over(self._deployments, deployment)


def starting() -> Unavailable:
    """Return the error for requests before the logs are read."""
    return Unavailable("the service is starting; try again", reason="STARTING", retry_after_s=1.0)


def _take_over(deployments: dict[str, Deployment], newest: Deployment) -> None:
    there = deployments.get(newest.model_name)
    if there is not None and there.uid == newest.uid and there.update_time > newest.update_time:
        return  # two processes wrote, and the earlier write was seen last
    if newest.state is not State.GONE:
        deployments[newest.model_name] = newest
    elif there is not None and there.uid == newest.uid:
        del deployments[newest.model_name]
