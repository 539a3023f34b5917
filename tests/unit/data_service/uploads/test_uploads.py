"""An upload's life: started, committed or aborted, expired."""

from __future__ import annotations

import time
import uuid

import pytest

from data_service.datasets import Datasets
from data_service.deletion import Deletions
from data_service.uploads import upload as references
from data_service.uploads.upload import (
    COMMITTED_FOR_S,
    OPEN_FOR_S,
    Upload,
    live_references,
    log_of,
    mark_used,
    unmark,
    using,
)
from data_service.uploads.uploads import (
    LATE_WRITES_S,
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    PresignedPut,
    UploadPart,
    Uploads,
    parts_of,
)
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import AlreadyExists, DataLoss, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, succeed
from shared.storage import ObjectStore
from shared.storage.presigning import Presigner
from tests.support.upload_calls import chunk, committed, send, send_all, sha256, started
from tests.support.upload_server import DATASET, uploads_of

DATA = bytes(range(40))
EMPTY = sha256(b"")
VERSION = "datasets/d/versions/v1"


class Presigning(Presigner):
    """Of a store that is a folder."""

    def __init__(self) -> None:
        pass

    def put_url(self, key: str) -> str:
        return f"https://store/{key}"


def start(uploads: Uploads, upload_id: str = "u", request_id: str = "", body: str = "body") -> str:
    return uploads.start(DATASET, upload_id, request_id=request_id, body_sha256=body)[0].record.name


def import_job(store: ObjectStore, upload: str) -> JobRecord:
    """A job that reads the upload."""
    job = JobRecord(uid=uuid.uuid4().hex, name=VERSION, spec={}, create_time=0, update_time=0)
    mark_used(store, upload, IMPORT_KIND, job.uid, VERSION)
    return Jobs(store, IMPORT_KIND).create(VERSION, job)


def finish(store: ObjectStore) -> None:
    jobs = Jobs(store, IMPORT_KIND)
    jobs.transition(VERSION, lambda job: begin_attempt(job, 0))
    jobs.transition(VERSION, lambda job: succeed(job, {}, 0))


def test_a_new_upload_is_open_and_empty(uploads: Uploads) -> None:
    upload = uploads.get(start(uploads))
    assert upload.record.state == "OPEN"
    assert upload.acknowledged_size == 0
    assert upload.expire_time == pytest.approx(upload.record.create_time + OPEN_FOR_S)


def test_an_id_that_the_server_chooses_is_new_each_time(uploads: Uploads) -> None:
    names = {start(uploads, "") for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("datasets/d/uploads/u-") for name in names)


def test_a_taken_id_is_refused(uploads: Uploads) -> None:
    start(uploads)
    with pytest.raises(AlreadyExists):
        start(uploads)


def test_the_same_request_gets_the_first_answer(uploads: Uploads) -> None:
    request_id = str(uuid.uuid4())
    first = start(uploads, "", request_id)
    send_all(uploads, first, DATA)
    assert start(uploads, "", request_id) == first
    assert uploads.get(first).acknowledged_size == len(DATA)


def test_a_repeated_start_of_a_committed_upload_has_no_urls_to_put_its_parts_again(
    store: ObjectStore, uploads: Uploads
) -> None:
    presigning = Uploads(store, Datasets(store), Presigning())
    request_id = str(uuid.uuid4())

    def begin() -> tuple[Upload, list[UploadPart]]:
        wanted = PresignedPut(len(DATA), 0)
        return presigning.start(DATASET, "u", request_id=request_id, body_sha256="body", presigned=wanted)

    upload, parts = begin()
    assert [part.url for part in parts] == [f"https://store/{upload.record.chunks_prefix}/{0:020d}"]
    store.put(f"{upload.record.chunks_prefix}/{0:020d}", DATA)
    uploads.commit(upload.record.name, len(DATA), sha256(DATA))
    again, parts = begin()
    assert (again.record.state, parts) == ("COMMITTED", [])


def test_a_request_id_with_another_body_is_refused(uploads: Uploads) -> None:
    request_id = str(uuid.uuid4())
    start(uploads, "a", request_id)
    with pytest.raises(AlreadyExists, match="request_id"):
        start(uploads, "b", request_id, body="other")


@pytest.mark.parametrize(("parent", "upload_id"), [("d", "u"), (DATASET, "U"), (DATASET, "../x")])
def test_a_malformed_name_is_refused(uploads: Uploads, parent: str, upload_id: str) -> None:
    with pytest.raises(InvalidArgument):
        uploads.start(parent, upload_id, request_id="", body_sha256="")


def test_an_upload_needs_its_dataset(uploads: Uploads) -> None:
    with pytest.raises(NotFound):
        uploads.start("datasets/other", "u", request_id="", body_sha256="")


