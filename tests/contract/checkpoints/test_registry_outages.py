"""A registry that is cut off between any two requests of a change is a valid one, of before the change or after it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, registry
from shared.errors import Unavailable
from shared.resource_log import HINT
from shared.storage import ObjectStore
from tests.support.checkpoint_samples import JOB, entry
from tests.support.counting_store import CountingStore

Change = Callable[[CheckpointRegistry], object]
# With three entries on a page and two in the log: a tree of three levels, where the next entry makes a page.
ENTRIES = 31


def named(step: int, attempt: int = 1) -> CheckpointEntry:
    return entry(step, attempt=attempt, name=f"step-{step:08d}", validation_accuracy=step / 100)


@pytest.fixture
def committed(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> list[CheckpointEntry]:
    monkeypatch.setattr(registry, "PAGE_ENTRIES", 3)
    monkeypatch.setattr(registry, "KEPT_ENTRIES", 2)
    monkeypatch.setattr(registry, "FAN_OUT", 3)
    opened = CheckpointRegistry(store, JOB)
    for step in range(1, ENTRIES + 1):
        opened.commit(named(step))
    assert max(ref.level for ref in opened.state().pages) == 3
    return opened.entries()


def added(entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
    return [*entries, named(ENTRIES + 1)]


def replaced(entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
    return [*(one for one in entries if one.step != 5), replace(named(5), folder="again")]


def retired(entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
    return [one for one in entries if one.step not in (5, 6)]


def finished(entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
    return [replace(one, final=True) if one.step == 5 else one for one in entries]


def put_back(store: ObjectStore, state: dict[str, bytes]) -> None:
    """Make the store what it was. Of what it has, only the log's hint is ever written over."""
    there = {info.key for info in store.list(JOB)}
    for key in there - state.keys():
        store.delete(key)
    for key in state.keys() - there | {f"{JOB}/checkpoints/log/{HINT}"}:
        store.put(key, state[key])


CHANGES: dict[str, tuple[Change, Callable[[list[CheckpointEntry]], list[CheckpointEntry]]]] = {
    "commit": (lambda one: one.commit(named(ENTRIES + 1)), added),
    "commit again": (lambda one: one.commit(replace(named(5), folder="again")), replaced),
    "retire": (lambda one: one.retire([named(5), named(6)], 1), retired),
    "finish": (lambda one: one.finish(named(5).name, 1), finished),
    "clear": (lambda one: one.clear(2), lambda _: []),
}


@pytest.mark.parametrize("is_done", [False, True], ids=["not done", "done and not answered"])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_that_is_cut_off_at_any_request_can_be_made_again(
    store: ObjectStore, committed: list[CheckpointEntry], kind: str, is_done: bool
) -> None:
    change, made_of = CHANGES[kind]
    before, after = committed, made_of(committed)
    state = {info.key: store.get(info.key) for info in store.list(JOB)}
    fails_at, cut_off = 0, True
    while cut_off:
        fails_at += 1
        put_back(store, state)
        failing = CountingStore(store)
        failing.fails_at, failing.is_done = fails_at, is_done
        with suppress(Unavailable):
            change(CheckpointRegistry(failing, JOB))
        cut_off = len(failing.requests) >= fails_at

        left = CheckpointRegistry(store, JOB).entries()
        assert left in (before, after)
        assert CheckpointRegistry(store, JOB).newest() == max(left, key=lambda one: one.step, default=None)
        change(CheckpointRegistry(store, JOB))
        assert CheckpointRegistry(store, JOB).entries() == after
        CheckpointRegistry(store, JOB).settle()
        assert not CheckpointRegistry(store, JOB).state().retiring
    assert fails_at > 3
