"""A full disk: what does not fit is refused, what was acknowledged stays, and work goes on once there is room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import Jobs
from shared.settings import StoreSettings
from shared.storage.object_store import ensure_bucket
from tests.support.chunk_sender import chunks, commit, send
from tests.support.data_place import DataPlace, data_place, digits_stream, normalising
from tests.support.faults import Faults
from tests.support.killable_s3 import killable_s3
from tests.support.ray_head import RayHead
from tests.support.refusals import refused
from tests.support.s3_server import S3Program
from tests.support.small_disk import small_disk
from tests.support.stores import S3_IN_CHAOS, STORES
from tests.support.waiting import wait_until

DISK_MIB = 48
ROWS = 8_000
CAPACITY_FOR_LOGS = 1_000_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    with small_disk(tmp_path / "disk", DISK_MIB) as folder:
        yield folder


@pytest.fixture(params=S3_IN_CHAOS)
def place(request: pytest.FixtureRequest, disk: Path, data_head: RayHead, tmp_path: Path) -> Iterator[DataPlace]:
    """Its store is on that disk: the folder itself, or all that an S3 server keeps."""
    with ExitStack() as stop:
        settings = StoreSettings(url=(disk / "store").as_uri())
        if request.param == "s3":
            program: S3Program = request.getfixturevalue("s3_program")
            settings = stop.enter_context(killable_s3(program, disk)).settings("s3://millrace/full")
            ensure_bucket(settings)
        yield stop.enter_context(data_place(settings, data_head, tmp_path / "service"))


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    """The kind of it, for the table of blows."""
    return STORES[request.node.callspec.params["place"]]


def fill(disk: Path, capacity: int) -> Path:
    """Leave `capacity` bytes free; deleting the file that is returned frees the rest."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - capacity)
    return filler


def test_chunks_that_do_not_fit_are_refused_and_taken_once_there_is_room(
    disk: Path, place: DataPlace, store: str, faults: Faults
) -> None:
    data = digits_stream(ROWS)
    upload = place.start_upload()
    acknowledged = send(place.client.data, upload, data, 0, len(data) // 2)
    filler = fill(disk, CAPACITY_FOR_LOGS)
    faults.add("full disk", "upload", store)
    refusal = refused(lambda: place.client.data.UploadChunks(chunks(upload, data, acknowledged, len(data)), timeout=60))
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.reason == "STORE_FULL"
    durable = place.acknowledged(upload)
    assert acknowledged <= durable < len(data)
    filler.unlink()
    assert send(place.client.data, upload, data, durable, len(data)) == len(data)
    commit(place.client.data, upload, data)
    assert place.imported(upload).row_count == ROWS


@pytest.mark.chaos  # the second attempt comes half a minute after the first
def test_an_import_goes_on_once_there_is_room(disk: Path, place: DataPlace, store: str, faults: Faults) -> None:
    data = digits_stream(ROWS)
    upload = place.start_upload()
    send(place.client.data, upload, data, 0, len(data))
    commit(place.client.data, upload, data)
    filler = fill(disk, CAPACITY_FOR_LOGS)
    faults.add("full disk", "import", store)
    started = place.start_import(upload)
    version = place.version_of(started)
    jobs = Jobs(place.store, IMPORT_KIND)
    wait_until(lambda: jobs.get(version, version).failures > 0, "an attempt that does not fit")
    place.assert_invisible(version)
    filler.unlink()
    digest = place.imported(upload).manifest_sha256
    place.assert_made_once(place.ended(started), digest)


@pytest.mark.chaos  # likewise
def test_a_transform_goes_on_once_there_is_room(disk: Path, place: DataPlace, store: str, faults: Faults) -> None:
    data = digits_stream(ROWS // 2)  # floats take four times the room, and are made twice
    upload = place.start_upload()
    send(place.client.data, upload, data, 0, len(data))
    commit(place.client.data, upload, data)
    source = place.imported(upload).name
    filler = fill(disk, CAPACITY_FOR_LOGS)
    faults.add("full disk", "transform", store)
    started = place.start_transform(source, normalising())
    version = place.version_of(started)
    jobs = Jobs(place.store, IMPORT_KIND)
    wait_until(lambda: jobs.get(version, version).failures > 0, "an attempt that does not fit")
    cause = jobs.get(version, version).error
    assert cause is not None
    assert (cause["kind"], cause["reason"]) == ("ResourceExhausted", "STORE_FULL"), cause
    place.assert_invisible(version)
    assert place.files_of(version) == 0, "what did not fit is taken away"
    filler.unlink()
    done = place.ended(started)
    digest = place.transformed(source, normalising()).manifest_sha256
    place.assert_made_once(done, digest)
