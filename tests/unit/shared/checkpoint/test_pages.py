"""What a registry of many checkpoints costs: an append its own entry, a question a bounded number of requests."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, Ranking, registry, resolve
from shared.checkpoint.registry import best, latest
from shared.errors import DataLoss, NotFound
from shared.resource_log import ResourceLog
from shared.storage import ObjectStore, open_store
from tests.support.checkpoint_samples import JOB, entry
from tests.support.counting_store import CountingStore

LOSS = Ranking("validation_loss", maximize=False)


def named(step: int, attempt: int = 1, **metrics: float) -> CheckpointEntry:
    return entry(step, attempt=attempt, name=f"step-{step:08d}", **metrics)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three entries on a page, three references on those above, two entries in the log: a tree of several levels."""
    monkeypatch.setattr(registry, "PAGE_ENTRIES", 3)
    monkeypatch.setattr(registry, "KEPT_ENTRIES", 2)
    monkeypatch.setattr(registry, "FAN_OUT", 3)


def test_an_append_writes_its_own_entry_and_a_bounded_page(store: ObjectStore) -> None:
    counting = CountingStore(store)
    opened = CheckpointRegistry(counting, JOB)
    opened.fence(1)
    written = []
    for step in range(1, 301):
        counting.forget()
        opened.commit(named(step, validation_accuracy=step / 1000))
        written.append(counting.bytes_written)
        assert len(counting.requests) <= 8

    entry_bytes = len(json.dumps(named(1, validation_accuracy=0.5).as_state()))
    max_entries = registry.KEPT_ENTRIES + 2 * registry.PAGE_ENTRIES
    assert max(written) <= 2 * max_entries * entry_bytes
    assert sum(written[200:300]) <= 1.5 * sum(written[100:200])


def test_the_newest_the_best_and_a_page_take_a_bounded_number_of_requests(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PAGE_ENTRIES", 8)
    monkeypatch.setattr(registry, "FAN_OUT", 8)
    opened = CheckpointRegistry(store, JOB)
    opened.fence(1)
    asks: list[Callable[[CheckpointRegistry], object]] = [
        lambda one: one.newest(),
        lambda one: one.best(),
        lambda one: one.find(named(70).name),
        lambda one: one.poll(lambda view: view.page("", 20)),
        lambda one: one.poll(lambda view: view.page(named(40).name, 10)),
    ]
    asked = []
    for step in range(1, 301):
        opened.commit(named(step, validation_accuracy=1.0 if step == 50 else step / 10_000))
        if step in (100, 300):
            for ask in asks:
                counting = CountingStore(store)
                ask(CheckpointRegistry(counting, JOB))
                asked.append(len(counting.requests))
    few, many = asked[:5], asked[5:]

    assert max(many) <= 20
    assert all(later <= before + 5 for before, later in zip(few, many, strict=True))
    assert CheckpointRegistry(store, JOB).newest() == named(300, validation_accuracy=0.03)
    assert CheckpointRegistry(store, JOB).best() == named(50, validation_accuracy=1.0)
    assert CheckpointRegistry(store, JOB).find(named(70).name) == named(70, validation_accuracy=0.007)
    found, more = CheckpointRegistry(store, JOB).poll(lambda view: view.page(named(40).name, 3))
    assert ([one.step for one in found], more) == ([41, 42, 43], True)
    assert [one.step for one in CheckpointRegistry(store, JOB).entries()] == list(range(1, 301))


STEPS = st.integers(1, 60)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), STEPS, st.floats(0, 1) | st.just(math.nan)),
        st.tuples(st.just("retire"), STEPS, STEPS),
        st.tuples(st.just("finish"), STEPS, STEPS),
        st.tuples(st.just("rank"), st.sampled_from([Ranking(), LOSS]), STEPS),
    ),
    max_size=60,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(0, 50), changes=CHANGES)
