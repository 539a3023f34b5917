"""How uploads end: nobody is told that one is gone before it is, and a sweep looks only at those with bytes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import pytest

from data_service.uploads import chunks
from data_service.uploads import uploads as ending
from data_service.uploads.upload import (
    COMMITTED_FOR_S,
    OPEN_FOR_S,
    UploadRecord,
    UploadState,
    has_expired,
    log_of,
    mark_used,
)
from data_service.uploads.uploads import LATE_WRITES_S, UPLOAD_IS_COMING_S, LiveUploads, UploadFinisher, Uploads
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import Cancelled, FailedPrecondition, NotFound, Unavailable
from shared.storage import ObjectStore
from tests.support.upload_calls import chunk, committed, send, send_all, sha256, started

DATA = bytes(range(40))
VERSION = "datasets/d/versions/v1"
NEVER: list[str] = []


def while_looking(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], references: list[str]) -> None:
    """Whoever aborts finds these `references`, and meanwhile, once, `act` happens."""
    acts = [act]

    def poll(_store: ObjectStore, _name: str) -> list[str]:
        if acts:
            acts.pop()()
        return references

    monkeypatch.setattr(ending, "live_references", poll)


def test_a_commit_and_chunks_during_an_abort_that_is_refused_are_asked_to_come_again(
    store: ObjectStore, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA[:20])
    refused: list[Unavailable] = []

    def write() -> None:
        calls: list[Callable[[], object]] = [
            lambda: send(uploads, [chunk(name, 20, DATA[20:])]),
            lambda: uploads.commit(name, 20, sha256(DATA[:20])),
            lambda: mark_used(store, name, IMPORT_KIND, uuid.uuid4().hex, VERSION),
        ]
        for call in calls:
            with pytest.raises(Unavailable) as raised:
                call()
            refused.append(raised.value)

    while_looking(monkeypatch, write, [VERSION])
    with pytest.raises(FailedPrecondition, match=VERSION):
        uploads.abort(name)
    assert [error.retry_after_s for error in refused] == [0.5] * 3
    assert send(uploads, [chunk(name, 20, DATA[20:])]) == [len(DATA)]
    assert uploads.commit(name, len(DATA), sha256(DATA)).record.state == "COMMITTED"


def test_an_abort_that_another_refused_meanwhile_takes_nothing_away(
    store: ObjectStore, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other found a user, and after it somebody began a third one: of users since then the first knows nothing."""
    name = committed(uploads, DATA)

    def refuse_and_begin_again() -> None:
        log = log_of(store, name)
        log.update(lambda record: {**record.state, "ending": ""} if record else None)
        log.update(lambda record: {**record.state, "ending": "third"} if record else None)

    while_looking(monkeypatch, refuse_and_begin_again, NEVER)
    with pytest.raises(FailedPrecondition):
        uploads.abort(name)
    assert uploads.get(name).record.state is UploadState.COMMITTED
    assert list(store.list(f"{name}/chunks"))


