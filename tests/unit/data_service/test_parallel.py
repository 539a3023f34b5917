"""What goes wrong in a task, or with Ray itself, reaches the attempt as an error that says what to do about it."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, WorkerCrashedError

from data_service import parallel
from data_service.parallel import (
    CAPACITY_POLL_S,
    TASK,
    Begun,
    CapacityWatch,
    PartsTask,
    Pool,
    StandbyWorkers,
    _lost,
    grouped,
    paged,
    pool_fits,
)
from data_service.transforms.passes import PartitionRange
from shared.dataset_version import RowGroup
from shared.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MillraceError,
    ResourceExhausted,
    Unavailable,
    error_from_record,
)
from shared.settings import StoreSettings
from shared.storage import ObjectStore

POOL = Pool(most=2, cpus=1, gpus=0.0)
PART = PartitionRange(3, "train", (RowGroup(0, 0, 700, 100),))


def record_of(settings: StoreSettings, raised: BaseException | None) -> dict[str, Any]:
    """What a task answers whose work raises that, or gives its part's number."""

    def work(part: PartitionRange) -> int:
        if raised is not None:
            raise raised
        return part.number

    pages, (place,) = paged([[PART]])
    (record,) = PartsTask(work, settings, Begun("begun"), pages)(place)
    return record


def error_of(record: dict[str, Any]) -> MillraceError:
    return error_from_record(pickle.loads(record["error"]))


def test_a_task_answers_with_its_result(store: ObjectStore) -> None:
    record = record_of(store.settings, None)
    assert (record["part"], pickle.loads(record["result"]), record["error"]) == (3, 3, b"")
    assert list(store.list()) == []


def test_no_part_is_worked_on_after_one_that_failed(store: ObjectStore) -> None:
    begun = []

    def work(part: PartitionRange) -> None:
        begun.append(part.number)
        if part.number == 1:
            raise InvalidArgument("row 3 is bad")

    pages, (place,) = paged([[replace(PART, number=number) for number in range(3)]])
    records = list(PartsTask(work, store.settings, Begun("begun"), pages)(place))

    assert [(record["part"], bool(record["error"])) for record in records] == [(0, False), (1, True)]
    assert begun == [0, 1]


@pytest.mark.parametrize(
    ("parts", "cpus", "largest", "groups"),
    [(1, 2, 1, 1), (7, 2, 1, 7), (20, 2, 2, 12), (96, 2, 8, 19), (96, 64, 1, 96), (1000, 2, 8, 132), (5, 0, 1, 5)],
)
def test_tasks_are_few_and_yet_enough_for_every_cpu(parts: int, cpus: int, largest: int, groups: int) -> None:
    given = [replace(PART, number=number) for number in range(parts)]
    made = grouped(given, cpus)

    assert [part for group in made for part in group] == given
    assert (max(map(len, made)), len(made)) == (largest, groups)
    assert {len(group) for group in made[-2 * cpus :]} == {1}


class Columns:
    """What the parts of a source have in common."""

    def __init__(self, count: int) -> None:
        self.names = [f"a column of the table, number {index}" for index in range(count)]


@dataclass(frozen=True)
class ColumnPart:
    number: int
    columns: Columns
    row_count: int = 1
    where: str = "a part"


def test_parts_come_out_of_their_pages_as_they_went_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[bytes] = []

    def put(page: bytes) -> bytes:
        stored.append(page)
        return page

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(parallel, "PAGE_BYTES", 500)
    groups = [[replace(PART, number=3 * group + part) for part in range(3)] for group in range(40)]
    pages, places = paged(groups)
    assert pages == stored
    assert len(pages) > 2
    for order in (places, places[::-1], places[1::2]):
        assert [parallel._group(pages, place) for place in order] == [groups[places.index(place)] for place in order]


def test_common_data_of_parts_is_sent_once_and_not_with_each_part() -> None:
    columns = Columns(1000)

    def size_bytes(parts: int) -> int:
        pages, places = paged([[ColumnPart(number, columns)] for number in range(parts)])
        assert len(places) == parts
        return sum(len(page) for page in pages if isinstance(page, bytes))

    assert size_bytes(1001) - size_bytes(1) < 1000 * 100 < 3 * size_bytes(1)