@pytest.mark.usefixtures("small_pages")
def test_a_paged_registry_answers_as_a_plain_list(
    store: ObjectStore, first: int, changes: list[tuple[str, object, object]]
) -> None:
    store.delete_folder(JOB)
    opened = CheckpointRegistry(store, JOB)
    opened.fence(1)
    plain: list[CheckpointEntry] = []
    ranking = Ranking()

    def commit(step: int, value: float) -> None:
        nonlocal plain
        made = replace(
            named(step, validation_accuracy=value, validation_loss=1 - value),
            folder=f"{JOB}/checkpoints/data/{step}-{value}",
        )
        opened.commit(made)
        plain = [*(one for one in plain if one.name != made.name), made]

    for step in range(1, first + 1):
        commit(step, step / 100)
    for kind, which, more in changes:
        if kind == "commit":
            commit(which, more)  # type: ignore[arg-type]
        elif kind == "retire":
            going = [one for one in plain if one.step in (which, more)]
            opened.retire(going, 1)
            plain = [one for one in plain if one not in going]
        elif kind == "finish":
            opened.finish(named(which).name, 1)  # type: ignore[arg-type]
            plain = [replace(one, final=True) if one.step == which else one for one in plain]
        else:
            assert isinstance(which, Ranking)
            ranking = which
            opened.open_for(1, ranking)

    def as_text(some: object) -> str:
        return repr(some)  # NaN is not equal to itself

    def page_behind(name: str) -> object:
        return poll(lambda view: view.page(name, 5))

    poll = CheckpointRegistry(store, JOB).poll
    assert as_text(poll(lambda view: view.entries())) == as_text(plain)
    assert as_text(poll(lambda view: view.newest())) == as_text(latest(plain))
    for asked in (None, Ranking(), LOSS):
        assert as_text(CheckpointRegistry(store, JOB).best(asked)) == as_text(best(plain, asked or ranking))
    assert as_text(poll(lambda view: view.final())) == as_text(latest([one for one in plain if one.final]))
    assert poll(lambda view: view.is_empty) == (not plain)
    by_name = sorted(plain, key=lambda one: one.name)
    for after in ("", named(7).name, named(30).name):
        behind = [one for one in by_name if one.name > after]
        assert as_text(page_behind(after)) == as_text((behind[:5], len(behind) > 5))
    for step in (1, 7, 33):
        there = next((one for one in plain if one.step == step), None)
        assert as_text(CheckpointRegistry(store, JOB).find(named(step).name)) == as_text(there)
    assert {info.key for info in store.list(f"{JOB}/checkpoints/pages")} == set(_referenced(store))


def _referenced(store: ObjectStore) -> list[str]:
    """The keys of all pages that the head of the log names, directly or not."""
    state = CheckpointRegistry(store, JOB).state()
    keys = [ref.key for ref in state.pages]
    for key in keys:
        keys += [ref["key"] for ref in json.loads(store.get(key)).get("pages", ())]
    return keys


@pytest.mark.usefixtures("small_pages")
def test_a_log_of_an_earlier_release_is_read_and_gone_on_with(store: ObjectStore) -> None:
    """Each record there had all entries."""
    entries = [named(step, validation_accuracy=step / 100) for step in range(1, 31)]
    state: dict[str, Any] = {
        "checkpoints": [one.as_state() for one in entries],
        "retiring": [],
        "ranking": {"metric": "validation_accuracy", "maximize": True},
    }
    log = ResourceLog(store, f"{JOB}/checkpoints/log")
    for count in range(1, 31):
        log.append(log.head(), {**state, "checkpoints": state["checkpoints"][:count]}, attempt=1)
    assert CheckpointRegistry(store, JOB).entries() == entries
    assert CheckpointRegistry(store, JOB).best() == entries[-1]

    CheckpointRegistry(store, JOB).commit(named(31))

    assert CheckpointRegistry(store, JOB).entries() == [*entries, named(31)]
    assert len(CheckpointRegistry(store, JOB).state().checkpoints) <= 4


