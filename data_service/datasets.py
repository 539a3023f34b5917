"""The datasets in the store, each a resource log below `datasets/{d}/log`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import replace
from typing import Any

from data_service.domain.dataset import Dataset, Retention, changed, check_fields, check_mask, check_retention
from shared import names
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import Conflict, FailedPrecondition, already_exists, not_found
from shared.jobs import JobRecord, Jobs
from shared.jobs.index import JobIndex
from shared.log import ResourceLog, claimed
from shared.storage import ObjectStore

# The service that these request ids belong to.
SERVICE = "data"
PATTERN = "datasets/{d}"
NO_RETENTION = Retention()
# The number of versions that an error lists.
SHOWN_VERSIONS = 5


class Datasets:
    """Datasets. Without an `index` of versions, and until it has all of them, `version_names` reads each one's log."""

    def __init__(self, store: ObjectStore, index: JobIndex | None = None) -> None:
        self._store = store
        self._index = index

    def create(
        self,
        dataset_id: str,
        *,
        display_name: str,
        description: str,
        request_id: str,
        body_sha256: str,
        validate_only: bool,
        retention: Retention = NO_RETENTION,
    ) -> Dataset:
        """Creates a dataset; raises `InvalidArgument` and `AlreadyExists`."""
        check_fields(dataset_id, display_name, description)
        check_retention(retention)
        request_id = names.check_request_id("request_id", request_id)
        dataset = Dataset(
            name=f"datasets/{dataset_id}",
            uid="" if validate_only else uuid.uuid4().hex,
            display_name=display_name,
            description=description,
            create_time=time.time(),
            request_id=request_id,
            retention=retention,
        )
        if validate_only:
            if self.find(dataset.name):
                raise already_exists(dataset.name)
            return dataset
        with claimed(self._store, SERVICE, request_id, body_sha256, dataset.name):
            return self._append(dataset)

    def get(self, name: str, field: str = "name") -> Dataset:
        """Returns a dataset; raises `InvalidArgument` naming `field`, and `NotFound`."""
        names.parse(field, name, PATTERN)
        dataset = self.find(name)
        if dataset is None:
            raise not_found(name)
        return dataset

    def find(self, name: str) -> Dataset | None:
        """Returns a dataset; None if it never existed or was deleted."""
        found = self.newest(name)
        return None if found is None or found.deleted else found

    def list(self, page_size: int, page_token: str) -> tuple[list[Dataset], str]:
        """Returns one page in the order of names, and the token of the next."""
        found, next_token = names.page(self._store.folders("datasets"), page_size, page_token)
        datasets = [self.find(f"datasets/{one}") for one in found]
        return [dataset for dataset in datasets if dataset], next_token

    def update(self, name: str, etag: str, mask: Iterable[str], **values: Any) -> Dataset:
        """Changes those of `display_name`, `description` and `retention` that the mask names; all three if it is empty.

        Raises `InvalidArgument`, `NotFound`, and `Conflict` if `etag` is given and not the present one.
        """
        names.parse("dataset.name", name, PATTERN)
        changes = {path: values[path] for path in check_mask(mask)}
        return self._transition(name, lambda dataset: changed(_expected(dataset, etag), changes))

    def delete(
        self,
        name: str,
        etag: str,
        *,
        check_uploads: Callable[[str, str], None],
        delete_uploads: Callable[[str, str], None],
    ) -> None:
        """Deletes a dataset by a tombstone in its log.

        Calls `check_uploads` with the dataset's name and uid before, and `delete_uploads` after it.

        Raises `InvalidArgument`, `NotFound`, `Conflict` if `etag` is given and not the present one, the errors of
        `check_uploads`, and `FailedPrecondition` naming the existing versions. A version that is created at the same
        time is either seen here, or its creator sees the tombstone: see `check_still_there`.
        """
        names.parse("name", name, PATTERN)
        dataset = _expected(self.get(name), etag)
        _refuse_with_versions(name, self.version_names(name))
        check_uploads(name, dataset.uid)

        def bury(newest: Dataset) -> Dataset:
            if newest.uid != dataset.uid:
                raise not_found(name, "it was deleted meanwhile, and made anew")
            return replace(_expected(newest, etag), deleted=True, generation=newest.generation + 1)

        self._transition(name, bury)
        if there := self.version_names(name):
            self.unearth(name, dataset.uid)
            _refuse_with_versions(name, there)
        delete_uploads(name, dataset.uid)

    def check_still_there(self, name: str, uid: str) -> None:
        """Raises `NotFound` if the dataset was deleted meanwhile.

        Called after something was created in the dataset; the caller must then delete it again.
        """
        dataset = self.find(name)
        if dataset is None or dataset.uid != uid:
            raise not_found(name, "it was deleted meanwhile")

    def unearth(self, name: str, uid: str) -> None:
        """Reverts the deletion of the dataset with that uid, because it has a version."""

        def decide(newest: Dataset) -> Dataset:
            return replace(newest, deleted=False) if newest.deleted and newest.uid == uid else newest

        self._transition(name, decide, tombstones=True)

    def version_names(self, name: str) -> Sequence[str]:
        """Returns the names of all existing versions, in any state."""
        if (versions := self.indexed_versions(name)) is not None:
            return [version.name for version in versions]
        jobs = Jobs(self._store, IMPORT_KIND)
        there = [f"{name}/versions/{folder}" for folder in self._store.folders(f"{name}/versions")]
        return [one for one in there if jobs.find(one)]

    def indexed_versions(self, name: str) -> Sequence[JobRecord] | None:
        """Returns the jobs of all existing versions by the index; None without an index that has them all."""
        within = f"{name}/versions/"
        found: MutableSequence[JobRecord] = []
        more = True
        while more:
            after = found[-1].name if found else within
            page = self._index.page(after, names.MAX_SIZE, within) if self._index else None
            if page is None:
                return None
            jobs, more = page
            found += [job.record for job in jobs]
        return found

    def _append(self, dataset: Dataset) -> Dataset:
        log = ResourceLog(self._store, f"{dataset.name}/log")
        last = log.head()
        free = last is None or Dataset.from_state(last.state).deleted
        if free and log.append(last, dataset.as_state()):
            return dataset
        winner = self.find(dataset.name)
        # Of repeated or concurrent calls, all get the result of the first.
        if winner and dataset.request_id and winner.request_id == dataset.request_id:
            return winner
        raise already_exists(dataset.name)

    def _transition(self, name: str, decide: Callable[[Dataset], Dataset], *, tombstones: bool = False) -> Dataset:
        """Appends the state that `decide` returns for the newest; nothing if it returns the same object."""

        def step(record: Any) -> dict[str, Any] | None:
            before = Dataset.from_state(record.state) if record else None
            if before is None or (before.deleted and not tombstones):
                raise not_found(name)
            after = decide(before)
            return None if after is before else after.as_state()

        record = ResourceLog(self._store, f"{name}/log").update(step)
        assert record is not None
        return Dataset.from_state(record.state)

    def newest(self, name: str) -> Dataset | None:
        """Returns a dataset as `find` does, but also a deleted one."""
        record = ResourceLog(self._store, f"{name}/log").head()
        return Dataset.from_state(record.state) if record else None


def _expected(dataset: Dataset, etag: str) -> Dataset:
    if etag and etag != dataset.etag:
        raise Conflict(
            f"{dataset.name} has etag {dataset.etag}, not {etag}; read it again",
            reason="STALE_ETAG",
            metadata={"resource": dataset.name},
        )
    return dataset


def _refuse_with_versions(name: str, there: Sequence[str]) -> None:
    if there:
        shown = ", ".join(there[:SHOWN_VERSIONS]) + (", …" if len(there) > SHOWN_VERSIONS else "")
        raise FailedPrecondition(
            f"{name} has {len(there)} version(s): {shown}; delete them first",
            reason="DATASET_HAS_VERSIONS",
            metadata={"resource": name, "versions": str(len(there))},
        )
