"""Deployments in the object store: one resource log each, below `deployments/{m}/log`."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from inference_service.domain.deployment import Deployment, ModelVersion, State, with_deletion
from shared import paging
from shared.checkpoint import users as checkpoint_users
from shared.dataset_version.version import mark_used, unmark
from shared.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, already_exists, not_found
from shared.log import Record, ResourceLog
from shared.storage import ObjectStore

logger = logging.getLogger(__name__)

ROOT = "deployments"
# Of the markers at dataset versions and checkpoints.
USER_KIND = "deployment"

Step = Callable[[Deployment], Deployment | None]


class Deployments:
    """Safe to call from several threads. Whatever reads a deployment raises `DataLoss` where its log cannot be read: a
    record is damaged, or was written by a later release."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def create(self, wanted: Deployment) -> Deployment:
        """Makes it durable and returns it, or returns what is there if that came from the same `request_id`.

        Raises `AlreadyExists` where the id is taken, and `NotFound` where the request's own deployment is gone. An id
        whose deployment is gone is free again for others.
        """

        def decide(record: Record | None) -> dict[str, object] | None:
            there = _deployment(wanted.name, record)
            if there is not None and wanted.request_id and there.request_id == wanted.request_id:
                check_not_gone(there)
                return None
            if there is None or there.state is State.GONE:
                return wanted.as_record()
            raise already_exists(wanted.name)

        made = _deployment(wanted.name, self._log(wanted.name).update(decide))
        assert made is not None
        return made

    def find(self, name: str) -> Deployment | None:
        """What the log says now, also of a deployment that is gone."""
        return _deployment(name, self._log(name).head())

    def follow(self, name: str) -> Callable[[], Deployment | None]:
        """What the log says at each call, at the cost of one read where nothing is new. Not for several threads."""
        log = self._log(name)
        return lambda: _deployment(name, log.head())

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
            deployment = _deployment(name, record)
            if deployment is not None and fits(deployment):
                return deployment
            record = log.read(record.number - 1)
        return None

    def page(self, size: int, token: str) -> tuple[list[Deployment], str]:
        """In the order of names; those that are gone, or whose log cannot be read, are left out, so a page may be
        short."""
        ids, next_token = paging.page(self._store.folders(ROOT), size, token)
        found, unreadable = self._read(ids)
        for error in unreadable.values():
            logger.error("left out of a list: %s", error.message)
        return found, next_token

    def all(self) -> tuple[list[Deployment], dict[str, DataLoss]]:
        """Every deployment that is not gone; and by name, why the logs of others cannot be read."""
        return self._read(self._store.folders(ROOT))

    def _read(self, ids: Iterable[str]) -> tuple[list[Deployment], dict[str, DataLoss]]:
        found: list[Deployment] = []
        unreadable: dict[str, DataLoss] = {}
        for name in (f"{ROOT}/{one}" for one in ids):
            try:
                deployment = self.find(name)
            except DataLoss as error:
                unreadable[name] = error
                continue
            if deployment is not None and deployment.state is not State.GONE:
                found.append(deployment)
        return found, unreadable

    def delete(self, name: str, etag: str, now_s: float) -> Deployment:
        """Writes the wish. Raises `NotFound` and `Conflict`."""
        return self.wish(name, lambda before: with_deletion(before, name, etag, now_s))

    def wish(self, name: str, decide: Callable[[Deployment | None], Deployment | None]) -> Deployment:
        """Appends what `decide` makes of the newest state, and returns what is then the newest. Raises what it raises;
        where there is no such deployment, that must be something."""

        def appended(record: Record | None) -> dict[str, object] | None:
            after = decide(_deployment(name, record))
            return after.as_record() if after is not None else None

        newest = _deployment(name, self._log(name).update(appended))
        assert newest is not None
        return newest

    def transition(self, name: str, uid: str, step: Step) -> Deployment | None:
        """Appends what `step` makes of the newest state of the deployment with this uid; nothing where it returns None.

        Returns the newest state, None where the uid is no longer there.
        """

        def decide(record: Record | None) -> dict[str, object] | None:
            before = _deployment(name, record)
            after = step(before) if before is not None and before.uid == uid else None
            return after.as_record() if after is not None else None

        newest = _deployment(name, self._log(name).update(decide))
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

    def _log(self, name: str) -> ResourceLog:
        return _Log(self._store, name)


class _Log(ResourceLog):
    """A deployment's."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        super().__init__(store, f"{name}/log")
        self._name = name

    def read(self, number: int) -> Record | None:
        with _reading(self._name):
            return super().read(number)


def _dataset_versions(versions: Iterable[ModelVersion]) -> list[str]:
    return sorted({version.dataset_version for version in versions if version.dataset_version})


def check_not_gone(made: Deployment) -> None:
    """Raises `NotFound` where what a request made was deleted since: its first answer cannot be given any more."""
    if made.state is State.GONE:
        made_it = f"request_id {made.request_id} made it, and it was deleted since"
        raise not_found(made.name, f"{made_it}; use a new UUID4")


def new_uid() -> str:
    return uuid.uuid4().hex


def _deployment(name: str, record: Record | None) -> Deployment | None:
    with _reading(name):
        return Deployment.from_record(record.state) if record else None


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Raises `DataLoss` for what bytes that are no record of ours raise; an outage of the store stays what it is."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataLoss(
            f"the log of {name} cannot be read: {type(error).__name__}: {error}; restore its newest record, or run the "
            "release that wrote it",
            reason="LOG_UNREADABLE",
            metadata={"resource": name},
        ) from error