def test_a_commit_fixes_size_and_digest(uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    upload = uploads.get(name)
    assert (upload.record.size_bytes, upload.record.sha256) == (len(DATA), sha256(DATA))
    assert upload.acknowledged_size == len(DATA)
    assert upload.expire_time == pytest.approx(upload.record.update_time + COMMITTED_FOR_S)


def test_the_same_commit_again_gives_the_same_answer(uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    assert uploads.commit(name, len(DATA), sha256(DATA).upper()) == uploads.get(name)


@pytest.mark.parametrize(("size", "digest"), [(39, sha256(DATA)), (40, EMPTY)], ids=["size", "digest"])
def test_another_commit_of_a_committed_upload_is_refused(uploads: Uploads, size: int, digest: str) -> None:
    name = committed(uploads, DATA)
    with pytest.raises(FailedPrecondition, match="was committed with 40 bytes"):
        uploads.commit(name, size, digest)


@pytest.mark.parametrize("size", [39, 41])
def test_a_commit_of_another_size_than_is_there_is_refused(uploads: Uploads, size: int) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA)
    with pytest.raises(FailedPrecondition, match=f"has 40 bytes, not {size}"):
        uploads.commit(name, size, sha256(DATA))
    assert uploads.get(name).record.state == "OPEN"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_commit_of_another_digest_is_data_loss(store: ObjectStore, uploads: Uploads, restarted: bool) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA)
    with pytest.raises(DataLoss, match="abort"):
        (uploads_of(store) if restarted else uploads).commit(name, len(DATA), EMPTY)
    assert uploads.get(name).record.state == "OPEN"


