"""SIGKILL to each that takes part in an upload, an import and a transform, at each of their stages, on each store.

Acknowledged bytes stay, nothing is half visible, each job finishes once, and with the undisturbed run's digest.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion, Upload
from shared.jobs.actor import CALL_TIMEOUT_S
from tests.integration.data_service.client import metadata_of
from tests.support.chunk_sender import CHUNK_BYTES, Sending, commit, send
from tests.support.data_place import digits_stream, normalising
from tests.support.data_strikes import Struck, cases, strike, uploaded
from tests.support.faults import Faults
from tests.support.stores import STORES
from tests.support.waiting import wait_until
from tests.support.waiting_client import waiting

ROWS = 8_000
HALF = 12 * CHUNK_BYTES
PAUSE_S, SLOWLY_S = 0.02, 0.1


@dataclass
class Scene(Struck):
    """`source` is the version that an undisturbed import made of `data`, `imported` its digest."""

    data: bytes = b""
    source: str = ""
    imported: str = ""

    @cached_property
    def transformed(self) -> DatasetVersion:
        """What an undisturbed transform makes of the source."""
        self.gate.open()
        return self.place.transformed(self.source, normalising("gated"))


def scene_of(struck: Struck) -> Scene:
    data = digits_stream(ROWS)
    source = struck.place.imported(uploaded(struck.place, data))
    return Scene(
        struck.place,
        struck.gate,
        struck.store,
        struck.s3,
        data=data,
        source=source.name,
        imported=source.manifest_sha256,
    )


def attempts_after(stage: str, victim: str) -> tuple[int, ...]:
    """An attempt lives in its actor: not in the service, and it outlives a worker; the store's absence may end it."""
    if victim == "actor":
        return (2,)
    # A service that dies as it starts the attempt may have written so, and started nothing.
    return (1, 2) if victim in ("s3", "spare") or (stage, victim) == ("starting", "service") else (1,)


# --- uploads ----------------------------------------------------------------------------------------------------


@cases({"half sent": "client", "all sent": "client"}, quick=["half sent-client-file"])
def test_an_upload_outlives_its_client(scene: Scene, stage: str, victim: str, faults: Faults) -> None:
    assert victim == "client"
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
    faults.add("SIGKILL client", f"upload, {stage}", STORES[scene.store])
    assert place.acknowledged(upload) == whole
    left = place.client.data.GetUpload(pb.GetUploadRequest(name=upload), timeout=60)
    assert left.state == Upload.STATE_OPEN, "a client that went away commits nothing"
    assert send(place.client.data, upload, scene.data, whole, len(scene.data)) == len(scene.data)
    commit(place.client.data, upload, scene.data)
    place.assert_made_once(place.ended(place.start_import(upload)), scene.imported)


@cases(
    {"sending": "service s3", "all sent": "service s3", "committed": "service s3"},
    quick=["sending-service-file"],
)
def test_acknowledged_bytes_outlive(scene: Scene, stage: str, victim: str) -> None:
    place = scene.place
    upload = place.start_upload()
    sending = Sending(place.client.data, upload, scene.data, PAUSE_S)
    if stage == "sending":
        sending.may_end.clear()
    sending.start()
    wait_until(lambda: sending.acknowledged > CHUNK_BYTES, "the first chunks")
    if stage == "sending":
        before = sending.acknowledged
        recover = strike(scene, victim, f"upload, {stage}")
        sending.may_end.set()
        recover()
        assert place.acknowledged(upload) >= before
    sending.finish()
    assert sending.forgotten == []
    assert sending.breaks or (stage, victim) != ("sending", "service")
    if stage == "all sent":
        strike(scene, victim, f"upload, {stage}")()
        assert place.acknowledged(upload) == len(scene.data)
    commit(place.client.data, upload, scene.data)
    if stage == "committed":
        strike(scene, victim, f"upload, {stage}")()
        again = commit(place.client.data, upload, scene.data)
        assert again.size_bytes == len(scene.data)
    place.assert_made_once(place.ended(place.start_import(upload)), scene.imported)


# --- imports ----------------------------------------------------------------------------------------------------


