"""SIGKILL to each that takes part in an upload, an import and a transform, at each of their stages, on S3.

Acknowledged bytes stay, nothing is half visible, each job finishes once, and with the undisturbed run's digest.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import Upload
from shared.storage.opening import ensure_bucket
from tests.integration.data_service.client import metadata_of
from tests.support.chunk_sender import CHUNK_BYTES, Sending, commit, send
from tests.support.data_place import DataPlace, Gate, data_place, digits_stream, normalising
from tests.support.killable_s3 import KillableS3, killable_s3
from tests.support.ray_head import RayHead
from tests.support.s3_server import S3Program, name_under_test
from tests.support.waiting import wait_until

ROWS = 8_000
HALF = 12 * CHUNK_BYTES
PAUSE_S = 0.02
S3_AWAY_S = 5.0
chaos = pytest.mark.chaos
S3 = name_under_test()


@dataclass
class Scene:
    """`imported` and `transformed` are the digests of undisturbed runs; `source` is the version they made first."""

    place: DataPlace
    s3: KillableS3
    gate: Gate
    data: bytes
    source: str
    imported: str
    transformed: str


@pytest.fixture(scope="module")
def scene(
    s3_program: S3Program, gate: Gate, data_head: RayHead, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("kills")
    with killable_s3(s3_program, folder / "s3") as s3:
        settings = s3.settings(f"s3://millrace/{uuid.uuid4().hex}")
        ensure_bucket(settings)
        with data_place(settings, data_head, folder / "data") as place:
            yield undisturbed(place, s3, gate)


def undisturbed(place: DataPlace, s3: KillableS3, gate: Gate) -> Scene:
    data = digits_stream(ROWS)
    upload = place.start_upload()
    assert send(place.client.data, upload, data, 0, len(data)) == len(data)
    commit(place.client.data, upload, data)
    source = place.imported(upload)
    gate.open()
    transformed = place.transformed(source.name, normalising("gated"))
    return Scene(place, s3, gate, data, source.name, source.manifest_sha256, transformed.manifest_sha256)


Strike = Callable[[Scene], None]


def strike_service(scene: Scene) -> None:
    scene.place.strike_service()


def strike_actor(scene: Scene) -> None:
    scene.place.strike("ray::AttemptActor.run")


def strike_worker(scene: Scene) -> None:
    """One that makes rows."""
    pids = scene.gate.waiting()[:1]
    assert pids
    scene.place.strike_pids(pids)


def strike_s3(scene: Scene) -> None:
    """Returns when it is back."""
    scene.s3.kill_for(S3_AWAY_S).join()


def attempts_after(strike: Strike) -> tuple[int, ...]:
    """An attempt lives in its actor: not in the service, and it outlives a worker; the store's absence may end it."""
    if strike is strike_actor:
        return (2,)
    return (1, 2) if strike is strike_s3 else (1,)


# --- uploads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["half sent", pytest.param("all sent", marks=chaos)])
def test_an_upload_outlives_its_client(scene: Scene, stage: str) -> None:
    place, size = scene.place, len(scene.data) if stage == "all sent" else HALF
    upload = place.start_upload()
    command = [sys.executable, "-m", "tests.support.chunk_sender", place.service.address, upload]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        # The last chunk begun is never whole.
        sender.stdin.write(scene.data[:size])
        sender.stdin.flush()
        whole = size - size % CHUNK_BYTES
        while int(sender.stdout.readline()) < whole:
            pass
        sender.kill()
    assert place.acknowledged(upload) == whole
    left = place.client.data.GetUpload(pb.GetUploadRequest(name=upload), timeout=10)
    assert left.state == Upload.STATE_OPEN, "a client that went away commits nothing"
    assert send(place.client.data, upload, scene.data, whole, len(scene.data)) == len(scene.data)
    commit(place.client.data, upload, scene.data)
    place.assert_made_once(place.ended(place.start_import(upload)), scene.imported)


UPLOAD_STRIKES = [
    pytest.param("sending", strike_service, id="sending-service"),
    pytest.param("sending", strike_s3, id=f"sending-{S3}", marks=chaos),
    pytest.param("all sent", strike_service, id="all sent-service", marks=chaos),
    pytest.param("all sent", strike_s3, id=f"all sent-{S3}", marks=chaos),
    pytest.param("committed", strike_service, id="committed-service", marks=chaos),
    pytest.param("committed", strike_s3, id=f"committed-{S3}", marks=chaos),
]