def test_a_second_abort_that_finds_a_user_cannot_bring_back_what_is_gone(
    store: ObjectStore, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = committed(uploads, DATA)
    while_looking(monkeypatch, lambda: UploadFinisher(store).abort(name), NEVER)
    uploads.abort(name)
    with pytest.raises(NotFound):
        uploads.get(name)


def test_a_collection_leaves_the_upload_that_its_owner_began_anew_under_the_name_of_an_expired_one(
    store: ObjectStore, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = committed(uploads, DATA)
    expired = uploads.get(name).record.uid

    def begin_anew_meanwhile(store: ObjectStore, record: UploadRecord, now: float) -> bool:
        answer = has_expired(store, record, now)
        if uploads.get(name).record.uid == expired:
            uploads.abort(name)
            started(uploads)
            send_all(uploads, name, DATA)
        return answer

    monkeypatch.setattr(ending, "has_expired", begin_anew_meanwhile)
    assert UploadFinisher(store).collect(time.time() + COMMITTED_FOR_S + 60) == []
    assert uploads.get(name).acknowledged_size == len(DATA)


class Requests:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for method in ("get", "list", "folders", "size", "put", "put_if_absent", "delete"):
            self._count(monkeypatch, method)

    def _count(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        real = getattr(ObjectStore, method)

        def counted(store: ObjectStore, *given: object, **named: object) -> object:
            self.count += 1
            return real(store, *given, **named)

        monkeypatch.setattr(ObjectStore, method, counted)


def test_uploads_that_are_long_gone_cost_a_collection_nothing(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        uploads.abort(started(uploads, f"u{number}"))
    later = time.time() + LATE_WRITES_S + 1
    uploads.collect(later)
    requests = Requests(monkeypatch)
    uploads.collect(later)
    assert requests.count == 1


def test_each_pass_looks_at_a_bounded_number_and_the_next_goes_on(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "UPLOADS_A_PASS", 2)
    names = {started(uploads, f"u{number}") for number in range(5)}
    later = time.time() + OPEN_FOR_S + 60
    passes = [uploads.collect(later) for _ in range(3)]
    assert [len(one) for one in passes] == [2, 2, 1]
    assert {name for one in passes for name in one} == names


def test_one_upload_that_cannot_be_swept_does_not_keep_the_others(store: ObjectStore, uploads: Uploads) -> None:
    names = [started(uploads, f"u{number}") for number in range(3)]
    store.put(LiveUploads(store).markers()[0], b"no JSON")
    assert len(uploads.collect(time.time() + OPEN_FOR_S + 60)) == len(names) - 1


def test_bytes_left_by_a_process_that_died_during_the_removal_are_swept(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    log_of(store, name).update(lambda record: {**record.state, "state": "GONE"} if record else None)
    uploads.collect(time.time())
    assert not list(store.list(f"{name}/chunks"))


def test_a_marker_waits_for_its_upload_but_not_for_ever(store: ObjectStore, uploads: Uploads) -> None:
    live = LiveUploads(store)
    live.mark("0" * 32, "datasets/d/uploads/u")
    uploads.collect(time.time())
    assert live.markers()
    gone = time.time() + UPLOAD_IS_COMING_S + 1
    uploads.collect(gone)
    uploads.collect(gone + LATE_WRITES_S + 1)
    assert not live.markers()


def presigned(store: ObjectStore, uploads: Uploads) -> str:
    name = started(uploads)
    log_of(store, name).update(lambda record: {**record.state, "presigned": True} if record else None)
    for offset in range(0, len(DATA), 10):
        store.put(f"{uploads.get(name).record.chunks_prefix}/{offset:020d}", DATA[offset : offset + 10])
    return name


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chunks that are read; the first reading of the third finds no store."""
    read: list[str] = []
    get = ObjectStore.get

    def noted(self: ObjectStore, key: str) -> bytes:
        if "/chunks/" in key:
            first = key not in read
            read.append(key)
            if first and key.endswith(f"/{20:020d}"):
                raise Unavailable("down")
        return get(self, key)

    monkeypatch.setattr(ObjectStore, "get", noted)
    return read


def test_a_commit_of_parts_goes_on_where_it_failed(store: ObjectStore, uploads: Uploads, reads: list[str]) -> None:
    name = presigned(store, uploads)
    with pytest.raises(Unavailable):
        uploads.commit(name, len(DATA), sha256(DATA))
    assert uploads.get(name).hashed_size == 20
    before = len(reads)
    assert uploads.commit(name, len(DATA), sha256(DATA)).record.state == "COMMITTED"
    assert {int(key.rpartition("/")[2]) for key in reads[before:]} == {20, 30}
    assert uploads.get(name).hashed_size == len(DATA)


def test_a_part_put_again_between_two_commits_is_read_again(
    store: ObjectStore, uploads: Uploads, reads: list[str]
) -> None:
    name = presigned(store, uploads)
    other = b"\xff" * 10 + DATA[10:]
    with pytest.raises(Unavailable):
        uploads.commit(name, len(other), sha256(other))
    store.put(f"{uploads.get(name).record.chunks_prefix}/{0:020d}", other[:10])
    before = len(reads)
    assert uploads.commit(name, len(other), sha256(other)).record.state == "COMMITTED"
    assert len(set(reads[before:])) == 4


def test_a_commit_that_nobody_waits_for_stops_at_the_next_part(
    store: ObjectStore, uploads: Uploads, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "BLOCKS_AHEAD", 1)
    name = presigned(store, uploads)
    with pytest.raises(Cancelled):
        uploads.commit(name, len(DATA), sha256(DATA), lambda: bool(reads))
    assert len(set(reads)) <= 2
    assert uploads.get(name).hashed_size == 10
    assert uploads.get(name).record.state is UploadState.OPEN
