"""The transitions of a deployment during a rollout.

They are functions from one value to the next; None means no change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from inference_service.domain.deployment import (
    ALL_TRAFFIC,
    Deployment,
    ModelVersion,
    State,
    TrafficChange,
    checked,
    with_failure,
    with_loaded,
)
from inference_service.domain.rollout import Compared, Rollout, RolloutState
from inference_service.domain.signature import Signature
from shared.errors import Cancelled, FailedPrecondition, MillraceError, invalid_fields


def shares(weights: Mapping[str, int], total: int) -> dict[str, int]:
    """Divide `total` in proportion to the weights, in whole numbers.

    At least one weight is not 0. The remainder goes to those that lost most by rounding down; of equal ones, the first.
    """
    whole = sum(weights.values())
    shared = {number: total * weight // whole for number, weight in weights.items()}
    by_loss = sorted(weights, key=lambda number: -(total * weights[number] % whole))
    for number in by_loss[: total - sum(shared.values())]:
        shared[number] += 1
    return shared


def check_can_begin(deployment: Deployment, what: str = "a rollout can begin") -> None:
    """Raise `FailedPrecondition` unless the deployment is READY, without a running rollout.

    `what` names the refused action in the error.
    """
    if deployment.state is not State.READY:
        raise FailedPrecondition(
            f"{deployment.name} is {deployment.state}; only when it is READY {what}",
            reason="DEPLOYMENT_NOT_READY",
            metadata={"resource": deployment.name, "state": str(deployment.state)},
        )
    if deployment.rollout is not None and deployment.rollout.under_way:
        raise FailedPrecondition(
            f"{deployment.name} is rolling out version {deployment.rollout.version}; wait for "
            f"{deployment.rollout.operation}, or call Rollback",
            reason="ROLLOUT_IN_PROGRESS",
            metadata={"resource": deployment.name, "operation": deployment.rollout.operation},
        )


def next_number(deployment: Deployment) -> str:
    return str(deployment.numbers_used + 1)


def begun(deployment: Deployment, version: ModelVersion, rollout: Rollout, now_s: float) -> Deployment:
    """Return the deployment with a new rollout of `version`, which has the next number.

    `rollout.before` becomes the present weights. Raises the errors of `check_can_begin`.
    """
    check_can_begin(deployment)
    return replace(
        deployment,
        versions=(*deployment.versions, replace(version, weight=0)),
        rollout=replace(rollout, before=_weights(deployment.versions)),
        numbers_used=int(version.number),
        generation=deployment.generation + 1,
        update_time=now_s,
    )


def with_version_loaded(deployment: Deployment, loaded: ModelVersion, now_s: float) -> Deployment | None:
    """Return the deployment after a version was loaded, with its signature.

    The first version makes the deployment READY. A rollout's version gets the traffic of the first step, or is
    compared first if the plan has a comparison. If clients of the old version could not use it, it ends the rollout.
    """
    rollout = deployment.rollout
    if rollout is None or rollout.version != loaded.number or rollout.state is not RolloutState.LOADING:
        return with_loaded(deployment, loaded, now_s)
    known = _changed(deployment, {loaded.number: loaded}, now_s)
    old = next((version.signature for version in deployment.versions if rollout.before.get(version.number)), None)
    if not rollout.plan.allow_new_signature and old is not None and not _serves_alike(old, loaded.signature):
        error = FailedPrecondition(
            f"version {loaded.number} of {deployment.name} does not take and give what the old one does: "
            f"{_signature_text(loaded.signature)} instead of {_signature_text(old)}; to roll it out all the same "
            "set allow_new_signature",
            reason="NEW_SIGNATURE",
            metadata={"resource": deployment.name, "model_version": loaded.number},
        )
        return with_traffic_back(known, rollout.uid, error, now_s)
    if rollout.plan.comparison is not None:
        return replace(known, rollout=replace(rollout, state=RolloutState.COMPARING))
    return _shifted(known, _first_step(rollout, now_s), now_s)


def with_compared(deployment: Deployment, uid: str, compared: Compared, now_s: float) -> Deployment | None:
    """Return the deployment at the first step, after the versions agreed enough."""
    rollout = deployment.rollout
    if rollout is None or (rollout.uid, rollout.state) != (uid, RolloutState.COMPARING):
        return None
    return _shifted(deployment, replace(_first_step(rollout, now_s), compared=compared), now_s)


def with_unlike(
    deployment: Deployment, uid: str, compared: Compared, error: MillraceError, now_s: float
) -> Deployment | None:
    """Return the deployment rolled back, after the versions differed too much."""
    after = with_traffic_back(deployment, uid, error, now_s)
    if after is None or after.rollout is None:
        return None
    return replace(after, rollout=replace(after.rollout, compared=compared))


def with_version_failed(deployment: Deployment, number: str, error: MillraceError, now_s: float) -> Deployment | None:
    """Return the deployment after a version failed to load for good.

    The first version fails the deployment, a rollout's version ends the rollout. Any other version was loaded before,
    and is tried again.
    """
    rollout = deployment.rollout
    if rollout is not None and rollout.version == number and rollout.under_way:
        return with_traffic_back(deployment, rollout.uid, error, now_s)
    return with_failure(deployment, error, now_s)


def with_next_step(deployment: Deployment, uid: str, step: int, now_s: float) -> Deployment | None:
    """Return the deployment after `step` of that rollout: at the next step, or done after the last."""
    rollout = deployment.rollout
    if rollout is None or (rollout.uid, rollout.state, rollout.step) != (uid, RolloutState.SHIFTING, step):
        return None
    if step + 1 < len(rollout.plan.steps):
        return _shifted(deployment, replace(rollout, step=step + 1, step_time=now_s), now_s)
    after = replace(deployment, rollout=rollout.ended(RolloutState.SUCCEEDED, now_s), update_time=now_s)
    return with_policy_applied(after, now_s)


def with_traffic_back(deployment: Deployment, uid: str, error: MillraceError, now_s: float) -> Deployment | None:
    """Return the deployment after that rollout was ended early.

    The old versions get their traffic back, and the new one is retired.
    """
    rollout = deployment.rollout
    if deployment.state is not State.READY or rollout is None or rollout.uid != uid or not rollout.under_way:
        return None
    return _undone(deployment, rollout, RolloutState.ROLLED_BACK, now_s, error)


def with_rollback(deployment: Deployment | None, name: str, etag: str, now_s: float) -> Deployment | None:
    """Return the deployment as before the newest rollout, on a client's request; None if it is so already.

    Raises `NotFound`, `Conflict` and `FailedPrecondition` (there is nothing to go back to, or no longer).
    """
    there = checked(deployment, name, etag)
    rollout = there.rollout
    if there.state is not State.READY or rollout is None:
        raise FailedPrecondition(
            f"{name} is {there.state}" if there.state is not State.READY else f"{name} had no rollout yet",
            reason="NOTHING_TO_ROLL_BACK",
            metadata={"resource": name},
        )
    if rollout.state in (RolloutState.ROLLED_BACK, RolloutState.UNDONE):
        return None
    requested = replace(there, generation=there.generation + 1)
    if rollout.under_way:
        error = Cancelled(f"the rollout of version {rollout.version} was rolled back on request", reason="ROLLED_BACK")
        return _undone(requested, rollout, RolloutState.ROLLED_BACK, now_s, error)
    there_still = {version.number for version in there.versions}
    missing = [number for number, weight in rollout.before.items() if weight and number not in there_still]
    if missing:
        raise FailedPrecondition(
            f"{name}: version {', '.join(missing)} is no longer loaded; roll its checkpoint out again, and let the "
            "version policy keep the latest two to be able to go back at once",
            reason="VERSION_NOT_LOADED",
            metadata={"resource": name, "model_version": missing[0]},
        )
    # A retired version is answered by every process until the log no longer names it.
    back = {one.number: replace(one, retired_at=None) for one in there.versions if rollout.before.get(one.number)}
    return _undone(_changed(requested, back, now_s), rollout, RolloutState.UNDONE, now_s, None)


def with_policy_applied(deployment: Deployment, now_s: float) -> Deployment:
    """Retire versions that have no traffic, are in no rollout and are not kept by the policy."""
    there = [version.number for version in deployment.versions if version.retired_at is None]
    kept = {*deployment.spec.version_policy.keeps(there)}
    if deployment.rollout is not None and deployment.rollout.under_way:
        kept |= {deployment.rollout.version, *deployment.rollout.before}
    going = {
        version.number: replace(version, retired_at=now_s)
        for version in deployment.versions
        if not version.weight and version.number not in kept and version.retired_at is None
    }
    after = _changed(deployment, going, now_s)
    left = {version.number for version in after.versions if version.retired_at is None}
    return replace(
        after,
        routes=tuple(route for route in after.routes if route.version in left),
        shadow=after.shadow if after.shadow is not None and after.shadow.version in left else None,
    )


def with_change(deployment: Deployment | None, name: str, change: TrafficChange, etag: str, now_s: float) -> Deployment:
    """Return the deployment with a client's change of traffic and version policy.

    Versions that the policy now keeps stay, even if the rollout has just retired them.

    Raises `NotFound`, `Conflict`, `InvalidArgument` (a version that does not exist, or is not loaded) and
    `FailedPrecondition` (it is not READY; or the weights were changed during a rollout, which controls them).
    """
    there = checked(deployment, name, etag)
    if there.state is not State.READY or change.weights is not None:
        check_can_begin(there, "its traffic can be changed")
    loaded = {version.number for version in there.versions if version.signature and version.retired_at is None}
    named = [
        *((f"weights[{number}]", number) for number in change.weights or ()),
        *((f"routes[{place}].version", route.version) for place, route in enumerate(change.routes or ())),
        *([("shadow.version", change.shadow.version)] if change.shadow and change.shadow.percent else []),
    ]
    problems: list[tuple[str, object, str]] = [
        (f"deployment.traffic.{field}", number, f"use a version that is loaded: {', '.join(sorted(loaded, key=int))}")
        for field, number in named
        if number not in loaded
    ]
    if problems:
        raise invalid_fields(problems)
    after = replace(there, generation=there.generation + 1)
    if change.weights is not None:
        after = _weighed(after, change.weights, now_s)
    if change.routes is not None:
        after = replace(after, routes=change.routes)
    if change.shadow is not None:
        after = replace(after, shadow=change.shadow if change.shadow.percent else None)
    if change.policy is not None:
        after = _kept_again(replace(after, spec=replace(after.spec, version_policy=change.policy)), now_s)
    return with_policy_applied(after, now_s)


def with_retired_gone(deployment: Deployment, numbers: Collection[str], now_s: float) -> Deployment | None:
    """Return the deployment without these retired versions, once no process can use them."""
    left = tuple(
        version for version in deployment.versions if version.number not in numbers or version.retired_at is None
    )
    if deployment.state is not State.READY or left == deployment.versions:
        return None
    return replace(deployment, versions=left, update_time=now_s)


def _kept_again(deployment: Deployment, now_s: float) -> Deployment:
    """Return the deployment with the old versions that its policy keeps restored.

    The end of the newest rollout may have retired them, since a policy that was requested with the rollout may arrive
    after its end.
    """
    rollout = deployment.rollout
    if rollout is None or rollout.state is not RolloutState.SUCCEEDED:
        return deployment
    there = [
        version.number
        for version in deployment.versions
        if version.retired_at is None or version.number in rollout.before
    ]
    kept = deployment.spec.version_policy.keeps(there)
    back = {one.number: replace(one, retired_at=None) for one in deployment.versions if one.number in kept}
    return _changed(deployment, back, now_s)


def _first_step(rollout: Rollout, now_s: float) -> Rollout:
    return replace(rollout, state=RolloutState.SHIFTING, step=0, step_time=now_s)


def _shifted(deployment: Deployment, rollout: Rollout, now_s: float) -> Deployment:
    """Return the deployment with the traffic of the rollout's present step."""
    percent = rollout.present.percent
    weights = {**shares(rollout.before, ALL_TRAFFIC - percent), rollout.version: percent}
    return replace(_weighed(deployment, weights, now_s), rollout=rollout)


