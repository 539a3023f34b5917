"""A transform that loses attempts goes on with the parts that they finished, on each store."""

from __future__ import annotations

import functools
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service.parallel import P, Pool, Results, Work
from data_service.transforms import passes as plan
from data_service.transforms.job import run_transform
from data_service.version_attempt import KEPT
from shared.dataset_version import load_version
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    MillraceError,
    ResourceExhausted,
    Unavailable,
)
from shared.jobs import AttemptContext, Jobs, JobState
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt, lose_attempt
from shared.resource_log import StaleAttempt
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.storage.object_store import STORE_FULL
from tests.support.transforming import commit_tables, create_transform

PARTS = 8
# Of a transform that learns, finds repeated keys, counts, and writes.
PASSES = ("FitPart", "FindKeys", "CountPart", "WritePart")
STEPS: list[dict[str, Any]] = [
    {"column": "x", "standardize": {}},
    {"filter": {"expression": "n % 7 != 3"}},
]
ON_DISK = pytest.mark.parametrize("store_settings", ["file"], indirect=True)
UNIQUE = {"column": "n", "action": "ACTION_QUARANTINE", "unique": {}}


class Killed(BaseException):
    """Takes the place of SIGKILL: no `except` of the attempt may use it to leave anything behind."""


@dataclass
class Cluster:
    """A `PartRunner` in this process that ends after `most` parts; `done` are the kinds and numbers of all parts."""

    most: int = 1_000
    end: BaseException = field(default_factory=Killed)
    done: list[tuple[str, int]] = field(default_factory=list)

    def run_parts(
        self,
        context: AttemptContext,
        folder: str,  # noqa: ARG002
        work: Work[P],
        parts: Sequence[P],
        *,
        foreign_code: bool,  # noqa: ARG002
        pool: Pool | None = None,  # noqa: ARG002
    ) -> Results[P]:
        for part in reversed(parts):
            context.raise_if_stopped()
            if len(self.done) == self.most:
                raise self.end
            doing: Any = pickle.loads(pickle.dumps(work))
            result = pickle.loads(pickle.dumps(doing(pickle.loads(pickle.dumps(part)))))
            self.done.append((type(doing._work).__name__, part.number))
            yield part, result


@dataclass
class Transform:
    store: ObjectStore
    name: str

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.store, IMPORT_KIND)

    @property
    def state(self) -> JobState:
        return self.jobs.get(self.name, self.name).state

    @property
    def folders(self) -> list[str]:
        return list(self.store.folders(f"{self.name}/data"))

    @property
    def digest(self) -> str:
        assert self.state is JobState.SUCCEEDED, self.jobs.get(self.name, self.name).error
        return load_version(self.store, self.name).manifest_sha256

    @property
    def records(self) -> list[str]:
        return sorted(info.key for info in self.store.list(f"{self.name}/data") if f"/{KEPT}/" in info.key)

    def attempt(self, cluster: Cluster) -> list[tuple[str, int]]:
        """Run the next attempt on that cluster, and return the parts that it worked on."""
        if self.state is JobState.RUNNING:
            lost = Unavailable("killed", reason="WORKER_LOST")
            self.jobs.transition(self.name, lambda job: lose_attempt(job, lost, time.time()), attempt=1)
        self.jobs.transition(self.name, lambda job: begin_attempt(job, time.time()), attempt=1)
        number = self.jobs.get(self.name, self.name).attempt
        entry = functools.partial(run_transform, run_parts=cluster.run_parts)
        try:
            run_attempt(entry, self.store, IMPORT_KIND, self.name, number)
        except Killed:
            assert self.state is JobState.RUNNING
        return cluster.done


