"""Polling the deployments costs by those that exist, and finds each of them, whichever process created it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from inference_service.deploy import live_deployments
from inference_service.deploy.deployments import Deployments
from inference_service.deploy.live_deployments import ALL_ARE_MARKED, DEPLOYMENTS_IN_TURNS, FOLDER
from inference_service.domain.deployment import Deployment, State
from shared.errors import AlreadyExists, Unavailable
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.inference_server import deployment


def create(store: ObjectStore, name: str, uid: str = "") -> Deployment:
    return Deployments(store).create(replace(deployment(name), uid=uid or f"uid-{name}"))


def remove(store: ObjectStore, name: str) -> None:
    Deployments(store).request(f"deployments/{name}", lambda one: one and replace(one, state=State.GONE))


def names(deployments: Deployments) -> list[str]:
    return [one.name.removeprefix("deployments/") for one in deployments.all()[0]]


def markers(store: ObjectStore) -> list[str]:
    return sorted(info.key.removeprefix(f"{FOLDER}/") for info in store.list(FOLDER))


def forget_markers(store: ObjectStore, *, is_update: bool = False) -> None:
    """Leave the store as an earlier release does, or, with `is_update`, one that has never had markers."""
    store.delete_folder(FOLDER)
    if is_update:
        store.delete(ALL_ARE_MARKED)
    else:
        store.put(ALL_ARE_MARKED, b"")


@pytest.mark.parametrize("gone", [0, 40])
def test_a_poll_costs_by_the_deployments_that_exist(store: ObjectStore, gone: int) -> None:
    for number in range(gone):
        create(store, f"gone{number:02d}")
        remove(store, f"gone{number:02d}")
    store.put(ALL_ARE_MARKED, b"")
    for name in ("a", "b"):
        create(store, name)
    counting = CountingStore(store)
    deployments = Deployments(counting)
    assert names(deployments) == ["a", "b"]
    turns = [min(gone, DEPLOYMENTS_IN_TURNS)] * 2

    for in_turns in turns:
        counting.forget()
        assert names(deployments) == ["a", "b"]
        # The markers, the names in turns, and the next record of each; a log that is not kept open takes four reads.
        assert len(counting.requests) <= 2 + 2 + 4 * in_turns


def test_a_poll_sees_what_was_created_changed_and_removed_since(store: ObjectStore) -> None:
    deployments = Deployments(store)
    assert names(deployments) == []
    create(store, "a")
    create(store, "b")
    assert names(deployments) == ["a", "b"]
    remove(store, "a")
    changed = Deployments(store).request("deployments/b", lambda one: one and replace(one, state=State.DELETING))

    assert deployments.all()[0] == [changed]
    assert markers(store) == ["b.uid-b.json"]
    again = create(store, "a", "uid-2")
    assert deployments.all()[0] == [again, changed]


def test_deployments_of_an_earlier_release_are_found_and_marked(store: ObjectStore) -> None:
    create(store, "a")
    create(store, "b")
    remove(store, "b")
    forget_markers(store)

    assert names(Deployments(store)) == ["a"]
    assert markers(store) == ["a.uid-a.json"]


def test_a_deployment_that_an_earlier_release_creates_meanwhile_is_found_in_turns(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_deployments, "DEPLOYMENTS_IN_TURNS", 2)
    for name in ("a", "b", "c"):
        create(store, name)
        remove(store, name)
    deployments = Deployments(store)
    assert names(deployments) == []
    create(store, "d")
    forget_markers(store)

    for _ in range(3):
        deployments.all()

    assert names(deployments) == ["d"]
    assert markers(store) == ["d.uid-d.json"]


def test_the_first_poll_reads_those_that_exist_and_the_others_in_turns(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_deployments, "DEPLOYMENTS_A_FIRST_TURN", 4)
    for number in range(10):
        create(store, f"gone{number}")
        remove(store, f"gone{number}")
    create(store, "old")  # by an earlier release, beside this one
    forget_markers(store)
    create(store, "a")
    create(store, "z")
    counting = CountingStore(store)
    deployments = Deployments(counting)

    assert names(deployments) == ["a", "z"]
    assert not deployments.has_read_all
    assert len({request.split("/")[1] for request in counting.requests if "/log/" in request}) == 5
    names(deployments)
    assert not deployments.has_read_all
    counting.fails_at = len(counting.requests) + 9
    with pytest.raises(Unavailable):
        deployments.all()
    counting.fails_at = 0
    names(deployments)
    assert names(deployments) == ["a", "old", "z"]
    assert deployments.has_read_all


def test_the_first_poll_after_an_update_finds_all_deployments_and_later_ones_do_not_read_all(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_deployments, "DEPLOYMENTS_A_FIRST_TURN", 2)
    monkeypatch.setattr(live_deployments, "DEPLOYMENTS_IN_TURNS", 1)
    monkeypatch.setattr(live_deployments, "NAMES_AT_ONCE", 3)
    for number in range(8):
        create(store, f"a{number}")
        remove(store, f"a{number}")
    for name in ("x", "y", "z"):
        create(store, name)
    forget_markers(store, is_update=True)
    deployments = Deployments(store)

    assert names(deployments) == ["x", "y", "z"]
    assert deployments.has_read_all
    assert markers(store) == ["x.uid-x.json", "y.uid-y.json", "z.uid-z.json"]

    counting = CountingStore(store)
    for kept in (deployments, Deployments(counting)):
        assert names(kept) == ["x", "y", "z"]
    read = {request.split("/")[1] for request in counting.requests if "/log/" in request}
    assert read == {"a0", "a1", "x", "y", "z"}


def test_deployments_are_not_noted_as_marked_before_the_store_has_taken_their_markers(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store, "a")
    forget_markers(store, is_update=True)
    put = store.put

    def refuse_markers(key: str, data: bytes) -> None:
        if key.startswith(f"{FOLDER}/"):
            raise Unavailable("the store does not answer")
        put(key, data)

    monkeypatch.setattr(store, "put", refuse_markers)
    deployments = Deployments(store)
    assert names(deployments) == ["a"]
    assert not store.exists(ALL_ARE_MARKED)

    monkeypatch.setattr(store, "put", put)
    assert names(deployments) == ["a"]
    assert store.exists(ALL_ARE_MARKED)
    assert markers(store) == ["a.uid-a.json"]


def test_a_page_costs_by_the_deployments_that_exist(store: ObjectStore) -> None:
    for number in range(20):
        create(store, f"a{number:02d}")
        remove(store, f"a{number:02d}")
    for name in ("x", "y", "z"):
        create(store, name)
    counting = CountingStore(store)
    deployments = Deployments(counting)
    deployments.all()
    counting.forget()

    page, token = deployments.page(2, "")

    assert [one.name for one in page] == ["deployments/x", "deployments/y"]
    assert len(counting.requests) <= 1 + 2 * 4
    assert [one.name for one in deployments.page(2, token)[0]] == ["deployments/z"]


def test_a_marker_of_a_refused_creation_goes_after_a_while(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create(store, "a")
    with pytest.raises(AlreadyExists):
        create(store, "a", "refused")
    Deployments(store)._live.mark(replace(deployment("never"), uid="dead"))
    deployments = Deployments(store)
    assert names(deployments) == ["a"]
    assert len(markers(store)) == 3

    monkeypatch.setattr(live_deployments, "DEPLOYMENT_IS_COMING_S", -60.0)  # they count as old at once
    assert names(deployments) == ["a"]

    assert markers(store) == ["a.uid-a.json"]


def test_the_age_of_a_marker_is_measured_by_one_clock(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = Deployments(store)
    deployments._live.mark(replace(deployment("coming"), uid="1"))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)  # ahead of the store's clock

    assert names(deployments) == []

    assert markers(store) == ["coming.1.json"]


class Slow(CountingStore):
    """A store that takes so long for a new log that the marker is removed meanwhile."""

    fails_to_mark_again = False

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        forget_markers(self)
        super().put_if_absent(key, data)
        if self.fails_to_mark_again:
            self.fails_at = len(self.requests) + 1


def test_a_creator_that_pauses_marks_its_deployment_again(store: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(store)
    create(slow, "a")
    assert markers(store) == ["a.uid-a.json"]

    slow.fails_to_mark_again = True
    assert create(slow, "b").uid == "uid-b"
    assert "deployments/b" in caplog.text
    assert names(Deployments(store)) == ["a", "b"]


def test_a_page_lists_a_deployment_whose_marker_the_store_refuses(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        create(store, name)
    forget_markers(store)
    create(store, "c")
    put = store.put

    def refuse_markers(key: str, data: bytes) -> None:
        if key.startswith(f"{FOLDER}/"):
            raise Unavailable("the store does not answer")
        put(key, data)

    monkeypatch.setattr(store, "put", refuse_markers)
    deployments = Deployments(store)
    assert names(deployments) == ["a", "b", "c"]
    assert deployments.has_read_all

    assert [one.name for one in deployments.page(10, "")[0]] == ["deployments/a", "deployments/b", "deployments/c"]


def test_a_store_that_takes_no_marker_hides_no_deployment(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create(store, "a")
    forget_markers(store)

    def put(*_: object) -> None:
        raise Unavailable("the store does not answer")

    monkeypatch.setattr(store, "put", put)
    deployments = Deployments(store)

    for _ in range(3):
        assert names(deployments) == ["a"]
