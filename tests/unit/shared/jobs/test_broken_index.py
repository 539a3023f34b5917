"""An index whose leaves were deleted while a service used it is built anew, and no call waits for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.jobs import JobRecord, Jobs
from shared.jobs.index import IndexTree, JobIndex, Root
from shared.jobs.registry import folder_of_index
from shared.jobs.transitions import request_cancel
from shared.storage import ObjectStore

KIND, COLLECTION = "train", "trainingJobs"
# Each of the calls needs a few reads of the root. Without an end, they read it again and again.
MAX_ROOTS = 40


def create(store: ObjectStore, job_id: str) -> None:
    name = f"{COLLECTION}/{job_id}"
    Jobs(store, KIND).create(name, JobRecord(uid=job_id, name=name, spec={}, create_time=1.0, update_time=1.0))


@pytest.fixture
def index(store: ObjectStore) -> JobIndex:
    index = JobIndex(store, KIND, COLLECTION)
    for job_id in "abc":
        create(store, job_id)
    index.keep()
    return index


@pytest.fixture
def roots_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    root, reads = IndexTree.root, 0

    def counted(self: IndexTree) -> Root:
        nonlocal reads
        reads += 1
        assert reads <= MAX_ROOTS, "the index is read without an end"
        return root(self)

    monkeypatch.setattr(IndexTree, "root", counted)


def delete_leaves(store: ObjectStore) -> None:
    """What is left of a recursive deletion of the index if a change in progress wrote its root last."""
    for info in list(store.list(f"{folder_of_index(KIND)}/leaves")):
        store.delete(info.key)


def uids(index: JobIndex) -> list[str]:
    page = index.page(f"{COLLECTION}/", 10)
    assert page is not None
    return [job.record.uid for job in page[0]]


def pages(_: ObjectStore, index: JobIndex) -> None:
    assert index.page(f"{COLLECTION}/", 10) is None


def merges(store: ObjectStore, index: JobIndex) -> None:
    Jobs(store, KIND).transition(f"{COLLECTION}/b", lambda job: request_cancel(job, 2.0))
    index.merge()


def lists_unsettled(_: ObjectStore, index: JobIndex) -> None:
    assert list(index.unsettled() or ()) == []


def checks(store: ObjectStore, index: JobIndex) -> None:
    Jobs(store, KIND).transition(f"{COLLECTION}/b", lambda job: request_cancel(job, 2.0))
    index.check(10)


@pytest.mark.usefixtures("roots_are_counted")
@pytest.mark.parametrize("act", [pages, merges, lists_unsettled, checks])
def test_an_index_without_its_leaves_is_built_anew(
    store: ObjectStore, index: JobIndex, act: Callable[[ObjectStore, JobIndex], None]
) -> None:
    delete_leaves(store)

    act(store, index)
    index.keep()

    assert uids(index) == uids(JobIndex(store, KIND, COLLECTION)) == ["a", "b", "c"]


@pytest.mark.usefixtures("roots_are_counted")
def test_settling_ends_though_the_leaves_are_gone(store: ObjectStore, index: JobIndex) -> None:
    seen = list(index.unsettled() or ())
    delete_leaves(store)

    index.settle(seen)
    index.keep()

    assert uids(index) == ["a", "b", "c"]


@pytest.mark.usefixtures("roots_are_counted")
def test_an_index_that_is_deleted_while_it_is_built_is_built_from_its_beginning(
    store: ObjectStore, index: JobIndex
) -> None:
    tree = IndexTree(store, folder_of_index(KIND))
    assert tree.commit(tree.root(), {}, is_complete=False, built_to=f"{COLLECTION}/b")
    delete_leaves(store)

    index.build()

    assert uids(index) == ["a", "b", "c"]


def test_an_idle_service_notices_that_its_index_was_deleted(store: ObjectStore) -> None:
    now = 0.0
    index = JobIndex(store, KIND, COLLECTION, clock=lambda: now)
    create(store, "a")
    index.keep()
    store.delete_folder(folder_of_index(KIND))

    now = 1000.0
    index.keep()
    index.keep()

    assert uids(JobIndex(store, KIND, COLLECTION)) == ["a"]
