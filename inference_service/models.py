"""What this process can answer at this moment: the deployments as last read, and a batcher for each version loaded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from inference_service.batcher import Batcher
from inference_service.domain.absences import LOST_AFTER_S, Absences
from inference_service.domain.classification import check_classifiable
from inference_service.domain.deployment import Deployment, ModelVersion, State
from inference_service.domain.held_bytes import HeldBytes
from inference_service.domain.load import Load
from inference_service.domain.request_parameters import DEFAULT_PRIORITY, PRIORITY_LEVELS, RequestedOutput
from inference_service.domain.routing import choose_version, find_version, no_version, weighed_answering
from inference_service.domain.rows import Rows
from inference_service.domain.signature import Signature, TensorSpec, check_answer_fits, outputs_wanted, rows_of
from inference_service.domain.statistics import Statistics
from inference_service.domain.tensors import Array, WireTensor
from inference_service.domain.traffic import Shadow
from inference_service.shadowing import Shadowing
from shared.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable, invalid_field, not_found
from shared.grpc_server.server import MAX_MESSAGE_BYTES

MAX_SHOWN_NAME = 100
# Of the outputs alone: beside them an answer has names and parameters.
MAX_OUTPUT_BYTES = MAX_MESSAGE_BYTES - 64 * 1024


@dataclass(frozen=True)
class Answer:
    """The outputs that were asked for, of so many `rows`, and who gave them. The batcher had the request for `model_s`;
    `input_s` and `infer_s` are how long its batches were preprocessed and computed."""

    deployment: Deployment
    version: ModelVersion
    outputs: list[tuple[TensorSpec, Array]]
    rows: int
    model_s: float
    input_s: float
    infer_s: float


@dataclass(frozen=True)
class Listed:
    """A version as it is at this moment."""

    deployment: Deployment
    version: ModelVersion
    answers: bool
    statistics: Statistics
    queued_rows: int
    replicas: int | None


class Models:
    """Read by the servicers, kept up to date by the reconciler; all on one event loop.

    `unchosen` counts the requests that no version was found for, or looked for; `written`, the logs that this process
    has written.
    """

    def __init__(self, lost_after_s: float = LOST_AFTER_S, held: HeldBytes | None = None) -> None:
        self._deployments: dict[str, Deployment] | None = None
        self._puts: list[Deployment] = []
        self._batchers: dict[str, Batcher] = {}
        self._statistics: dict[str, Statistics] = {}
        self._replicas: Mapping[str, int] | None = None
        self._absences = Absences(lost_after_s)
        self._changed = asyncio.Event()
        self._held = held or HeldBytes()
        self._shadowing = Shadowing(self._held)
        self._asked_last: tuple[Batcher, int] | None = None
        self.unchosen = Statistics()
        self.written = 0

    def choose(
        self, model_name: str, model_version: str, headers: Callable[[], Mapping[str, str]] = dict
    ) -> tuple[Deployment, ModelVersion]:
        """The version that answers a request; it is chosen for each anew. `headers` is called if it matters.

        Raises `InvalidArgument` (no name), `NotFound`, `Unavailable` and `FailedPrecondition`.
        """
        deployment = self._find(model_name)
        return deployment, choose_version(
            deployment, model_version, random.random(), lambda version: self.answers(deployment, version), headers
        )

    async def infer(
        self,
        deployment: Deployment,
        version: ModelVersion,
        inputs: Sequence[WireTensor],
        requested: Sequence[RequestedOutput],
        remaining_s: float | None,
        priority: int = DEFAULT_PRIORITY,
    ) -> Answer:
        """The outputs themselves, also where a classification of them is `requested`.

        `remaining_s` is the caller's time left, None for no deadline.
        Raises `InvalidArgument` naming the tensor, or `outputs` that no answer has room for, `Unavailable`,
        `ResourceExhausted` (the model's queue is full, or this process's memory), `DeadlineExceeded`.
        """
        signature = _signature(deployment, version)
        wanted = outputs_wanted(signature, [output.name for output in requested])
        check_classifiable(wanted, requested)
        rows = rows_of(signature, inputs, deployment.spec.max_queued_rows)
        del inputs  # what bytes objects were cut from need not wait with them
        if len(rows) * signature.answer_row_bytes > MAX_OUTPUT_BYTES:
            check_answer_fits(_unclassified(wanted, requested), len(rows), MAX_OUTPUT_BYTES)
        began_s = time.perf_counter()
        batcher = self._batcher(deployment, version)
        try:
            self._held.take(rows.size_bytes)
        except ResourceExhausted:
            batcher.missed(len(rows))
            raise
        try:
            if deployment.shadow is not None:
                self._shadow(deployment, version, deployment.shadow, rows, batcher)
            self._asked_last = batcher, len(rows)
            outputs = await batcher.submit(rows, remaining_s, priority)
        finally:
            self._held.give_back(rows.size_bytes)
        by_name = {spec.name: array for spec, array in zip(signature.outputs, outputs.arrays, strict=True)}
        return Answer(
            deployment,
            version,
            [(spec, by_name[spec.name]) for spec in wanted],
            rows=len(rows),
            model_s=time.perf_counter() - began_s,
            input_s=outputs.input_s,
            infer_s=outputs.infer_s,
        )

    def turned_away(self) -> None:
        """Counts a request that was refused before anybody read for which model it is. Those that scale are told of as
        many as they get of the others: each is taken for one like the last that was read."""
        self.unchosen.failed(status="RESOURCE_EXHAUSTED", now_s=time.time(), total_s=0.0)
        if self._asked_last is not None:
            batcher, rows = self._asked_last
            batcher.missed(rows)

    def deployments(self) -> list[Deployment]:
        """As last read; none before that."""
        return [*(self._deployments or {}).values()]

    async def try_out(self, deployment: Deployment, version: ModelVersion, rows: Rows) -> Sequence[Array]:
        """A version's outputs, in the order of its signature, of rows that nobody asked for: in batches of their own,
        and counted as none. Raises as `infer`."""
        return (await self._batcher(deployment, version).apart().submit(rows, None, PRIORITY_LEVELS)).arrays

    def signature(self, model_name: str, model_version: str) -> tuple[Deployment, ModelVersion, Signature]:
        """What a model takes and gives. Raises `NotFound`, and `Unavailable` while it is not READY."""
        deployment = self._find(model_name, "name")
        version = choose_version(deployment, model_version, 0.0)
        return deployment, version, _signature(deployment, version)

    def statistics(self, deployment: Deployment, version: ModelVersion) -> Statistics:
        """Of a version, from the first time that it is asked for until its deployment is gone."""
        name = application_name(deployment, version)
        found = self._statistics.get(name)
        if found is None:  # not setdefault alone, which would make one for every request
            # Another thread may have made one since: the first one made is kept.
            found = self._statistics.setdefault(name, Statistics())
        return found

    def listed(self) -> Iterator[Listed]:
        """Every version of every deployment, by name. Nothing before the logs are read."""
        for _, deployment in sorted((self._deployments or {}).items()):
            yield from self._listed(deployment)

    def listed_of(self, model_name: str, model_version: str) -> list[Listed]:
        """The versions that are meant: without a name all, without a version all of that name.

        Raises `InvalidArgument`, `NotFound` and `Unavailable`.
        """
        if self._deployments is None:
            raise _starting()
        if not model_name:
            if model_version:
                raise invalid_field("name", model_name, "name the model whose version is meant")
            return list(self.listed())
        deployment = self._find(model_name, "name")
        found = [one for one in self._listed(deployment) if model_version in ("", one.version.number)]
        if not found:
            raise no_version(deployment, model_version)
        return found

    async def wait_until_ready(self, model_name: str) -> None:
        """Returns once it answers.

        Raises `InvalidArgument` (no name), `Unavailable`, and `NotFound` or `FailedPrecondition` where it never will.
        """
        while True:
            changed = self._changed
            try:
                deployment = self._find(model_name)
            except NotFound as error:
                raise not_found(error.metadata["resource"], "CreateDeployment makes it, of a checkpoint") from None
            if deployment.state in (State.FAILED, State.UNLOADED, State.DELETING, State.GONE):
                why = f": {deployment.error['message']}" if deployment.error else ""
                unloaded = deployment.state is State.UNLOADED
                raise FailedPrecondition(
                    f"{deployment.name} is {deployment.state}{why}; "
                    + ("somebody else unloaded it: load it again" if unloaded else "delete it, and create it anew"),
                    reason="MODEL_NOT_READY",
                    metadata={"resource": deployment.name, "state": str(deployment.state)},
                )
            if self._all_answer(deployment):
                return
            await changed.wait()

    def is_ready(self, model_name: str, model_version: str) -> bool:
        """Whether a request that names this would be answered. Raises `InvalidArgument` for an empty name."""
        try:
            deployment = self._find(model_name, "name")
        except (NotFound, Unavailable):
            return False
        if not model_version:
            return bool(weighed_answering(deployment, lambda one: self.answers(deployment, one)))
        version = find_version(deployment, model_version)
        return version is not None and self.answers(deployment, version)

    def all_ready(self) -> bool:
        """Whether the logs have been read, and every deployment that they call READY answers."""
        return self._deployments is not None and all(
            self._all_answer(deployment) for deployment in self._deployments.values() if deployment.state is State.READY
        )

    def begin_reading(self) -> None:
        """Before the logs are read for `replace`: what is `put` from here on may be newer than what is read."""
        self._puts = []

    def replace(self, deployments: Iterable[Deployment]) -> None:
        """Takes over what the logs said."""
        read: dict[str, Deployment] = {}
        for one in (*deployments, *self._puts):
            _take_over(read, one)
        self._deployments = read  # at once: other threads read it
        there = {application_name(one, version) for one in read.values() for version in one.versions}
        for name in list(self._statistics):
            if name not in there:
                del self._statistics[name]
        self._tell()

    def put(self, deployment: Deployment) -> None:
        """Takes over one deployment whose log was written just now."""
        self.written += 1
        self._puts.append(deployment)
        if self._deployments is not None:
            _take_over(self._deployments, deployment)
        self._tell()

    def scaled(self, replicas: Mapping[str, int]) -> None:
        """Takes over how many replicas run now, by application; batchers fill those that there are. One that has none
        keeps its batcher: what comes, where no other version answers, waits in there for a replica that comes back."""
        self._replicas = replicas
        for name, batcher in self._batchers.items():
            batcher.scale(replicas.get(name, 0))
        self._absences.read(self._batchers, replicas, time.monotonic())
        self._tell()

    def replicas(self, deployment: Deployment, version: ModelVersion) -> int | None:
        """That run now; None before anybody told."""
        return None if self._replicas is None else self._replicas.get(application_name(deployment, version), 0)

    def load_of(self, application: str) -> Load | None:
        """What it had to do since this was last asked; None where it does not answer."""
        batcher = self._batchers.get(application)
        return batcher.load() if batcher is not None else None

    def attached(self) -> list[str]:
        """The applications that requests are sent to."""
        return list(self._batchers)

    def has_batcher(self, application: str) -> bool:
        return application in self._batchers

    def attach(self, application: str, batcher: Batcher) -> None:
        self._batchers[application] = batcher
        self._tell()

    def detach(self, application: str) -> Batcher | None:
        return self._batchers.pop(application, None)

    def close(self, why: str) -> None:
        """Refuses all requests that come from now on."""
        for batcher in self._batchers.values():
            batcher.close(why)

    def _shadow(
        self, deployment: Deployment, version: ModelVersion, shadow: Shadow, rows: Rows, batcher: Batcher
    ) -> None:
        """Sends a copy on, if this request is one of those that the shadow is to get."""
        target = find_version(deployment, shadow.version)
        # One with traffic of its own would have copies and real requests in the same batches.
        if target is None or target.weight or target.number == version.number or target.signature != version.signature:
            return
        if random.random() * 100 < shadow.percent:
            other = self._batchers.get(application_name(deployment, target))
            self._shadowing.copy(rows, batcher, other, self.statistics(deployment, target))

    def _find(self, model_name: str, field: str = "model_name") -> Deployment:
        if not model_name:
            raise invalid_field(field, model_name, "name the model, which is the deployment's id")
        if self._deployments is None:
            raise _starting()
        found = self._deployments.get(model_name)
        if found is None:
            raise not_found(f"model {model_name[:MAX_SHOWN_NAME]!r}")
        return found

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

    def _tell(self) -> None:
        """Wakes whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _all_answer(self, deployment: Deployment) -> bool:
        """Whether every version with traffic does; another may be loading, or on its way out."""
        return all(self.answers(deployment, version) for version in deployment.versions if version.weight)

    def answers(self, deployment: Deployment, version: ModelVersion) -> bool:
        """Whether a request that names this version is answered now; for a moment, it may have no replica."""
        name = application_name(deployment, version)
        return deployment.state is State.READY and name in self._batchers and name not in self._absences.lost

    def _batcher(self, deployment: Deployment, version: ModelVersion) -> Batcher:
        batcher = self._batchers.get(application_name(deployment, version))
        if batcher is None:
            raise Unavailable(
                f"{deployment.name} is being loaded again; try again", reason="MODEL_NOT_READY", retry_after_s=1.0
            )
        return batcher


