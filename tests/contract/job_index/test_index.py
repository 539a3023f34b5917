"""The index of jobs says what the logs say, wherever its writers are stopped and whichever release wrote the logs."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from shared.errors import NotFound, Unavailable
from shared.jobs import JobRecord, Jobs, JobState, index
from shared.jobs import index as index_tree
from shared.jobs.index import ABANDONED_S, JobIndex
from shared.jobs.registry import Changes, log_prefix
from shared.jobs.transitions import begin_attempt, confirm_delete, fail, request_cancel, request_delete
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.counting_store import CountingStore

KIND, COLLECTION = "train", "trainingJobs"
Act = Callable[[ObjectStore], None]


@pytest.fixture
def store(store_settings: StoreSettings) -> ObjectStore:
    return open_store(store_settings)


@pytest.fixture
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_tree, "LEAF_ENTRIES", 4)
    monkeypatch.setattr(index_tree, "FEW_ENTRIES", 2)


def an_index(store: ObjectStore, clock: Callable[[], float] = lambda: 0.0) -> JobIndex:
    """An index as a process has it that has just started."""
    return JobIndex(store, KIND, COLLECTION, lambda job: {"attempt": job.attempt}, clock)


def create(store: ObjectStore, job_id: str, uid: str = "") -> JobRecord:
    name = f"{COLLECTION}/{job_id}"
    job = JobRecord(uid=uid or f"u-{job_id}", name=name, spec={"of": job_id}, create_time=1.0, update_time=1.0)
    return Jobs(store, KIND).create(name, job)


def change(
    store: ObjectStore, job_id: str, decide: Callable[[JobRecord], JobRecord], attempt: int | None = None
) -> None:
    Jobs(store, KIND).transition(f"{COLLECTION}/{job_id}", decide, attempt)


def end(store: ObjectStore, job_id: str) -> None:
    change(store, job_id, lambda job: fail(job, NotFound("x"), 2.0))
    for live in Jobs(store, KIND).live():
        if live.folder == f"{COLLECTION}/{job_id}":
            Jobs(store, KIND).forget(live)


def delete(store: ObjectStore, job_id: str) -> None:
    end(store, job_id)
    change(store, job_id, lambda job: request_delete(job, 3.0))
    change(store, job_id, lambda job: confirm_delete(job, 4.0))


def logs(store: ObjectStore) -> list[JobRecord]:
    found = (Jobs(store, KIND).find(f"{COLLECTION}/{one}") for one in store.folders(COLLECTION))
    return [job for job in found if job]


def listed(index: JobIndex, size: int = 3) -> list[JobRecord]:
    """All jobs, page by page."""
    jobs: list[JobRecord] = []
    more = True
    while more:
        page = index.page(jobs[-1].name if jobs else f"{COLLECTION}/", size)
        assert page is not None
        some, more = page
        assert len(some) == size or not more
        assert all(job.shown == {"attempt": job.record.attempt} for job in some)
        jobs += [job.record for job in some]
    return jobs


@pytest.mark.usefixtures("small_leaves")
def test_pages_show_what_the_logs_say_after_each_change(store: ObjectStore) -> None:
    draw, there = random.Random(7), set[str]()
    an_index(store).build()
    for turn in range(40):
        job_id = f"j{draw.randrange(30):02d}"
        if job_id not in there:
            create(store, job_id, f"u{turn}")
            there.add(job_id)
        elif draw.random() < 0.5:
            delete(store, job_id)
            there.remove(job_id)
        else:
            change(store, job_id, lambda job: request_cancel(job, 5.0))
        if turn % 4 == 0:
            an_index(store).merge()
        if turn % 8 == 0:
            assert listed(an_index(store)) == logs(store)
    an_index(store).merge()

    assert Changes(store, KIND).read() == []
    assert listed(an_index(store)) == logs(store)
    assert len(logs(store)) == len(there) > 8


def created(store: ObjectStore) -> None:
    create(store, "new")


def begun(store: ObjectStore) -> None:
    change(store, "b", lambda job: begin_attempt(job, 5.0), attempt=1)


def deleted(store: ObjectStore) -> None:
    change(store, "c", lambda job: confirm_delete(job, 5.0))


def merged(store: ObjectStore) -> None:
    an_index(store).merge()


def built(store: ObjectStore) -> None:
    an_index(store).build()


@pytest.mark.usefixtures("small_leaves")
@pytest.mark.parametrize("is_done", [False, True], ids=["request-is-lost", "answer-is-lost"])
@pytest.mark.parametrize("act", [created, begun, deleted, merged, built])
def test_a_process_may_die_at_each_request_and_the_next_one_lists_what_the_logs_say(
    file_store: StoreSettings, monkeypatch: pytest.MonkeyPatch, act: Act, is_done: bool
) -> None:
    died_at = 0
    for fails_at in range(1, 200):
        store = open_store(replace(file_store, url=f"{file_store.url}/{fails_at}"))
        for job_id in "abcde":
            create(store, job_id)
        change(store, "c", lambda job: request_delete(fail(job, NotFound("x"), 2.0), 3.0))
        if act is not built:
            an_index(store).build()
        create(store, "f")  # its note is for the merge
        dying = CountingStore(store)
        monkeypatch.setattr(index_tree, "READ_AT_ONCE", 1)
        monkeypatch.setattr(index, "READ_AT_ONCE", 1)
        dying.fails_at, dying.is_done = fails_at, is_done
        with suppress(Unavailable):
            act(dying)
        if len(dying.requests) < fails_at:
            break
        died_at += 1

        after = an_index(store)
        if act is built:
            assert after.page("", 10) is None or listed(after) == logs(store)
            after.build()
        assert listed(after) == logs(store)
        after.merge()
        assert listed(after) == logs(store)
        if act is not built:
            assert listed(an_index(store)) == logs(store)
    assert 2 < died_at < 150


@pytest.mark.parametrize("cut", ["note", "record", "leaf", "root", "notes-removed"])
def test_on_each_store_a_job_whose_creation_or_merge_was_cut_off_is_listed(store: ObjectStore, cut: str) -> None:
    create(store, "a")
    an_index(store).build()
    dying = CountingStore(store)
    prefix = {
        "note": "index/train/v1/changes",
        "record": f"{COLLECTION}/b/log",
        "leaf": "index/train/v1/leaves",
        "root": "index/train/v1/roots",
        "notes-removed": "index/train/v1/changes",
    }[cut]
    verb = {"record": "put_if_absent", "root": "put_if_absent", "notes-removed": "delete_all"}.get(cut, "put")
    dying.is_done = cut != "notes-removed"
    ask = dying._asked

    def dies(what: str, key: str, call: Callable[[], object]) -> object:
        if what == verb and key.startswith(prefix):
            dying.fails_at = len(dying.requests) + 1
        return ask(what, key, call)

    dying._asked = dies  # type: ignore[method-assign, assignment]
    with suppress(Unavailable):
        create(dying, "b")
        an_index(dying).merge()

    assert dying.fails_at
    expected = ["a"] if cut == "note" else ["a", "b"]
    for _ in range(2):
        assert [job.uid for job in listed(an_index(store))] == [f"u-{one}" for one in expected]
        an_index(store).merge()


@pytest.fixture
def earlier_release(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Run a call as a process of an earlier release, which writes no notes."""

    def run(call: Callable[[], object]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Changes, "note", lambda *_: None)
            call()

    return run


