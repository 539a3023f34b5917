"""Deployments in the object store: one resource log each, below `deployments/{m}/log`."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence

from inference_service.domain.deployment import Deployment, ModelVersion, State, with_deletion
from shared import paging
from shared.checkpoint import users as checkpoint_users
from shared.dataset_version.users import mark_used, unmark
from shared.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, already_exists, not_found
from shared.log import Record, ResourceLog
from shared.storage import ObjectStore

logger = logging.getLogger(__name__)

ROOT = "deployments"
# Of the markers at dataset versions and checkpoints.
USER_KIND = "deployment"

Step = Callable[[Deployment], Deployment | None]


class Deployments:
    """Safe to call from several threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def create(self, wanted: Deployment) -> Deployment:
        """Makes it durable and returns it, or returns what is there if that came from the same `request_id`.

        Raises `AlreadyExists` where the id is taken. An id whose deployment is gone is free again.
        """

        def decide(record: Record | None) -> dict[str, object] | None:
            there = _deployment(record)
            if there is None or there.state is State.GONE:
                return wanted.as_record()
            if wanted.request_id and there.request_id == wanted.request_id:
                return None
            raise already_exists(wanted.name)

        made = _deployment(self._log(wanted.name).update(decide))
        assert made is not None
        return made

    def find(self, name: str) -> Deployment | None:
        """What the log says now, also of a deployment that is gone."""
        return _deployment(self._log(name).head())

    def follow(self, name: str) -> Callable[[], Deployment | None]:
        """What the log says at each call, at the cost of one read where nothing is new. Not for several threads."""
        log = self._log(name)
        return lambda: _deployment(log.head())

    def get(self, name: str) -> Deployment:
        """Raises `NotFound`."""
        found = self.find(name)
        if found is None or found.state is State.GONE:
            raise not_found(name)
        return found

    def exists(self, name: str) -> bool:
        found = self.find(name)
        return found is not None and found.state is not State.GONE

    def history(self, name: str, uid: str) -> Deployment | None:
        """The last known state of the deployment that had this uid, though its id may be another's by now."""
        return self._newest(name, lambda deployment: deployment.uid == uid)

    def made_by(self, name: str, request_id: str) -> Deployment | None:
        """The last known state of the deployment that this request created."""
        return self._newest(name, lambda deployment: deployment.request_id == request_id)

    def _newest(self, name: str, fits: Callable[[Deployment], bool]) -> Deployment | None:
        log = self._log(name)
        record = log.head()
        while record is not None:
            deployment = Deployment.from_record(record.state)
            if fits(deployment):
                return deployment
            record = log.read(record.number - 1)
        return None

    def page(self, size: int, token: str) -> tuple[list[Deployment], str]:
        """In the order of names; those that are gone are left out, so a page may be short."""
        names, next_token = paging.page(self._store.folders(ROOT), size, token)
        return [one for one in map(self._find_id, names) if one and one.state is not State.GONE], next_token

    def all(self) -> list[Deployment]:
        """Every deployment that is not gone."""
        found = map(self._find_id, self._store.folders(ROOT))
        return [one for one in found if one and one.state is not State.GONE]

    def delete(self, name: str, etag: str, now_s: float) -> Deployment:
        """Writes the wish. Raises `NotFound` and `Conflict`."""
        return self.wish(name, lambda before: with_deletion(before, name, etag, now_s))

    def wish(self, name: str, decide: Callable[[Deployment | None], Deployment | None]) -> Deployment:
        """Appends what `decide` makes of the newest state, and returns what is then the newest. Raises what it raises;
        where there is no such deployment, that must be something."""

        def appended(record: Record | None) -> dict[str, object] | None:
            after = decide(_deployment(record))
            return after.as_record() if after is not None else None

        newest = _deployment(self._log(name).update(appended))
        assert newest is not None
        return newest

    def transition(self, name: str, uid: str, step: Step) -> Deployment | None:
        """Appends what `step` makes of the newest state of the deployment with this uid; nothing where it returns None.

        Returns the newest state, None where the uid is no longer there.
        """

        def decide(record: Record | None) -> dict[str, object] | None:
            before = _deployment(record)
            after = step(before) if before is not None and before.uid == uid else None
            return after.as_record() if after is not None else None

        newest = _deployment(self._log(name).update(decide))
        return newest if newest is not None and newest.uid == uid else None

    def roll_out_made_by(self, name: str, request_id: str) -> Deployment | None:
        """The last known state of the deployment while the roll-out that this request began was its newest."""
        return self._newest(name, lambda one: one.roll_out is not None and one.roll_out.request_id == request_id)

    def roll_out(self, name: str, roll_out_uid: str) -> Deployment | None:
        """The same, by the roll-out's uid."""
        return self._newest(name, lambda one: one.roll_out is not None and one.roll_out.uid == roll_out_uid)

    def mark_datasets(self, deployment: Deployment, versions: Iterable[ModelVersion]) -> None:
        """Keeps the dataset versions that these loaded versions' models come from, until `release`.

        One that is gone already is no loss: a model that is served reads nothing of it.
        """
        for name in _dataset_versions(versions):
            try:
                mark_used(self._store, name, USER_KIND, deployment.uid, deployment.name, is_job=False)
            except (DataLoss, FailedPrecondition, InvalidArgument, NotFound) as error:
                logger.warning("%s: its dataset version cannot be kept: %s", deployment.name, error.message)

    def keep_checkpoints(self, deployment: Deployment, versions: Iterable[ModelVersion]) -> None:
        """Keeps the checkpoints of these versions until `release`; whoever wished for them has marked them
        already, unless the deployment is older than these marks."""
        for version in versions:
            named = checkpoint_users.keep(
                self._store,
                version.checkpoint,
                version.folder,
                USER_KIND,
                deployment.uid,
                deployment.name,
                ends_in=State.GONE,
            )
            if not named:
                logger.warning("%s: its job no longer names %s", deployment.name, version.checkpoint)

    def release(self, deployment: Deployment, versions: Sequence[ModelVersion]) -> None:
        """Lets the checkpoints and dataset versions of these versions go, but for those that others of the deployment
        come from, too. It is no error if they were not marked."""
        going = {version.number for version in versions}
        others = [version for version in deployment.versions if version.number not in going]
        for name in {*_dataset_versions(versions)} - {*_dataset_versions(others)}:
            unmark(self._store, name, USER_KIND, deployment.uid)
        for name in {version.checkpoint for version in versions} - {version.checkpoint for version in others}:
            checkpoint_users.release(self._store, name, USER_KIND, deployment.uid)

    def _find_id(self, deployment_id: str) -> Deployment | None:
        return self.find(f"{ROOT}/{deployment_id}")

    def _log(self, name: str) -> ResourceLog:
        return ResourceLog(self._store, f"{name}/log")


def _dataset_versions(versions: Iterable[ModelVersion]) -> list[str]:
    return sorted({version.dataset_version for version in versions if version.dataset_version})


def new_uid() -> str:
    return uuid.uuid4().hex


def _deployment(record: Record | None) -> Deployment | None:
    return Deployment.from_record(record.state) if record else None