@cases(
    {
        "about to start": "spare",
        "starting": "service actor s3",
        "reading": "service actor s3",
        "ending": "service actor s3",
    },
    quick=["reading-service-file", "reading-actor-file"],
)
def test_an_import_finishes_once(scene: Scene, stage: str, victim: str) -> None:
    """It follows an upload that is still open, which holds it where the test wants it."""
    place, data = scene.place, scene.place.client.data
    place.at_rest()
    upload = place.start_upload()
    if stage in ("reading", "ending"):
        send(data, upload, scene.data, 0, HALF)
    if stage == "about to start":
        strike(scene, victim, f"import, {stage}")()
    started = place.start_import(upload)
    version = place.version_of(started)
    place.at_work()
    if stage in ("reading", "ending"):
        wait_until(lambda: metadata_of(place.operation(started.name)).rows_read > 0, "the first rows")
    place.assert_invisible(version)
    if stage in ("starting", "reading"):
        strike(scene, victim, f"import, {stage}")()
        place.assert_invisible(version)
    half = metadata_of(place.operation(started.name)).rows_read
    # Progress is told twice a second.
    sending = Sending(data, upload, scene.data, SLOWLY_S if stage == "ending" else 0)
    sending.start()
    sending.finish()
    if stage == "ending":
        wait_until(lambda: metadata_of(place.operation(started.name)).rows_read > half, "the last rows")
        # It waits for the commit alone, and hears of it only once it is struck.
        with place.halted():
            commit(data, upload, scene.data)
            place.assert_invisible(version)
            recover = strike(scene, victim, f"import, {stage}")
        recover()
    else:
        commit(data, upload, scene.data)
    done = place.ended(started)
    place.assert_made_once(done, scene.imported)
    assert metadata_of(done).attempt in attempts_after(stage, victim)


@cases({"reading": "client"}, quick=[])
def test_an_import_outlives_the_client_that_waits_for_it(scene: Scene, stage: str, victim: str, faults: Faults) -> None:
    assert victim == "client"
    place, data = scene.place, scene.place.client.data
    place.at_rest()
    upload = place.start_upload()
    send(data, upload, scene.data, 0, HALF)
    request = place.import_request(pb.ImportSource(split="train", arrow=pb.ArrowSource(uri=upload)))
    with waiting(place.service.address, request) as (started, client):
        wait_until(lambda: metadata_of(place.operation(started.name)).rows_read > 0, "the first rows")
        client.kill()
    faults.add("SIGKILL client", f"import, {stage}", STORES[scene.store])
    place.assert_invisible(place.version_of(started))
    send(data, upload, scene.data, HALF, len(scene.data))
    commit(data, upload, scene.data)
    done = place.ended(started)
    place.assert_made_once(done, scene.imported)
    assert metadata_of(done).attempt == 1


# --- transforms -------------------------------------------------------------------------------------------------


@cases(
    {
        "about to start": "spare",
        "starting": "service actor s3",
        "working": "service actor worker s3",
        "last rows": "actor worker",
        "ending": "service actor worker s3",
    },
    quick=[],
)
def test_a_transform_finishes_once(scene: Scene, stage: str, victim: str) -> None:
    """The gate holds its workers where the test wants them."""
    place, gate, wanted = scene.place, scene.gate, scene.transformed
    place.at_rest()
    gate.shut()
    if stage == "about to start":
        strike(scene, victim, f"transform, {stage}")()
    started = place.start_transform(scene.source, normalising("gated"))
    version = place.version_of(started)
    if stage == "starting":
        strike(scene, victim, f"transform, {stage}")()
    # A service that died as it started the attempt leaves an actor that waits `CALL_TIMEOUT_S` for its call.
    wait_until(lambda: bool(gate.waiting()), "a worker at work", CALL_TIMEOUT_S + 120)
    place.assert_invisible(version)
    if stage == "working":
        strike(scene, victim, f"transform, {stage}")()
        place.assert_invisible(version)
    if stage in ("last rows", "ending"):
        gate.open_but_for_the_last()
        all_files = len(wanted.files)
        wait_until(lambda: place.files_of(version) == all_files - 1 and bool(gate.at_the_last()), "the last rows")
    if stage == "last rows":
        strike(scene, victim, f"transform, {stage}")()
        place.assert_invisible(version)
    if stage == "ending":
        # All rows are written, and it hears of the last only once it is struck.
        with place.halted():
            gate.open()
            wait_until(lambda: place.files_of(version) == all_files, "all rows to be written")
            place.assert_invisible(version)
            recover = strike(scene, victim, f"transform, {stage}")
        recover()
    gate.open()
    done = place.ended(started)
    place.assert_made_once(done, wanted.manifest_sha256)
    metadata = pb.TransformVersionMetadata()
    assert done.metadata.Unpack(metadata)
    assert metadata.attempt in attempts_after(stage, victim)


@cases({"working": "client"}, quick=[])
def test_a_transform_outlives_the_client_that_waits_for_it(
    scene: Scene, stage: str, victim: str, faults: Faults
) -> None:
    assert victim == "client"
    place, gate, wanted = scene.place, scene.gate, scene.transformed
    place.at_rest()
    gate.shut()
    with waiting(place.service.address, place.transform_request(scene.source, normalising("gated"))) as (
        started,
        client,
    ):
        wait_until(lambda: bool(gate.waiting()), "a worker at work", 120)
        client.kill()
    faults.add("SIGKILL client", f"transform, {stage}", STORES[scene.store])
    place.assert_invisible(place.version_of(started))
    gate.open()
    place.assert_made_once(place.ended(started), wanted.manifest_sha256)
