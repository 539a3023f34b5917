"""Training jobs: a page, polls of the reconciler, a merge of changes, garbage and a deletion; and the events of a run.

There are 100 jobs at 1x, of which one is live: 100,000 and 1,000 at 1,000x. Simulated: the store, and Ray, which has no
place for any; all finished jobs are copies of one, and so are their entries in the index, which real code has made.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

from benchmarks.scale.measuring import Costs
from benchmarks.scale.simulated_store import SimulatedStore
from benchmarks.scale.train_cases import checkpoint_entry
from shared.checkpoint import CheckpointRegistry
from shared.jobs import JobRecord, Jobs, reconciler
from shared.jobs.index import SETTLED, Entry, IndexTree
from shared.jobs.registry import folder_of_index
from shared.jobs.transitions import begin_attempt, request_cancel, succeed
from shared.model_spec import ModelSpec
from shared.settings import ServiceSettings
from train_service.domain.spec import TrainingSpec
from train_service.jobs.deletion import Deletions, GarbageCollector
from train_service.jobs.training_jobs import TrainingJobs
from train_service.records.event_log import TRAIN_KIND, EventKind, EventLog, gather_ended
from train_service.records.metrics_log import PART_POINTS, MetricPoint, encode, metrics_page

DONE = "trainingJobs/d"
ENTRIES_A_COMMIT = 10_000
# Events that are written at each size: eight segments.
NEW_EVENTS = 2048


def jobs(costs: Costs, scale: int) -> None:
    """List a page of a hundred jobs among all, and then what a service and its reconciler do in the background."""
    store, count = SimulatedStore(), 100 * scale
    live_jobs = count // 100
    kept = Jobs(store, TRAIN_KIND)
    _fill(store, kept, count - live_jobs, live_jobs)
    service = TrainingJobs(store)

    with costs.measured("job_page", store) as page:
        views, _ = service.page(min(100, count // 2), "")
        assert views
    assert page.requests <= 20, page.requests
    with mock.patch.object(reconciler, "open_store", return_value=store):
        kind = reconciler.JobKind(name=TRAIN_KIND, entry="no:entry", missing_capacity=lambda _: "a place")
        looking = reconciler.Reconciler(ServiceSettings(listen="", store=store.settings), kind)
    with costs.measured("job_first_look", store, units=live_jobs):
        looking.reconcile()
    with costs.measured("job_look", store, units=live_jobs):
        looking.reconcile()
    service.index.merge()  # what each job waits for
    for number in range(min(live_jobs, 10)):
        kept.transition(f"trainingJobs/l{number:06d}", lambda job: request_cancel(job, time.time()))
    with costs.measured("job_merge", store, units=min(live_jobs, 10)):
        service.index.merge()
    deletions = Deletions(store)
    with costs.measured("job_sweep", store, units=live_jobs + min(count, 200)):
        GarbageCollector(store, deletions, index=service.index).collect()
    with costs.measured("job_delete", store):
        deletions.begin(f"{DONE}{0:06d}")
        deletions.finish(f"{DONE}{0:06d}")
    with costs.measured("job_page_after", store) as after:
        assert service.page(min(100, count // 2), "")[0][0].record.name != f"{DONE}{0:06d}"
    assert after.requests <= 20, after.requests


def events(costs: Costs, scale: int) -> None:
    """Write, follow, read, gather and delete the events of a run that had 100 at 1x. Simulated: the store."""
    store, count = SimulatedStore(), 100 * scale
    writer = EventLog(store, DONE, gathers=True)

    def write(first: int, last: int) -> None:
        for number in range(first, last + 1):
            writer.append(1, EventKind.PROGRESS, {"step": number, "loss": 0.5}, str(number))
            writer.gather()

    write(1, count)
    with costs.measured("event_write", store, units=NEW_EVENTS) as written:
        write(count + 1, count + NEW_EVENTS)
    assert written.requests <= 1.2 * NEW_EVENTS, written.requests
    count += NEW_EVENTS
    with costs.measured("event_newest", store):
        assert EventLog(store, DONE).last_sequence() == count
    reader = EventLog(store, DONE)
    assert not list(reader.after(count))
    write(count + 1, count + 1)
    with costs.measured("event_follow", store) as followed:
        assert [event.sequence for event in reader.after(count, also_gathered=False)] == [count + 1]
    assert followed.requests <= 2, followed.requests
    with costs.measured("event_page", store):
        assert TrainingJobs(store).events(DONE, count // 2)
    with costs.measured("events_read", store, units=count):
        assert sum(1 for _ in EventLog(store, DONE).after(0)) == count + 1

    def remove(keys: Sequence[str]) -> bool:
        store.delete_all(keys)
        return True

    with costs.measured("events_gather", store, units=count):
        gather_ended(store, DONE, remove)
    with costs.measured("events_read_gathered", store, units=count):
        assert sum(1 for _ in EventLog(store, DONE).after(0)) == count + 1
    with costs.measured("events_delete", store, units=count):
        store.delete_folder(f"{DONE}/events")
    _metrics(costs, store, scale)


def _metrics(costs: Costs, store: SimulatedStore, scale: int) -> None:
    """Read a page in the middle of a run's metrics: a part at 1x, and 1,000 parts of 1,024 points at 1,000x.

    Simulated: the store. Parts that the page does not show are empty objects.
    """
    middle = scale * PART_POINTS // 2
    for number in range(scale):
        first, last = number * PART_POINTS, (number + 1) * PART_POINTS
        steps = range(first + 1, last + 1) if abs(first - middle) <= 2 * PART_POINTS else ()
        points = [MetricPoint(step, 0, 1, 0.0, {"loss": 0.5}) for step in steps]
        key = f"{DONE}/metrics/a00001-f00000000-{first:08d}-{last:08d}.parquet"
        store.put(key, encode(points) if points else b"")
    with costs.measured("metric_page", store) as page:
        points, _ = metrics_page(store, DONE, middle, 1000, "")
    assert points[0].step == middle + 1
    assert page.requests <= 3, page.requests


def _fill(store: SimulatedStore, kept: Jobs, done_jobs: int, live_jobs: int) -> None:
    training = TrainingSpec(
        dataset_version="datasets/d/versions/v",
        model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
        epochs=2,
        global_batch_size=100,
    )

    def make(name: str) -> None:
        record = JobRecord(uid=name, name=name, spec={"training": training.as_config()}, create_time=0, update_time=0)
        kept.create(name, replace(record, uid=name.rsplit("/", 1)[-1]))

    make(DONE)
    kept.transition(DONE, lambda job: begin_attempt(job, 1.0), attempt=1)
    CheckpointRegistry(store, DONE).commit(checkpoint_entry(1, DONE))
    kept.transition(DONE, lambda job: succeed(job, {}, 2.0), attempt=1)
    for live in kept.live():
        kept.forget(live)
    for number in range(live_jobs):
        make(f"trainingJobs/l{number:06d}")
    TrainingJobs(store).index.keep()
    tree = IndexTree(store, folder_of_index(TRAIN_KIND))
    pattern = json.dumps({**_entries(tree)[DONE], SETTLED: True})
    for start in range(0, done_jobs, ENTRIES_A_COMMIT):
        copies: dict[str, Entry | None] = {DONE: None}
        for number in range(start, min(start + ENTRIES_A_COMMIT, done_jobs)):
            name = f"{DONE}{number:06d}"
            copies[name] = json.loads(pattern.replace(f'"{DONE}', f'"{name}'))
        store.copy_folder(DONE, *(name for name in copies if name != DONE))
        assert tree.commit(tree.root(), copies)
    store.delete_folder(DONE)
    store.folders("trainingJobs")  # sorts the simulated store's keys
    gc.freeze()  # a service does not hold the store's objects, which each collection would go through


def _entries(tree: IndexTree) -> dict[str, Entry]:
    return {name: entry for leaf in tree.root().leaves for name, entry in tree.entries(leaf).items()}
