"""What this process can answer at this moment: the deployments as last read, and a batcher for each version loaded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inference_service.batcher import Batcher
from inference_service.domain.deployment import Deployment, ModelVersion, State
from inference_service.domain.routing import choose_version, find_version
from inference_service.domain.signature import Signature, TensorSpec, outputs_wanted, rows_of
from inference_service.domain.tensors import Array, WireTensor
from shared.errors import NotFound, Unavailable, invalid_field, not_found

MAX_SHOWN_NAME = 100


@dataclass(frozen=True)
class Answer:
    """The outputs that were asked for, and who gave them."""

    deployment: Deployment
    version: ModelVersion
    outputs: list[tuple[TensorSpec, Array]]


class Models:
    """Read by the servicers, kept up to date by the reconciler; all on one event loop."""

    def __init__(self) -> None:
        self._deployments: dict[str, Deployment] | None = None
        self._puts: list[Deployment] = []
        self._batchers: dict[str, Batcher] = {}

    async def infer(
        self,
        model_name: str,
        model_version: str,
        inputs: Sequence[WireTensor],
        requested: Sequence[str],
        remaining_s: float | None,
    ) -> Answer:
        """`remaining_s` is the caller's time left, None for no deadline.

        Raises `NotFound`, `InvalidArgument` naming the tensor, `Unavailable`, `ResourceExhausted`, `DeadlineExceeded`.
        """
        deployment = self._find(model_name)
        version = choose_version(deployment, model_version, random.random())
        signature = _signature(deployment, version)
        wanted = outputs_wanted(signature, requested)
        rows = rows_of(signature, inputs, deployment.spec.max_queued_rows)
        outputs = await self._batcher(deployment, version).submit(rows, remaining_s)
        by_name = {spec.name: array for spec, array in zip(signature.outputs, outputs, strict=True)}
        return Answer(deployment, version, [(spec, by_name[spec.name]) for spec in wanted])

    def signature(self, model_name: str, model_version: str) -> tuple[Deployment, Signature]:
        """What a model takes and gives. Raises `NotFound`, and `Unavailable` while it is not READY."""
        deployment = self._find(model_name, "name")
        version = choose_version(deployment, model_version, 0.0)
        return deployment, _signature(deployment, version)

    def is_ready(self, model_name: str, model_version: str) -> bool:
        """Whether a request that names this would be answered. Raises `InvalidArgument` for an empty name."""
        try:
            deployment = self._find(model_name, "name")
        except (NotFound, Unavailable):
            return False
        version = find_version(deployment, model_version)
        return version is not None and self._answers(deployment, version)

    def all_ready(self) -> bool:
        """Whether the logs have been read, and every deployment that they call READY answers."""
        return self._deployments is not None and all(
            self._answers(deployment, version)
            for deployment in self._deployments.values()
            if deployment.state is State.READY
            for version in deployment.versions
        )

    def begin_reading(self) -> None:
        """Before the logs are read for `replace`: what is `put` from here on may be newer than what is read."""
        self._puts = []

    def replace(self, deployments: Iterable[Deployment]) -> None:
        """Takes over what the logs said."""
        self._deployments = {one.model_name: one for one in (*deployments, *self._puts)}

    def put(self, deployment: Deployment) -> None:
        """Takes over one deployment whose log was written just now."""
        self._puts.append(deployment)
        if self._deployments is not None:
            self._deployments[deployment.model_name] = deployment

    def has_batcher(self, application: str) -> bool:
        return application in self._batchers

    def attach(self, application: str, batcher: Batcher) -> None:
        self._batchers[application] = batcher

    def detach(self, application: str) -> Batcher | None:
        return self._batchers.pop(application, None)

    def close(self, why: str) -> None:
        """Refuses all requests that come from now on."""
        for batcher in self._batchers.values():
            batcher.close(why)

    def _find(self, model_name: str, field: str = "model_name") -> Deployment:
        if not model_name:
            raise invalid_field(field, model_name, "name the model, which is the deployment's id")
        if self._deployments is None:
            raise Unavailable("the service is starting; try again", reason="STARTING", retry_after_s=1.0)
        found = self._deployments.get(model_name)
        if found is None:
            raise not_found(f"model {model_name[:MAX_SHOWN_NAME]!r}")
        return found

    def _answers(self, deployment: Deployment, version: ModelVersion) -> bool:
        return deployment.state is State.READY and application_name(deployment, version) in self._batchers

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


def _signature(deployment: Deployment, version: ModelVersion) -> Signature:
    if version.signature is None:
        raise Unavailable(f"{deployment.name} is loading", reason="MODEL_NOT_READY", retry_after_s=1.0)
    return version.signature
