"""SIGKILL to each that takes part in an upload, an import and a transform, at each of their stages, on each store.

Acknowledged bytes stay, nothing is half visible, each job finishes once, and with the undisturbed run's digest.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import pytest

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion, Upload
from shared.jobs.actor import CALL_WITHIN_S
from shared.settings import StoreSettings
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
PAUSE_S, SLOWLY_S = 0.02, 0.1
S3_AWAY_S = 5.0
STORES = {"file": "file", "s3": f"s3-{name_under_test()}"}


@dataclass
class Scene:
    """`source` is the version that an undisturbed import made, `imported` its digest. `s3` is there on S3 alone."""

    place: DataPlace
    gate: Gate
    data: bytes
    source: str
    imported: str
    s3: KillableS3 | None = None

    @cached_property
    def transformed(self) -> DatasetVersion:
        """What an undisturbed transform makes of the source."""
        self.gate.open()
        return self.place.transformed(self.source, normalising("gated"))

    @property
    def struck(self) -> int:
        return self.place.struck + (self.s3.kills if self.s3 else 0)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """On the kind of store that the parameter names."""
    on_store: Scene = request.getfixturevalue(f"scene_on_{request.param}")
    yield on_store
    on_store.gate.open()  # what a failed test left at work would be in the next one's way


@pytest.fixture(scope="module")
def scene_on_file(gate: Gate, data_head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("kills")
    with data_place(StoreSettings(url=(folder / "store").as_uri()), data_head, folder / "data") as place:
        yield undisturbed(place, gate)


@pytest.fixture(scope="module")
def scene_on_s3(
    s3_program: S3Program, gate: Gate, data_head: RayHead, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("kills")
    with killable_s3(s3_program, folder / "s3") as s3:
        settings = s3.settings(f"s3://millrace/{uuid.uuid4().hex}")
        ensure_bucket(settings)
        with data_place(settings, data_head, folder / "data") as place:
            yield undisturbed(place, gate, s3)


def undisturbed(place: DataPlace, gate: Gate, s3: KillableS3 | None = None) -> Scene:
    data = digits_stream(ROWS)
    upload = place.start_upload()
    assert send(place.client.data, upload, data, 0, len(data)) == len(data)
    commit(place.client.data, upload, data)
    source = place.imported(upload)
    return Scene(place, gate, data, source.name, source.manifest_sha256, s3)


# --- who is struck ----------------------------------------------------------------------------------------------

# Waits until who was struck is back.
Recover = Callable[[], None]


def strike_service(scene: Scene) -> Recover:
    scene.place.strike_service()
    return scene.place.service.start


def strike_actor(scene: Scene) -> Recover:
    """The process of the attempt."""
    scene.place.strike_pids(scene.place.at_work())
    return lambda: None


def strike_worker(scene: Scene) -> Recover:
    """One that makes rows: the last, where they are begun."""
    scene.place.strike_pids((scene.gate.at_the_last() or scene.gate.waiting())[:1])
    return lambda: None


def strike_spare(scene: Scene) -> Recover:
    """The process that waits for the next attempt; if there are several, as after a service's death, all."""
    wait_until(lambda: bool(scene.place.spares()), "a spare", 90)
    scene.place.strike_pids(scene.place.spares())
    return lambda: None


def strike_s3(scene: Scene) -> Recover:
    assert scene.s3
    return scene.s3.kill_for(S3_AWAY_S).join


STRIKES: Mapping[str, Callable[[Scene], Recover]] = {
    "service": strike_service,
    "actor": strike_actor,
    "worker": strike_worker,
    "spare": strike_spare,
    "s3": strike_s3,
}


def strike(scene: Scene, victim: str) -> Recover:
    before = scene.struck
    recover = STRIKES[victim](scene)
    assert scene.struck > before
    return recover


def attempts_after(stage: str, victim: str) -> tuple[int, ...]:
    """An attempt lives in its actor: not in the service, and it outlives a worker; the store's absence may end it."""
    if victim == "actor":
        return (2,)
    # A service that dies as it starts the attempt may have written so, and started nothing.
    return (1, 2) if victim in ("s3", "spare") or (stage, victim) == ("starting", "service") else (1,)


def cases(victims: Mapping[str, str], quick: Collection[str]) -> pytest.MarkDecorator:
    """The victims of each stage, on each kind of store. All but the ids that are `quick` are for `make chaos`."""
    every = [
        pytest.param(store, stage, victim, id=name, marks=[] if name in quick else pytest.mark.chaos)
        for store, shown in STORES.items()
        for stage, names in victims.items()
        for victim in names.split()
        if store == "s3" or victim != "s3"
        for name in [f"{stage}-{victim}-{shown}"]
    ]
    return pytest.mark.parametrize(("scene", "stage", "victim"), every, indirect=["scene"])