@pytest.mark.usefixtures("small_pages")
def test_an_earlier_release_does_not_take_the_newest_entries_for_all(store: ObjectStore) -> None:
    """It reads the key `checkpoints`, and its garbage collector deletes each folder that no entry there names."""
    for step in range(1, 21):
        CheckpointRegistry(store, JOB).commit(named(step))
    head = ResourceLog(store, f"{JOB}/checkpoints/log").head()
    assert head is not None
    assert head.state["pages"]
    assert "checkpoints" not in head.state

    # It has them there again once no page is left.
    CheckpointRegistry(store, JOB).retire([named(step) for step in range(1, 19)], 1)
    head = ResourceLog(store, f"{JOB}/checkpoints/log").head()
    assert head is not None
    assert [one["name"] for one in head.state["checkpoints"]] == [named(19).name, named(20).name]
    assert registry.NEWEST_ENTRIES not in head.state


@pytest.mark.usefixtures("small_pages")
def test_a_registry_whose_pages_are_lost_can_be_cleared_and_used_again(store: ObjectStore) -> None:
    for step in range(1, 31):
        CheckpointRegistry(store, JOB).commit(named(step))
    for info in list(store.list(f"{JOB}/checkpoints/pages")):
        store.delete(info.key)

    CheckpointRegistry(store, JOB).clear(2)
    CheckpointRegistry(store, JOB).commit(named(1, attempt=2))

    assert CheckpointRegistry(store, JOB).entries() == [named(1, attempt=2)]


@pytest.mark.usefixtures("small_pages")
def test_without_a_final_checkpoint_no_page_is_read(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 31):
        CheckpointRegistry(store, JOB).commit(named(step))
    loaded: list[registry.PageRef] = []
    load = registry.PageTree._load

    def counting(self: registry.PageTree, ref: registry.PageRef) -> dict[str, object]:
        loaded.append(ref)
        return load(self, ref)

    monkeypatch.setattr(registry.PageTree, "_load", counting)
    assert CheckpointRegistry(store, JOB).poll(registry.RegistryView.final) is None
    assert loaded == []


@pytest.mark.usefixtures("small_pages")
def test_who_reads_while_pages_are_replaced_reads_again(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 31):
        CheckpointRegistry(store, JOB).commit(named(step))
    reader = CheckpointRegistry(store, JOB)
    load = registry.PageTree._load

    def replaced_just_before(self: registry.PageTree, ref: registry.PageRef) -> dict[str, object]:
        monkeypatch.undo()
        CheckpointRegistry(open_store(store.settings), JOB).finish(named(2).name, 1)
        return load(self, ref)

    monkeypatch.setattr(registry.PageTree, "_load", replaced_just_before)
    found = reader.find(named(2).name)

    assert found is not None
    assert found.final


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_page_that_is_lost_is_data_loss_and_what_is_elsewhere_is_still_answered(
    store: ObjectStore, damage: str
) -> None:
    for step in range(1, 31):
        CheckpointRegistry(store, JOB).commit(named(step))
    for info in list(store.list(f"{JOB}/checkpoints/pages")):
        if damage == "gone":
            store.delete(info.key)
        else:
            store.put(info.key, b'{"entries": []}')

    with pytest.raises(DataLoss) as lost:
        CheckpointRegistry(store, JOB).entries()
    assert lost.value.specific_reason == "REGISTRY_DAMAGED"
    newest = CheckpointRegistry(store, JOB).newest()
    assert newest is not None
    assert newest.step == 30
    CheckpointRegistry(store, JOB).commit(named(31))


@pytest.mark.usefixtures("small_pages")
def test_a_cleared_registry_names_nothing_and_leaves_no_pages(store: ObjectStore) -> None:
    for step in range(1, 31):
        CheckpointRegistry(store, JOB).commit(named(step))

    CheckpointRegistry(store, JOB).clear(2)

    assert CheckpointRegistry(store, JOB).entries() == []
    assert not list(store.list(f"{JOB}/checkpoints/pages"))
    with pytest.raises(NotFound):
        resolve(store, "checkpoint", named(3).name)