@pytest.fixture
def store(store_settings: StoreSettings) -> ObjectStore:
    return open_store(store_settings)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two thousand rows are several parts."""
    monkeypatch.setattr(plan, "MIN_PART_BYTES", 4096)


@pytest.fixture
def start(store: ObjectStore) -> Callable[[], Transform]:
    """A source of 2,000 rows, some of which repeat others, and what starts a transform of them."""
    n = np.arange(2000)
    n[-50:] = n[:50]
    words = pa.array([f"w{i % 5}" for i in range(2000)])
    commit_tables(store, {"train": pa.table({"n": n, "x": n / 10, "word": words})})
    return lambda: Transform(store, create_transform(store, STEPS, checks=[UNIQUE]))


def test_each_part_is_done_once_however_often_the_attempt_is_lost(
    store: ObjectStore, start: Callable[[], Transform]
) -> None:
    undisturbed, disturbed = start(), start()
    every = Counter(undisturbed.attempt(Cluster()))
    assert every == Counter((kind, number) for kind in PASSES for number in range(PARTS))

    # In each pass one attempt is lost, the third once it has done all parts of its pass.
    done = Counter[tuple[str, int]]()
    for most in (3, PARTS, 2 * PARTS - 6):
        done += Counter(disturbed.attempt(Cluster(most)))
        assert len(disturbed.records) == done.total()
        assert len(disturbed.folders) == 1, "folders of earlier attempts are deleted once their parts are copied"
    assert done.total() == 3 + PARTS + 2 * PARTS - 6
    done += Counter(disturbed.attempt(Cluster()))

    assert done == every
    assert disturbed.digest == undisturbed.digest
    manifest = load_version(store, disturbed.name).manifest
    named = ["manifest.json", *(file.path for file in manifest.files), *(one.path for one in manifest.attachments)]
    there = [info.key.rsplit("/", 1)[-1] for info in store.list(f"{disturbed.name}/data")]
    assert sorted(there) == sorted(named)


def test_an_attempt_that_is_lost_at_the_commit_has_no_part_to_do_again(
    start: Callable[[], Transform], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, disturbed = start(), start()
    undisturbed.attempt(Cluster())

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("data_service.transforms.job.commit_version", die)
        assert len(disturbed.attempt(Cluster())) == len(PASSES) * PARTS
    assert disturbed.attempt(Cluster()) == []
    assert disturbed.digest == undisturbed.digest


@ON_DISK
@pytest.mark.parametrize("kind", ["record", "file"])
def test_a_part_whose_record_or_file_is_damaged_is_done_again(
    store: ObjectStore, start: Callable[[], Transform], kind: str
) -> None:
    undisturbed, disturbed = start(), start()
    undisturbed.attempt(Cluster())
    disturbed.attempt(Cluster(3 * PARTS + 4))
    if kind == "record":
        key = disturbed.records[-1]
        store.put(key, store.get(key)[:-1] + b"?")
    else:
        key = max(info.key for info in store.list(f"{disturbed.name}/data") if info.key.endswith(".parquet"))
        store.delete(key)
    assert Counter(disturbed.attempt(Cluster())) == Counter(("WritePart", number) for number in [*range(4), 7])
    assert disturbed.digest == undisturbed.digest


@ON_DISK
def test_parts_of_another_job_of_that_name_are_not_taken(store: ObjectStore, start: Callable[[], Transform]) -> None:
    """As if its records had been copied there: those of a job that was deleted are deleted with it."""
    other, transform = start(), start()
    other.attempt(Cluster(2 * PARTS))
    transform.attempt(Cluster(0))
    for info in list(store.list(f"{other.name}/data")):
        name = info.key.removeprefix(f"{other.name}/data/").split("/", 1)[1]
        store.copy(info.key, f"{transform.name}/data/a00001-copied/{name}")
    assert len(transform.attempt(Cluster())) == len(PASSES) * PARTS


LOST: list[MillraceError | Exception] = [
    Unavailable("a worker was lost", reason="WORKER_LOST"),
    ResourceExhausted("a disk is full", reason="SCRATCH_FULL"),
    DeadlineExceeded("late"),
    Internal("unexpected"),
    RuntimeError("unexpected"),
]


@ON_DISK
@pytest.mark.parametrize("end", LOST, ids=lambda end: type(end).__name__)
def test_an_attempt_that_is_lost_by_an_error_leaves_its_parts_to_the_next(
    start: Callable[[], Transform], end: Exception
) -> None:
    transform = start()
    assert len(transform.attempt(Cluster(PARTS, end))) == PARTS
    assert transform.state is JobState.RECOVERING
    assert len(transform.records) == PARTS
    assert len(transform.attempt(Cluster())) == (len(PASSES) - 1) * PARTS


@ON_DISK
@pytest.mark.parametrize(
    "end",
    [InvalidArgument("a bad row"), Cancelled("requested"), ResourceExhausted("no space", reason=STORE_FULL)],
    ids=lambda end: type(end).__name__,
)
def test_an_attempt_leaves_nothing_where_none_follows_or_the_store_is_full(
    start: Callable[[], Transform], end: MillraceError
) -> None:
    transform = start()
    transform.attempt(Cluster(PARTS, end))
    assert transform.folders == []


@ON_DISK
def test_an_attempt_that_was_wrongly_taken_for_dead_leaves_its_parts_to_the_later_one(
    start: Callable[[], Transform],
) -> None:
    transform = start()
    first = Cluster(PARTS)

    def take_over(context: AttemptContext) -> dict[str, Any]:
        def run_parts(*arguments: Any, **named: Any) -> Results[Any]:
            try:
                yield from first.run_parts(*arguments, **named)
            except Killed:
                lost = Unavailable("silent")
                transform.jobs.transition(transform.name, lambda job: lose_attempt(job, lost, time.time()), attempt=1)
                transform.jobs.transition(transform.name, lambda job: begin_attempt(job, time.time()), attempt=2)
                context.raise_if_stopped(fresh=True)

        with pytest.raises(StaleAttempt):
            run_transform(context, run_parts=run_parts)
        raise Killed

    transform.jobs.transition(transform.name, lambda job: begin_attempt(job, time.time()), attempt=1)
    with pytest.raises(Killed):
        run_attempt(take_over, transform.store, IMPORT_KIND, transform.name, 1)
    assert len(transform.records) == PARTS

    second = Cluster()
    run_attempt(
        functools.partial(run_transform, run_parts=second.run_parts), transform.store, IMPORT_KIND, transform.name, 2
    )
    assert len(second.done) == (len(PASSES) - 1) * PARTS
    assert transform.state is JobState.SUCCEEDED