@pytest.mark.parametrize(
    ("size", "digest", "field"), [(-1, EMPTY, "size_bytes"), (0, "abc", "sha256"), (0, "", "sha256")]
)
def test_a_malformed_commit_is_refused(uploads: Uploads, size: int, digest: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        uploads.commit(start(uploads), size, digest)
    assert raised.value.fields[0][0] == field


def test_an_upload_may_hold_no_byte_at_all(uploads: Uploads) -> None:
    assert uploads.commit(start(uploads), 0, EMPTY).record.state == "COMMITTED"


def test_a_commit_does_not_read_what_arrived_in_order_in_this_process(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA)
    read: list[str] = []
    get = ObjectStore.get

    def noted(self: ObjectStore, key: str) -> bytes:
        read.append(key)
        return get(self, key)

    monkeypatch.setattr(ObjectStore, "get", noted)
    uploads.commit(name, len(DATA), sha256(DATA))
    assert not [key for key in read if "/chunks/" in key]


def test_an_aborted_upload_is_gone_with_its_bytes_and_its_id_is_free(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    uploads.abort(name)
    assert not list(store.list(f"{name}/chunks"))
    for call in (uploads.get, uploads.abort):
        with pytest.raises(NotFound):
            call(name)
    assert started(uploads) == name
    assert uploads.get(name).acknowledged_size == 0
    assert uploads.get(name).record.state == "OPEN"


def test_a_chunk_written_late_is_not_in_the_next_upload_of_the_id(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA)
    left = next(iter(store.list(f"{name}/chunks"))).key
    uploads.abort(name)
    started(uploads)
    store.put(left, b"late")
    assert uploads.get(name).acknowledged_size == 0
    uploads.collect(time.time() + LATE_WRITES_S + 1)
    assert not store.exists(left)


def test_an_upload_that_an_import_reads_is_not_aborted(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    import_job(store, name)
    with pytest.raises(FailedPrecondition, match=VERSION):
        uploads.abort(name)
    assert uploads.get(name).record.state == "COMMITTED"
    finish(store)
    uploads.abort(name)


def test_a_refused_abort_leaves_an_open_upload_open(store: ObjectStore, uploads: Uploads) -> None:
    name = started(uploads)
    import_job(store, name)
    with pytest.raises(FailedPrecondition):
        uploads.abort(name)
    assert send(uploads, [chunk(name, 0, b"a")]) == [1]


@pytest.mark.parametrize("name_taken_again", [False, True])
def test_an_import_that_was_deleted_reads_nothing_more(
    store: ObjectStore, uploads: Uploads, name_taken_again: bool
) -> None:
    name = committed(uploads, DATA)
    import_job(store, name)
    finish(store)
    jobs = Jobs(store, IMPORT_KIND)
    Deletions(store, jobs).delete(VERSION)
    if name_taken_again:
        jobs.create(VERSION, JobRecord(uid=uuid.uuid4().hex, name=VERSION, spec={}, create_time=0, update_time=0))
    uploads.abort(name)


def test_a_marker_counts_before_its_job_is_made_but_not_for_long(
    store: ObjectStore, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = committed(uploads, DATA)
    mark_used(store, name, IMPORT_KIND, uuid.uuid4().hex, VERSION)
    assert live_references(store, name) == [VERSION]
    monkeypatch.setattr(references, "JOB_IS_COMING_S", 0.0)
    assert live_references(store, name) == []
    assert not list(store.list(f"{name}/users"))


def test_an_unmarked_upload_is_free(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    job = import_job(store, name)
    unmark(store, name, IMPORT_KIND, job.uid)
    assert live_references(store, name) == []


def test_a_refused_call_leaves_the_marker_of_the_job_that_an_equal_call_made(
    store: ObjectStore, uploads: Uploads
) -> None:
    name = committed(uploads, DATA)
    job = import_job(store, name)
    log_of(store, name).update(lambda record: {**record.state, "ending": "nonce"} if record else None)

    with pytest.raises(Unavailable):
        mark_used(store, name, IMPORT_KIND, job.uid, VERSION)
    assert live_references(store, name) == [VERSION]


def test_a_job_has_its_marker_though_an_equal_call_was_refused_while_it_was_made(
    store: ObjectStore, uploads: Uploads
) -> None:
    name = committed(uploads, DATA)
    job = JobRecord(uid="u1", name=VERSION, spec={}, create_time=0, update_time=0)
    with using(store, name, IMPORT_KIND, job.uid, VERSION):
        with pytest.raises(NotFound), using(store, name, IMPORT_KIND, job.uid, VERSION):
            raise NotFound("of another input")
        Jobs(store, IMPORT_KIND).create(VERSION, job)
    assert live_references(store, name) == [VERSION]


def test_an_upload_that_is_going_cannot_be_used_any_more(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    log = log_of(store, name)
    log.update(lambda record: {**record.state, "ending": "nonce"} if record else None)
    with pytest.raises(Unavailable):
        mark_used(store, name, IMPORT_KIND, uuid.uuid4().hex, VERSION)
    assert not list(store.list(f"{name}/users"))
    # Whoever was taking it away died: the sweep ends it.
    assert uploads.collect(time.time()) == [name]


def test_an_open_upload_expires_a_day_after_its_last_byte(uploads: Uploads) -> None:
    name = started(uploads)
    send_all(uploads, name, DATA)
    last = uploads.get(name).expire_time
    assert uploads.collect(last - 60) == []
    assert uploads.collect(last + 1) == [name]
    with pytest.raises(NotFound):
        uploads.get(name)


def test_a_committed_upload_expires_after_a_week(uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    assert uploads.collect(time.time() + OPEN_FOR_S + 60) == []
    assert uploads.collect(time.time() + COMMITTED_FOR_S + 60) == [name]


def test_an_expired_upload_that_an_import_reads_stays(store: ObjectStore, uploads: Uploads) -> None:
    name = committed(uploads, DATA)
    import_job(store, name)
    later = time.time() + COMMITTED_FOR_S + 60
    assert uploads.collect(later) == []
    finish(store)
    assert uploads.collect(later) == [name]


def test_all_uploads_of_a_dataset_go_together(store: ObjectStore, uploads: Uploads) -> None:
    uid = Datasets(store).get(DATASET).uid
    names = [started(uploads, one) for one in ("a", "b")]
    uploads.abort(names[0])
    uploads.check_unused(DATASET, uid)
    uploads.abort_all(DATASET, uid)
    with pytest.raises(NotFound):
        uploads.get(names[1])


def test_of_all_uploads_of_a_dataset_those_that_imports_read_stay(store: ObjectStore, uploads: Uploads) -> None:
    uid = Datasets(store).get(DATASET).uid
    names = [started(uploads, one) for one in ("a", "b", "c")]
    import_job(store, names[1])
    with pytest.raises(FailedPrecondition, match=VERSION) as refused:
        uploads.check_unused(DATASET, uid)
    assert refused.value.metadata["resource"] == names[1]
    assert [uploads.get(name).record.ending for name in names] == [""] * 3

    uploads.abort_all(DATASET, uid)
    assert uploads.get(names[1]).record.state == "OPEN"
    for name in (names[0], names[2]):
        with pytest.raises(NotFound):
            uploads.get(name)


def test_uploads_of_an_earlier_release_which_name_no_dataset_uid_go_with_their_dataset(
    store: ObjectStore, uploads: Uploads
) -> None:
    name = started(uploads)
    old = {field: value for field, value in uploads.get(name).record.as_state().items() if field != "dataset_uid"}
    log_of(store, name).update(lambda _: old)
    uploads.abort_all(DATASET, "any")
    with pytest.raises(NotFound):
        uploads.get(name)


def test_a_local_directory_has_no_urls(uploads: Uploads) -> None:
    with pytest.raises(FailedPrecondition, match="UploadChunks"):
        uploads.start(DATASET, "u", request_id="", body_sha256="", presigned=PresignedPut(1))


def test_parts_cover_all_bytes_once() -> None:
    parts = parts_of(PresignedPut(3 * MIN_PART_BYTES + 1, MIN_PART_BYTES))
    assert [part.offset for part in parts] == [n * MIN_PART_BYTES for n in range(4)]
    assert parts[-1].size_bytes == 1
    assert [part.size_bytes for part in parts_of(PresignedPut(100 << 20))] == [64 << 20, 36 << 20]


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (PresignedPut(0), "size_bytes"),
        (PresignedPut(1, MIN_PART_BYTES - 1), "part_size_bytes"),
        (PresignedPut(1, MAX_PART_BYTES + 1), "part_size_bytes"),
        (PresignedPut(2_001 * MIN_PART_BYTES, MIN_PART_BYTES), "part_size_bytes"),
    ],
    ids=["no bytes", "small parts", "large parts", "many parts"],
)
def test_parts_that_cannot_be_are_refused(wanted: PresignedPut, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parts_of(wanted)
    assert raised.value.fields[0][0] == f"presigned.{field}"