@pytest.mark.parametrize(("stage", "strike"), UPLOAD_STRIKES)
def test_acknowledged_bytes_outlive(scene: Scene, stage: str, strike: Strike) -> None:
    place = scene.place
    upload = place.start_upload()
    sending = Sending(place.client.data, upload, scene.data, PAUSE_S)
    sending.start()
    wait_until(lambda: sending.acknowledged > CHUNK_BYTES, "the first chunks", 30)
    if stage == "sending":
        before = sending.acknowledged
        strike(scene)
        assert place.acknowledged(upload) >= before
    sending.finish()
    assert sending.forgotten == []
    if stage == "all sent":
        strike(scene)
        assert place.acknowledged(upload) == len(scene.data)
    commit(place.client.data, upload, scene.data)
    if stage == "committed":
        strike(scene)
        again = commit(place.client.data, upload, scene.data)
        assert again.size_bytes == len(scene.data)
    place.assert_made_once(place.ended(place.start_import(upload)), scene.imported)


# --- imports ----------------------------------------------------------------------------------------------------

IMPORT_STRIKES = [
    pytest.param("starting", strike_service, id="starting-service", marks=chaos),
    pytest.param("starting", strike_actor, id="starting-actor", marks=chaos),
    pytest.param("starting", strike_s3, id=f"starting-{S3}", marks=chaos),
    pytest.param("reading", strike_service, id="reading-service", marks=chaos),
    pytest.param("reading", strike_actor, id="reading-actor", marks=chaos),
    pytest.param("reading", strike_s3, id=f"reading-{S3}"),
    pytest.param("ending", strike_service, id="ending-service", marks=chaos),
    pytest.param("ending", strike_actor, id="ending-actor", marks=chaos),
    pytest.param("ending", strike_s3, id=f"ending-{S3}", marks=chaos),
]


@pytest.mark.parametrize(("stage", "strike"), IMPORT_STRIKES)
def test_an_import_finishes_once(scene: Scene, stage: str, strike: Strike) -> None:
    """It follows an upload that is still open, which holds it where the test wants it."""
    place = scene.place
    upload = place.start_upload()
    if stage != "starting":
        send(place.client.data, upload, scene.data, 0, HALF)
    started = place.start_import(upload)
    version = place.version_of(started)
    wait_until(lambda: bool(place.head.processes("ray::AttemptActor.run")), "the attempt", 60)
    if stage != "starting":
        wait_until(lambda: metadata_of(place.operation(started.name)).rows_read > 0, "the first rows", 60)
    place.assert_invisible(version)
    if stage != "ending":
        strike(scene)
        place.assert_invisible(version)
    sending = Sending(place.client.data, upload, scene.data, 0)
    sending.start()
    sending.finish()
    commit(place.client.data, upload, scene.data)
    if stage == "ending":
        # It may be done by now: then the strike must leave it so.
        if strike is strike_actor:
            place.strike_pids(place.head.processes("ray::AttemptActor.run"))
        else:
            strike(scene)
    done = place.ended(started)
    place.assert_made_once(done, scene.imported)
    if stage == "reading":
        assert metadata_of(done).attempt in attempts_after(strike)


# --- transforms -------------------------------------------------------------------------------------------------

TRANSFORM_STRIKES = [
    pytest.param("starting", strike_service, id="starting-service", marks=chaos),
    pytest.param("starting", strike_actor, id="starting-actor", marks=chaos),
    pytest.param("starting", strike_s3, id=f"starting-{S3}", marks=chaos),
    pytest.param("working", strike_service, id="working-service", marks=chaos),
    pytest.param("working", strike_actor, id="working-actor", marks=chaos),
    pytest.param("working", strike_worker, id="working-worker", marks=chaos),
    pytest.param("working", strike_s3, id=f"working-{S3}", marks=chaos),
    pytest.param("ending", strike_service, id="ending-service", marks=chaos),
    pytest.param("ending", strike_s3, id=f"ending-{S3}", marks=chaos),
]


@pytest.mark.parametrize(("stage", "strike"), TRANSFORM_STRIKES)
def test_a_transform_finishes_once(scene: Scene, stage: str, strike: Strike) -> None:
    """The gate holds its workers where the test wants them."""
    place = scene.place
    scene.gate.shut()
    started = place.start_transform(scene.source, normalising("gated"))
    version = place.version_of(started)
    if stage == "starting":
        strike(scene)
    wait_until(lambda: bool(scene.gate.waiting()), "a worker at work", 90)
    place.assert_invisible(version)
    if stage == "working":
        strike(scene)
        place.assert_invisible(version)
    scene.gate.open()
    if stage == "ending":
        strike(scene)
    done = place.ended(started)
    place.assert_made_once(done, scene.transformed)
    if stage == "working":
        metadata = pb.TransformVersionMetadata()
        assert done.metadata.Unpack(metadata)
        assert metadata.attempt in attempts_after(strike)
