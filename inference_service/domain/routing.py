"""Which version of a model answers a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from inference_service.domain.deployment import Deployment, ModelVersion, State
from inference_service.domain.signature import Signature
from inference_service.domain.traffic import routed
from shared.errors import FailedPrecondition, NotFound, Unavailable


def find_version(deployment: Deployment, wanted: str) -> ModelVersion | None:
    """The version with that number, in whatever state; without a number the one with the most traffic."""
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
    """The version that answers: the one that is named, or that a header leads to; otherwise `draw` in [0, 1) shares out
    by weight among those that can answer now, `answers`. While none of those can, the versions that had the traffic
    before a roll-out that is under way do. `headers` is called if it matters.

    Raises `NotFound` (no such version), `FailedPrecondition` (the deployment failed, or is unloaded: trying again is no
    use) and `Unavailable` (it is loading or going).
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
    """The versions that answer requests which name none now, with their weights; empty where there is none."""
    roll_out = deployment.roll_out
    before = roll_out.before if roll_out is not None and roll_out.under_way else {}
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
    """What the version takes and gives. Raises `Unavailable` until it has been loaded."""
    if version.signature is None:
        raise Unavailable(f"{deployment.name} is loading", reason="MODEL_NOT_READY", retry_after_s=1.0)
    return version.signature


def _weighed(deployment: Deployment, weights: Mapping[str, int]) -> list[tuple[ModelVersion, int]]:
    return [(one, weights[one.number]) for one in deployment.versions if weights.get(one.number)]


def _by_weight(weighed: Sequence[tuple[ModelVersion, int]], draw: float) -> ModelVersion:
    point = draw * sum(weight for _, weight in weighed)
    for version, weight in weighed:
        point -= weight
        if point < 0:
            return version
    return weighed[-1][0]
