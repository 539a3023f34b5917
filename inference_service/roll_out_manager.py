"""Clients' wishes about roll-outs: checks, the checkpoint that a name means, and the record that makes them durable."""

from __future__ import annotations

import time

from inference_service.domain.deployment import Deployment, State, checked
from inference_service.domain.roll_out import RollOut, RollOutState, RollOutWish
from inference_service.domain.rolling import begun, check_can_begin, next_number, with_change, with_roll_back
from inference_service.domain.traffic import TrafficChange
from inference_service.manager import FIELD, SERVICE, version_of
from inference_service.operations import DeploymentOperations, roll_out_operation_name
from inference_service.registry import USER_KIND, Deployments, new_uid
from shared import names
from shared.checkpoint import CheckpointEntry, resolve
from shared.checkpoint.users import release, using
from shared.errors import Conflict, MillraceError
from shared.requests import OUTCOME_UNKNOWN, claimed
from shared.storage import ObjectStore


class RollOutManager:
    """Blocking; safe to call from several threads."""

    def __init__(self, store: ObjectStore, deployments: Deployments, operations: DeploymentOperations) -> None:
        self._store = store
        self._deployments = deployments
        self._operations = operations

    def begin(self, wish: RollOutWish) -> Deployment:
        """The deployment with the durable roll-out, LOADING; for a `request_id` seen before, what its first call made.

        Raises `InvalidArgument`, `NotFound`, `FailedPrecondition`, `Conflict` (the etag) and `AlreadyExists` (the
        `request_id` was used with another body).
        """
        names.parse("name", wish.name, "deployments/{m}")
        request_id = names.check_request_id("request_id", wish.request_id)
        if wish.validate_only:
            there = self._checked(wish)
            entry = resolve(self._store, FIELD, wish.plan.checkpoint)
            return _begun(there, wish, request_id, new_uid(), entry)
        with claimed(self._store, SERVICE, request_id, wish.digest, wish.name) as claim:
            if claim.repeated and (made := self._deployments.roll_out_made_by(wish.name, request_id)):
                return made
            return self._begin(self._checked(wish), wish, request_id)

    def back(self, name: str, etag: str) -> Deployment:
        """Raises `InvalidArgument`, `NotFound`, `FailedPrecondition` and `Conflict`."""
        names.parse("name", name, "deployments/{m}")
        return self._deployments.wish(name, lambda before: with_roll_back(before, name, etag, time.time()))

    def change(self, name: str, change: TrafficChange, etag: str) -> Deployment:
        """Raises `InvalidArgument`, `NotFound`, `FailedPrecondition` and `Conflict`."""
        names.parse("deployment.name", name, "deployments/{m}")
        return self._deployments.wish(name, lambda before: with_change(before, name, change, etag, time.time()))

    def _checked(self, wish: RollOutWish) -> Deployment:
        there = checked(self._deployments.find(wish.name), wish.name, wish.etag)
        check_can_begin(there)
        return there

    def _begin(self, there: Deployment, wish: RollOutWish, request_id: str) -> Deployment:
        uid = new_uid()
        refusal = None

        def decide(before: Deployment | None) -> Deployment:
            found = checked(before, wish.name, wish.etag)
            if found.uid != there.uid:
                raise Conflict(f"{wish.name} was deleted and created anew meanwhile; read it again")
            return _begun(found, wish, request_id, uid, entry)

        with using(
            self._store, FIELD, wish.plan.checkpoint, USER_KIND, there.uid, wish.name, ends_in=State.GONE
        ) as entry:
            # The pointer first: an operation that was answered must be found, whatever dies in between.
            self._operations.record_roll_out(roll_out_operation_name(uid), there)
            try:
                return self._deployments.wish(wish.name, decide)
            except MillraceError as error:
                if isinstance(error, OUTCOME_UNKNOWN):
                    raise
                refusal = error
        # Not left to `using`: another version of the deployment may be of the same checkpoint, under the same mark.
        newest = self._deployments.history(wish.name, there.uid)
        if newest is None or entry.name not in {version.checkpoint for version in newest.versions}:
            release(self._store, entry.name, USER_KIND, there.uid)
        raise refusal


def _begun(there: Deployment, wish: RollOutWish, request_id: str, uid: str, entry: CheckpointEntry) -> Deployment:
    check_can_begin(there)
    now_s = time.time()
    version = version_of(entry, next_number(there))
    roll_out = RollOut(
        uid=uid,
        request_id=request_id,
        operation=roll_out_operation_name(uid),
        plan=wish.plan,
        state=RollOutState.LOADING,
        version=version.number,
        before={},
        create_time=now_s,
    )
    return begun(there, version, roll_out, now_s)