def test_jobs_of_an_earlier_release_are_listed_as_long_as_they_live_and_once_they_ended(
    store: ObjectStore, earlier_release: Callable[[Callable[[], object]], None]
) -> None:
    create(store, "a")
    keeper = an_index(store)
    keeper.build()
    keeper.refresh()

    earlier_release(lambda: create(store, "b"))
    assert [job.uid for job in listed(keeper)] == ["u-a"]
    keeper.refresh()
    assert listed(keeper) == logs(store)

    earlier_release(lambda: end(store, "b"))
    keeper.refresh()
    assert listed(keeper) == logs(store)
    assert [job.state for job in listed(keeper)] == [JobState.PENDING, JobState.FAILED]


def test_a_job_of_an_earlier_release_that_ended_while_no_service_ran_is_read_at_the_start(
    store: ObjectStore, earlier_release: Callable[[Callable[[], object]], None]
) -> None:
    create(store, "a")
    an_index(store).build()
    earlier_release(lambda: end(store, "a"))

    started = an_index(store)
    started.refresh()

    assert [job.state for job in listed(started)] == [JobState.FAILED]


def test_a_job_that_stands_in_its_log_alone_is_found_in_turns(
    store: ObjectStore, earlier_release: Callable[[Callable[[], object]], None]
) -> None:
    for job_id in ("a", "a-b", "b", "c", "d"):
        create(store, job_id)
    an_index(store).build()
    earlier_release(lambda: delete(store, "d"))
    earlier_release(lambda: create(store, "a1"))
    earlier_release(lambda: end(store, "a1"))
    assert listed(an_index(store)) != logs(store)

    checker = an_index(store)
    checked = [*checker.check(2), *checker.check(2), *checker.check(2)]

    assert sorted(checked) == [f"{COLLECTION}/{one}" for one in ("a", "a-b", "a1", "b", "c", "d")]
    assert listed(checker) == logs(store)
    assert checker.check(2) == []
    assert checker.check(100) == checked


def test_jobs_of_before_the_index_are_read_once_and_a_build_goes_on_where_it_was_cut_off(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, earlier_release: Callable[[Callable[[], object]], None]
) -> None:
    monkeypatch.setattr(index, "JOBS_A_COMMIT", 2)
    for job_id in "abcde":
        earlier_release(partial(create, store, job_id))
    assert an_index(store).page("", 10) is None
    dying = CountingStore(store)
    dying.fails_at = 20
    with pytest.raises(Unavailable):
        an_index(dying).build()
    assert an_index(store).page("", 10) is None

    counted = CountingStore(store)
    an_index(counted).build()

    assert listed(an_index(store)) == logs(store)
    assert not any(f"get {log_prefix(f'{COLLECTION}/a')}" in request for request in counted.requests)