def test_common_data_of_parts_fills_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of a wide table alone take more bytes than a page has."""
    columns = Columns(1000)
    monkeypatch.setattr(ray, "put", bytes)  # as it is, without an object store
    monkeypatch.setattr(parallel, "PAGE_BYTES", 1000)
    groups = [[ColumnPart(number, columns)] for number in range(100)]
    pages, places = paged(groups)
    assert isinstance(pages[0], bytes)
    assert len(pages[0]) > 10 * 1000
    assert len({place["page"] for place in places}) == len(pages)
    assert 2 <= len(pages) <= 10, "each page has several groups, and ends when they fill it"
    assert [parallel._group(pages, place)[0].number for place in places] == list(range(100))


@pytest.mark.parametrize(
    ("raised", "kind", "expected"),
    [
        (InvalidArgument("row 3 is bad"), InvalidArgument, "row 3 is bad"),
        (MemoryError(), ResourceExhausted, "too little memory"),
        (OSError(errno.ENOSPC, "no space"), ResourceExhausted, "disk"),
        (KeyError("secret"), Internal, "correlation id"),
    ],
)
def test_an_error_is_an_answer_too(
    store: ObjectStore, raised: BaseException, kind: type[MillraceError], expected: str
) -> None:
    error = error_of(record_of(store.settings, raised))
    assert type(error) is kind
    assert expected in error.message
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("cause", "foreign", "pool", "kind"),
    [
        (WorkerCrashedError(), True, None, FailedPrecondition),
        (WorkerCrashedError(), False, None, Unavailable),
        (OutOfMemoryError("oom"), True, None, Unavailable),  # type: ignore[no-untyped-call]
        (ActorDiedError(), True, None, Unavailable),
        (ActorDiedError(), True, POOL, FailedPrecondition),
        (ActorDiedError(), False, POOL, Unavailable),
        (None, True, None, Unavailable),
    ],
)
def test_only_foreign_code_that_kills_its_workers_ends_the_job(
    cause: BaseException | None, foreign: bool, pool: Pool | None, kind: type[MillraceError]
) -> None:
    assert type(_lost(cause, {3: 2}, {3: PART}, foreign, pool)) is kind


def test_a_pool_that_loses_actors_over_different_parts_has_lost_nodes() -> None:
    other = replace(PART, number=4)
    error = _lost(ActorDiedError(), {3: 1, 4: 1}, {3: PART, 4: other}, True, POOL)
    assert type(error) is Unavailable


def test_results_that_ray_loses_are_missed(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        def __init__(self, *_: Any) -> None: ...

        def tables(self, *_: Any) -> Iterator[pa.Table]:
            record = {"part": 3, "result": pickle.dumps("done"), "error": b""}
            yield pa.Table.from_pylist([record])

    monkeypatch.setattr("shared.ray_data_stream.DatasetStream", Ended)
    monkeypatch.setattr(parallel, "_dataset", lambda *_: None)
    monkeypatch.setattr(parallel, "_cpus", lambda: 2)
    monkeypatch.setattr(parallel, "STANDBY_WORKERS", StandbyWorkers())
    monkeypatch.setattr(StandbyWorkers, "start_for", lambda *_: None)
    context: Any = SimpleNamespace(store=store, raise_if_stopped=lambda: None)
    results = parallel.run_on_ray(context, "f", str, [PART, replace(PART, number=4)], foreign_code=False)

    assert next(results) == (PART, "done")
    with pytest.raises(Unavailable, match="1 parts"):
        next(results)


class Reports:
    """The context of an attempt, which remembers what it reports."""

    def __init__(self) -> None:
        self.waiting_for: list[str] = []
        self.polls = 0

    def raise_if_stopped(self) -> None:
        self.polls += 1

    def report_waiting(self, what: str) -> bool:
        self.waiting_for.append(what)
        return bool(what)


def node(cpus: float, *, is_alive: bool = True) -> dict[str, Any]:
    return {"Alive": is_alive, "Resources": {"CPU": cpus} if cpus else {"memory": 1e9}}


def test_an_attempt_whose_tasks_fit_no_node_says_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node(0.0), node(8.0, is_alive=False)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    now, reports = [0.0], Reports()
    watch = CapacityWatch(cast(Any, reports), TASK, lambda: now[0])

    def poll_after(seconds: float) -> list[str]:
        now[0] += seconds
        watch.poll()
        return reports.waiting_for

    assert poll_after(CAPACITY_POLL_S / 2) == []
    assert poll_after(CAPACITY_POLL_S / 2) == ["a node with 1 CPU for a task"]
    nodes.append(node(1.0))
    assert poll_after(CAPACITY_POLL_S)[1:] == [""]
    assert poll_after(CAPACITY_POLL_S)[2:] == []
    assert reports.polls == 4


def test_an_attempt_whose_parts_end_looks_at_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, reports, calls = [0.0], Reports(), [0]

    def nodes() -> list[Any]:
        calls[0] += 1
        return []

    monkeypatch.setattr(ray, "nodes", nodes)
    watch = CapacityWatch(cast(Any, reports), replace(TASK, cpus=2, gpus=0.5), lambda: now[0])
    for _ in range(10):
        now[0] += CAPACITY_POLL_S / 2
        watch.note_record()
        watch.poll()
    assert (calls, reports.waiting_for) == ([0], [])
    now[0] += CAPACITY_POLL_S
    watch.poll()
    watch.note_record()
    assert reports.waiting_for == ["a node with 2 CPU and 0.5 GPU for a worker", ""]


@pytest.mark.parametrize(
    ("resources", "cpus", "gpus", "fits"),
    [
        ({"CPU": 4.0}, 1, 0.0, 4),
        ({"CPU": 4.0}, 3, 0.0, 1),
        ({"CPU": 4.0}, 8, 0.0, 0),
        ({"CPU": 16.0}, 1, 1.0, 0),
        ({"CPU": 16.0, "GPU": 2.0}, 1, 0.5, 4),
        ({"CPU": 2.0, "GPU": 2.0}, 1, 0.5, 2),
        ({"CPU": 16.0, "GPU": 2.0}, 1, 0.4, 4),
        ({}, 1, 0.0, 0),
    ],
)
def test_a_node_has_room_for_as_many_of_a_pool_as_both_kinds_of_processors_allow(
    resources: dict[str, float], cpus: int, gpus: float, fits: int
) -> None:
    assert pool_fits(Pool(most=0, cpus=cpus, gpus=gpus), resources) == fits
