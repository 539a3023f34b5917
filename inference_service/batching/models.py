"""What this process can answer at this moment: the deployments as last read, and a batcher for each version loaded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from inference_service.batching.batcher import Batcher
from inference_service.domain.absences import LOST_AFTER_S, Absences
from inference_service.domain.applications import application_name
from inference_service.domain.catalog import Catalog, starting
from inference_service.domain.deployment import Deployment, ModelVersion, State
from inference_service.domain.request_parameters import PRIORITY_LEVELS
from inference_service.domain.routing import choose_version, find_version, no_version, signature_of, weighed_answering
from inference_service.domain.rows import Rows
from inference_service.domain.signature import Signature
from inference_service.domain.statistics import Statistics
from inference_service.domain.tensors import Array
from shared.errors import FailedPrecondition, NotFound, Unavailable, invalid_field, not_found


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

    def __init__(self, lost_after_s: float = LOST_AFTER_S) -> None:
        self._catalog = Catalog()
        self._batchers: dict[str, Batcher] = {}
        self._statistics: dict[str, Statistics] = {}
        self._replicas: Mapping[str, int] | None = None
        self._absences = Absences(lost_after_s)
        self._changed = asyncio.Event()
        self.unchosen = Statistics()
        self.written = 0

    def choose(
        self, model_name: str, model_version: str, headers: Callable[[], Mapping[str, str]] = dict
    ) -> tuple[Deployment, ModelVersion]:
        """The version that answers a request; it is chosen for each anew. `headers` is called if it matters.

        Raises `InvalidArgument` (no name), `NotFound`, `Unavailable` and `FailedPrecondition`.
        """
        deployment = self._catalog.find(model_name)
        return deployment, choose_version(
            deployment, model_version, random.random(), lambda version: self.answers(deployment, version), headers
        )

    def deployments(self) -> list[Deployment]:
        """As last read; none before that."""
        return self._catalog.deployments()

    async def try_out(self, deployment: Deployment, version: ModelVersion, rows: Rows) -> Sequence[Array]:
        """A version's outputs, in the order of its signature, of rows that nobody asked for: in batches of their own,
        counted as none, and sent once no request waits for the version. Raises as `batcher` and `Batcher.submit`."""
        batcher = self.batcher(deployment, version)
        await batcher.emptied()
        return (await batcher.apart().submit(rows, None, PRIORITY_LEVELS)).arrays

    def signature(self, model_name: str, model_version: str) -> tuple[Deployment, ModelVersion, Signature]:
        """What a model takes and gives. Raises `NotFound`, and `Unavailable` while it is not READY."""
        deployment = self._catalog.find(model_name, "name")
        version = choose_version(deployment, model_version, 0.0)
        return deployment, version, signature_of(deployment, version)

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
        for deployment in sorted(self._catalog.deployments(), key=lambda one: one.model_name):
            yield from self._listed(deployment)

    def listed_of(self, model_name: str, model_version: str) -> list[Listed]:
        """The versions that are meant: without a name all, without a version all of that name.

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
        """Returns once it answers.

        Raises `InvalidArgument` (no name), `Unavailable`, and `NotFound` or `FailedPrecondition` where it never will.
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
                    + ("somebody else unloaded it: load it again" if unloaded else "delete it, and create it anew"),
                    reason="MODEL_NOT_READY",
                    metadata={"resource": deployment.name, "state": str(deployment.state)},
                )
            if self._all_answer(deployment):
                return
            await changed.wait()

    def answers(self, deployment: Deployment, version: ModelVersion) -> bool:
        """Whether a request that names this version is answered now; for a moment, it may have no replica."""
        name = application_name(deployment, version)
        return deployment.state is State.READY and name in self._batchers and name not in self._absences.lost

    def is_ready(self, model_name: str, model_version: str) -> bool:
        """Whether a request that names this would be answered. Raises `InvalidArgument` for an empty name."""
        try:
            deployment = self._catalog.find(model_name, "name")
        except (NotFound, Unavailable):
            return False
        if not model_version:
            return bool(weighed_answering(deployment, lambda one: self.answers(deployment, one)))
        version = find_version(deployment, model_version)
        return version is not None and self.answers(deployment, version)

    def all_ready(self) -> bool:
        """Whether the logs have been read, and every deployment that they call READY answers."""
        return self._catalog.is_read and all(
            self._all_answer(deployment) for deployment in self.deployments() if deployment.state is State.READY
        )

    def begin_reading(self) -> None:
        """Before the logs are read for `replace`: what is `put` from here on may be newer than what is read."""
        self._catalog.begin_reading()

    def replace(self, deployments: Iterable[Deployment]) -> None:
        """Takes over what the logs said."""
        self._catalog.replace(deployments)
        there = {application_name(one, version) for one in self.deployments() for version in one.versions}
        for name in list(self._statistics):
            if name not in there:
                del self._statistics[name]
        self._tell()

    def put(self, deployment: Deployment) -> None:
        """Takes over one deployment whose log was written just now."""
        self.written += 1
        self._catalog.put(deployment)
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

    def attached(self) -> list[str]:
        """The applications that requests are sent to."""
        return list(self._batchers)

    def find_batcher(self, application: str) -> Batcher | None:
        return self._batchers.get(application)

    def batcher(self, deployment: Deployment, version: ModelVersion) -> Batcher:
        """Raises `Unavailable` where the version has none."""
        batcher = self._batchers.get(application_name(deployment, version))
        if batcher is None:
            raise Unavailable(
                f"{deployment.name} is being loaded again; try again", reason="MODEL_NOT_READY", retry_after_s=1.0
            )
        return batcher

    def least_s(self, deployment: Deployment, rows: int) -> float:
        """What so many rows take the fastest of its versions at the least; 0 where one is not known yet."""
        attached = (self._batchers.get(application_name(deployment, version)) for version in deployment.versions)
        return min((batcher.computing_s(rows) for batcher in attached if batcher), default=0.0)

    def attach(self, application: str, batcher: Batcher) -> None:
        self._batchers[application] = batcher
        self._tell()

    def detach(self, application: str) -> Batcher | None:
        return self._batchers.pop(application, None)

    def close(self, why: str) -> None:
        """Refuses all requests that come from now on."""
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

    def _tell(self) -> None:
        """Wakes whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _all_answer(self, deployment: Deployment) -> bool:
        """Whether every version with traffic does; another may be loading, or on its way out."""
        return all(self.answers(deployment, version) for version in deployment.versions if version.weight)