def test_the_note_of_a_record_that_is_not_there_is_kept_and_removed_in_the_end(store: ObjectStore) -> None:
    now = 0.0
    keeper = an_index(store, lambda: now)
    keeper.build()
    create(store, "a")
    Changes(store, KIND).note(f"{COLLECTION}/a", 2)  # its writer is slow

    keeper.merge()
    assert [change.number for change in Changes(store, KIND).read()] == [2]
    change_later = Jobs(store, KIND)
    change_later.transition(f"{COLLECTION}/a", lambda job: request_cancel(job, 2.0))
    assert [job.state for job in listed(keeper)] == [JobState.CANCELLING]
    keeper.merge()
    assert Changes(store, KIND).read() == []

    Changes(store, KIND).note(f"{COLLECTION}/a", 3)  # its writer died
    keeper.merge()
    assert len(Changes(store, KIND).read()) == 1
    now = ABANDONED_S + 1
    keeper.merge()
    assert Changes(store, KIND).read() == []


class Overtaken(CountingStore):
    """A store where another process does something before the first root is written."""

    def __init__(self, store: ObjectStore, meanwhile: Callable[[], object]) -> None:
        super().__init__(store)
        self._meanwhile: Callable[[], object] | None = meanwhile

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        if "/roots/" in key and (meanwhile := self._meanwhile):
            self._meanwhile = None
            meanwhile()
        super().put_if_absent(key, data)


def test_a_merge_that_another_one_overtakes_puts_no_earlier_state_in_its_place(store: ObjectStore) -> None:
    an_index(store).build()
    create(store, "a")

    def overtake() -> None:
        delete(store, "a")
        an_index(store).merge()

    an_index(Overtaken(store, overtake)).merge()

    assert listed(an_index(store)) == []


def test_a_merge_that_was_stopped_until_its_roots_number_was_free_again_commits_nothing_old(
    store: ObjectStore,
) -> None:
    an_index(store).build()
    create(store, "a")

    def overtake() -> None:
        for number in range(2 * index_tree.ROOTS_KEPT):
            create(store, f"b{number}")
            an_index(store).merge()
        delete(store, "a")
        an_index(store).merge()

    an_index(Overtaken(store, overtake)).merge()

    assert listed(an_index(store)) == logs(store)
    assert len(logs(store)) == 2 * index_tree.ROOTS_KEPT


def test_a_job_that_cannot_be_read_keeps_no_other_job_out(store: ObjectStore) -> None:
    def described(job: JobRecord) -> dict[str, object]:
        if job.spec["of"] == "bad":
            raise ValueError("a spec of a later release")
        return {"attempt": job.attempt}

    keeper = JobIndex(store, KIND, COLLECTION, described)
    create(store, "bad")
    keeper.build()
    for job_id in "ac":
        create(store, job_id)
    keeper.merge()

    assert [change.name for change in Changes(store, KIND).read()] == [f"{COLLECTION}/bad"] * 2
    assert listed(an_index(store)) == logs(store)


def test_settled_jobs_are_passed_over_until_they_change(store: ObjectStore) -> None:
    for job_id in "abc":
        create(store, job_id)
    keeper = an_index(store)
    keeper.build()
    seen = list(keeper.unsettled() or ())
    change(store, "c", lambda job: request_cancel(job, 2.0))
    keeper.merge()

    keeper.settle(seen)

    assert [job.record.uid for job in keeper.unsettled() or ()] == ["u-c"]
    keeper.check(10)  # nothing has changed
    assert [job.record.uid for job in keeper.unsettled() or ()] == ["u-c"]
    change(store, "a", lambda job: request_cancel(job, 2.0))
    keeper.merge()
    assert [job.record.uid for job in keeper.unsettled() or ()] == ["u-a", "u-c"]


def test_leaves_that_no_root_names_go_and_named_ones_stay(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create(store, "a")
    an_index(store).build()
    store.put("index/train/v1/leaves/left.json.z", b"x")
    an_index(store).check(10)
    assert store.exists("index/train/v1/leaves/left.json.z")

    monkeypatch.setattr(index_tree, "UNNAMED_S", -60.0)
    an_index(store).check(10)

    assert not store.exists("index/train/v1/leaves/left.json.z")
    assert listed(an_index(store)) == logs(store)


@pytest.mark.usefixtures("store")
def test_a_page_of_a_hundred_costs_a_few_requests_whatever_was_before(file_store: StoreSettings) -> None:
    counted = CountingStore(open_store(file_store))
    for number in range(350):
        create(counted, f"j{number:04d}")
    an_index(counted).build()
    an_index(counted).merge()
    for number in range(240, 243):
        change(counted, f"j{number:04d}", lambda job: request_cancel(job, 2.0))
    counted.forget()

    page = an_index(counted).page(f"{COLLECTION}/j0199", 100)

    assert page is not None
    assert [job.record.uid for job in page[0]] == [f"u-j{number:04d}" for number in range(200, 300)]
    assert page[0][40].record.state is JobState.CANCELLING
    assert len(counted.requests) <= 20