# --- uploads ----------------------------------------------------------------------------------------------------


@cases({"half sent": "client", "all sent": "client"}, quick=[f"half sent-client-{STORES['s3']}"])
def test_an_upload_outlives_its_client(scene: Scene, stage: str, victim: str) -> None:
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
    assert place.acknowledged(upload) == whole
    left = place.client.data.GetUpload(pb.GetUploadRequest(name=upload), timeout=10)
    assert left.state == Upload.STATE_OPEN, "a client that went away commits nothing"
    assert send(place.client.data, upload, scene.data, whole, len(scene.data)) == len(scene.data)
    commit(place.client.data, upload, scene.data)
    place.assert_made_once(place.ended(place.start_import(upload)), scene.imported)


@cases(
    {"sending": "service s3", "all sent": "service s3", "committed": "service s3"},
    quick=["sending-service-file", f"sending-service-{STORES['s3']}"],
)
def test_acknowledged_bytes_outlive(scene: Scene, stage: str, victim: str) -> None:
    place = scene.place
    upload = place.start_upload()
    sending = Sending(place.client.data, upload, scene.data, PAUSE_S)
    sending.start()
    wait_until(lambda: sending.acknowledged > CHUNK_BYTES, "the first chunks", 30)
    if stage == "sending":
        before = sending.acknowledged
        strike(scene, victim)()
        assert place.acknowledged(upload) >= before
    sending.finish()
    assert sending.forgotten == []
    assert sending.breaks or (stage, victim) != ("sending", "service")
    if stage == "all sent":
        strike(scene, victim)()
        assert place.acknowledged(upload) == len(scene.data)
    commit(place.client.data, upload, scene.data)
    if stage == "committed":
        strike(scene, victim)()
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
    quick=[f"reading-s3-{STORES['s3']}"],
)
def test_an_import_finishes_once(scene: Scene, stage: str, victim: str) -> None:
    """It follows an upload that is still open, which holds it where the test wants it."""
    place, data = scene.place, scene.place.client.data
    place.at_rest()
    upload = place.start_upload()
    if stage in ("reading", "ending"):
        send(data, upload, scene.data, 0, HALF)
    if stage == "about to start":
        strike(scene, victim)()
    started = place.start_import(upload)
    version = place.version_of(started)
    place.at_work()
    if stage in ("reading", "ending"):
        wait_until(lambda: metadata_of(place.operation(started.name)).rows_read > 0, "the first rows", 60)
    place.assert_invisible(version)
    if stage in ("starting", "reading"):
        strike(scene, victim)()
        place.assert_invisible(version)
    half = metadata_of(place.operation(started.name)).rows_read
    # Progress is told twice a second.
    sending = Sending(data, upload, scene.data, SLOWLY_S if stage == "ending" else 0)
    sending.start()
    sending.finish()
    if stage == "ending":
        wait_until(lambda: metadata_of(place.operation(started.name)).rows_read > half, "the last rows", 60)
        # It waits for the commit alone, and hears of it only once it is struck.
        with place.halted():
            commit(data, upload, scene.data)
            place.assert_invisible(version)
            recover = strike(scene, victim)
        recover()
    else:
        commit(data, upload, scene.data)
    done = place.ended(started)
    place.assert_made_once(done, scene.imported)
    assert metadata_of(done).attempt in attempts_after(stage, victim)


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
        strike(scene, victim)()
    started = place.start_transform(scene.source, normalising("gated"))
    version = place.version_of(started)
    if stage == "starting":
        strike(scene, victim)()
    # A service that died as it started the attempt leaves an actor that waits `CALL_WITHIN_S` for its call.
    wait_until(lambda: bool(gate.waiting()), "a worker at work", CALL_WITHIN_S + 120)
    place.assert_invisible(version)
    if stage == "working":
        strike(scene, victim)()
        place.assert_invisible(version)
    if stage in ("last rows", "ending"):
        gate.open_but_for_the_last()
        all_files = len(wanted.files)
        wait_until(lambda: place.files_of(version) == all_files - 1 and bool(gate.at_the_last()), "the last rows", 90)
    if stage == "last rows":
        strike(scene, victim)()
        place.assert_invisible(version)
    if stage == "ending":
        # All rows are written, and it hears of the last only once it is struck.
        with place.halted():
            gate.open()
            wait_until(lambda: place.files_of(version) == all_files, "all rows to be written", 90)
            place.assert_invisible(version)
            recover = strike(scene, victim)
        recover()
    gate.open()
    done = place.ended(started)
    place.assert_made_once(done, wanted.manifest_sha256)
    metadata = pb.TransformVersionMetadata()
    assert done.metadata.Unpack(metadata)
    assert metadata.attempt in attempts_after(stage, victim)