def _undone(
    deployment: Deployment, rollout: Rollout, state: RolloutState, now_s: float, error: MillraceError | None
) -> Deployment:
    after = _weighed(deployment, rollout.before, now_s)
    after = replace(after, rollout=rollout.ended(state, now_s, error))
    going = {
        version.number: replace(version, retired_at=now_s)
        for version in after.versions
        if version.number == rollout.version
    }
    return with_policy_applied(_changed(after, going, now_s), now_s)


def _weights(versions: Iterable[ModelVersion]) -> dict[str, int]:
    return {version.number: version.weight for version in versions if version.retired_at is None}


def _weighed(deployment: Deployment, weights: Mapping[str, int], now_s: float) -> Deployment:
    """Return the deployment with these weights; versions without a weight get no traffic."""
    changed = {
        version.number: replace(version, weight=weights.get(version.number, 0)) for version in deployment.versions
    }
    return _changed(deployment, changed, now_s)


def _changed(deployment: Deployment, versions: Mapping[str, ModelVersion], now_s: float) -> Deployment:
    replaced = tuple(versions.get(version.number, version) for version in deployment.versions)
    return replace(deployment, versions=replaced, update_time=now_s)


def _serves_alike(old: Signature, new: Signature | None) -> bool:
    """Return whether the new version serves clients of the old: it may offer more, but not less."""
    return old == new and new is not None and len(old.offered) <= len(new.offered)


def _signature_text(signature: Signature | None) -> str:
    if signature is None:
        return "nothing"
    given, made = (
        ", ".join(f"{tensor.name} {tensor.datatype}{list(tensor.shape)}" for tensor in tensors)
        for tensors in (signature.raw, signature.offered)
    )
    return f"{given} → {made}"