def application_name(deployment: Deployment, version: ModelVersion) -> str:
    """The Ray Serve application of one version. The uid keeps a deployment from meeting its namesake's replicas."""
    return f"{deployment.uid}-v{version.number}"


def _take_over(deployments: dict[str, Deployment], newest: Deployment) -> None:
    there = deployments.get(newest.model_name)
    if there is not None and there.uid == newest.uid and there.update_time > newest.update_time:
        return  # two wrote, and the first came back last
    if newest.state is not State.GONE:
        deployments[newest.model_name] = newest
    elif there is not None and there.uid == newest.uid:
        del deployments[newest.model_name]


def _unclassified(wanted: Sequence[TensorSpec], requested: Sequence[RequestedOutput]) -> Sequence[TensorSpec]:
    """Those that are sent as they are; `wanted` are those `requested`, or all."""
    return [spec for spec, asked in zip(wanted, requested, strict=True) if not asked.top] if requested else wanted


def _starting() -> Unavailable:
    return Unavailable("the service is starting; try again", reason="STARTING", retry_after_s=1.0)


def _signature(deployment: Deployment, version: ModelVersion) -> Signature:
    if version.signature is None:
        raise Unavailable(f"{deployment.name} is loading", reason="MODEL_NOT_READY", retry_after_s=1.0)
    return version.signature
