"""Versions: a page, garbage and the deletion of a dataset; and what watchers of an operation request.

Simulated: the store. All versions are copies of one, and so are their entries in the index, which real code has made.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable

from benchmarks.scale.measuring import Costs
from benchmarks.scale.simulated_store import SimulatedStore
from data_service.datasets import Datasets, Versions, operation_id, record_operation
from data_service.deletion import Deletions, GarbageCollector
from data_service.servicer import FollowedOperation, VersionOperations
from data_service.version_jobs import open_version_index
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import FailedPrecondition
from shared.jobs import JobRecord, Jobs
from shared.jobs.index import SETTLED, Entry, IndexTree
from shared.jobs.registry import folder_of_index, progress_key
from shared.jobs.transitions import begin_attempt, confirm_delete, fail, request_delete
from shared.storage import ObjectStore
from shared.streaming import Watches, interval_s

ENDED, DELETED = "datasets/kept/versions/e", "datasets/emptied/versions/d"
LIVE = "datasets/kept/versions/live"
ENTRIES_A_COMMIT = 10_000
FIRST_S, WATCHED_S = 10.0, 120.0


def versions(costs: Costs, scale: int) -> None:
    """List, collect garbage and delete where 100 versions have ended and 100 were deleted at 1x."""
    store, count = SimulatedStore(), 100 * scale
    _fill(store, count)
    index = open_version_index(store)
    datasets = Datasets(store, index)
    catalog = Versions(store, Jobs(store, IMPORT_KIND), datasets, index)
    with costs.measured("version_page", store) as page:
        assert len(catalog.list("datasets/kept", min(100, count // 2), "")[0]) == min(100, count // 2)
    assert page.requests <= 20, page.requests
    with costs.measured("version_page_of_deleted", store):
        assert catalog.list("datasets/emptied", 100, "") == ([], "")
    garbage_collector = GarbageCollector(
        store,
        datasets,
        Deletions(store, Jobs(store, IMPORT_KIND)),
        collect_uploads=lambda _: None,
        delete_uploads=lambda *_: None,
        index=index,
    )
    with costs.measured("version_sweep", store, units=min(2 * count, 200)):
        garbage_collector.collect()
    with costs.measured("dataset_delete", store):
        datasets.delete("datasets/emptied", "", check_uploads=lambda *_: None, delete_uploads=lambda *_: None)


def _fill(store: SimulatedStore, count: int) -> None:
    jobs = Jobs(store, IMPORT_KIND)
    for dataset in ("kept", "emptied"):
        Datasets(store).create(
            dataset, display_name="", description="", request_id="", body_sha256="", validate_only=False
        )
    for name in (ENDED, DELETED):
        jobs.create(name, JobRecord(uid=name.rpartition("/")[2], name=name, spec={}, create_time=1.0, update_time=1.0))
        jobs.transition(name, lambda job: fail(begin_attempt(job, 1.0), FailedPrecondition("no"), 2.0), attempt=1)
    jobs.transition(DELETED, lambda job: confirm_delete(request_delete(job, 3.0), 4.0))
    for live in jobs.live():
        jobs.forget(live)
    open_version_index(store).keep()
    tree = IndexTree(store, folder_of_index(IMPORT_KIND))
    (entry,) = (one for leaf in tree.root().leaves for one in tree.entries(leaf).values())
    pattern = json.dumps({**entry, SETTLED: True})
    for start in range(0, count, ENTRIES_A_COMMIT):
        copies: dict[str, Entry | None] = {ENDED: None}
        for number in range(start, min(start + ENTRIES_A_COMMIT, count)):
            copies[f"{ENDED}{number:06d}"] = json.loads(pattern.replace(f'"{ENDED}', f'"{ENDED}{number:06d}'))
        store.copy_folder(ENDED, *(name for name in copies if name != ENDED))
        store.copy_folder(DELETED, *(f"{DELETED}{number:06d}" for number in range(start, start + len(copies) - 1)))
        assert tree.commit(tree.root(), copies)
    for one in (ENDED, DELETED):
        store.delete_folder(one)
    store.folders("datasets/kept/versions")  # sorts the simulated store's keys
    gc.freeze()  # a service does not hold the store's objects, which each collection would go through


def watch(costs: Costs, scale: int) -> None:
    """Follow an operation at work for two minutes, ten seconds after its beginning, and have watchers wait for its end:
    one at 1x.

    Simulated besides: the clock of those two minutes.
    """
    store = SimulatedStore()
    jobs = Jobs(store, IMPORT_KIND)
    job = JobRecord(uid="u", name=LIVE, spec={"import": {}}, create_time=1.0, update_time=1.0)
    record_operation(store, job)
    jobs.create(LIVE, job)
    jobs.transition(LIVE, lambda one: begin_attempt(one, 1.0), attempt=1)
    operations = VersionOperations(store, jobs, Versions(store, jobs, Datasets(store)))
    name = f"operations/{operation_id(job)}"
    now = 0.0
    followed = FollowedOperation(store, jobs, operations, name, lambda: now)
    while now < FIRST_S:
        followed.read()
        now += interval_s(now)
    with costs.measured("watch_two_minutes", store) as cost:
        while now < FIRST_S + WATCHED_S:
            followed.read()
            now += interval_s(now)
    assert cost.requests <= 2 * WATCHED_S, cost.requests
    store.put(progress_key(LIVE), b"{}")
    with costs.measured("watch_end", store, units=scale) as end:
        asyncio.run(_wait_for_end(operations, name, scale, lambda: _end(store)))
    assert end.requests <= 40, end.requests


async def _wait_for_end(operations: VersionOperations, name: str, watchers: int, end: Callable[[], None]) -> None:
    watches = Watches(operations.follow)

    async def wait() -> None:
        async with watches.watching(name) as watched:
            operation = await watched.first()
            while not operation.done:
                operation = await watched.next()

    waiting = [asyncio.create_task(wait()) for _ in range(watchers)]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(end)
    await asyncio.gather(*waiting)


def _end(store: ObjectStore) -> None:
    jobs = Jobs(store, IMPORT_KIND)
    jobs.transition(LIVE, lambda job: fail(job, FailedPrecondition("no"), time.time()), attempt=1)
