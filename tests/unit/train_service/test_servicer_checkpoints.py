"""GetCheckpoint over gRPC: a real server on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from millrace.train.v1 import train_service_pb2 as pb
from shared.checkpoint import CheckpointRegistry
from shared.checkpoint.reading import PIECE_BYTES
from shared.jobs import JobRecord, Jobs
from shared.reference_markers import markers
from shared.storage import ObjectStore
from tests.support.checkpoint_exports import MODEL_FILES, PROGRAM_FILES, commit_model, commit_program
from tests.support.grpc_kit import call_error
from tests.support.train_server import train_stub
from tests.support.training_records import JOB, begin, make_job
from tests.support.waiting import wait_until
from train_service import servicer
from train_service.convert import MAX_CHUNK_BYTES
from train_service.jobs.run_records import CheckpointReader
from train_service.records.event_log import TRAIN_KIND

VERSION = "datasets/d/versions/v1"


@pytest.fixture(autouse=True)
def _job(store: ObjectStore) -> None:
    begin(make_job(store, VERSION))


async def received(call: AsyncIterator[pb.GetCheckpointResponse]) -> tuple[Any, dict[str, bytes], list[Any]]:
    """The header, what came of each file, and the files' descriptions in their order."""
    header, data, files = None, {}, []
    async for response in call:
        kind = response.WhichOneof("content")
        if kind == "header":
            assert header is None
            header = response.header
        elif kind == "file":
            files.append(response.file)
            data[response.file.path] = b""
        else:
            assert 0 < len(response.chunk) <= MAX_CHUNK_BYTES
            data[files[-1].path] += response.chunk
    return header, data, files


async def test_all_files_come_whole_the_manifest_first(store: ObjectStore) -> None:
    entry = commit_model(store)
    manifest = store.get(f"{entry.folder}/manifest.json")

    async with train_stub(store) as stub:
        header, data, files = await received(stub.GetCheckpoint(pb.GetCheckpointRequest(name=entry.name)))
        assert (header.checkpoint.name, header.checkpoint.manifest_sha256) == (entry.name, entry.manifest_sha256)
        assert (header.file_count, header.size_bytes) == (3, entry.size_bytes)
        assert [one.path for one in files] == ["manifest.json", *sorted(MODEL_FILES)]
        assert files[0].sha256 == entry.manifest_sha256
        assert data == {"manifest.json": manifest, **MODEL_FILES}


async def test_a_programs_files_have_the_paths_that_it_reported(store: ObjectStore) -> None:
    entry = commit_program(store)

    async with train_stub(store) as stub:
        header, data, _ = await received(stub.GetCheckpoint(pb.GetCheckpointRequest(name=entry.name)))
        assert header.checkpoint.code_bundle == entry.code_bundle
        assert data.pop("millrace-manifest.json") == store.get(f"{entry.folder}/manifest.json")
        assert data == PROGRAM_FILES


async def test_a_programs_own_file_goes_before_the_manifest(store: ObjectStore) -> None:
    files = {"millrace-manifest.json": b"mine"}
    entry = commit_program(store, files=files)

    async with train_stub(store) as stub:
        assert (await received(stub.GetCheckpoint(pb.GetCheckpointRequest(name=entry.name))))[1] == files


async def test_a_jobs_name_means_its_best(store: ObjectStore) -> None:
    commit_model(store, 10, {"model.safetensors": b"1"}, validation_accuracy=0.5)
    best = commit_model(store, 20, {"model.safetensors": b"2"}, validation_accuracy=0.9)
    commit_model(store, 30, {"model.safetensors": b"3"}, validation_accuracy=0.7)

    async with train_stub(store) as stub:
        header, data, _ = await received(stub.GetCheckpoint(pb.GetCheckpointRequest(name=JOB)))
        assert (header.checkpoint.name, data["model.safetensors"]) == (best.name, b"2")


@pytest.mark.parametrize("offset", [0, 1, PIECE_BYTES, PIECE_BYTES + 17, 9 << 20])
async def test_a_client_that_was_cut_off_gets_what_is_missing(store: ObjectStore, offset: int) -> None:
    entry = commit_model(store)
    path = "optimizer.safetensors"

    async with train_stub(store) as stub:
        request = pb.GetCheckpointRequest(
            name=entry.name, manifest_sha256=entry.manifest_sha256, path=path, offset=offset
        )
        header, data, files = await received(stub.GetCheckpoint(request))
        assert header.file_count == 3
        assert [(one.path, one.offset) for one in files] == [(path, offset)]
        assert data == {path: MODEL_FILES[path][offset:]}


async def test_refusals_are_those_of_the_contract(store: ObjectStore) -> None:
    make_job_named(store, "trainingJobs/empty")
    entry = commit_model(store)
    cases: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "name"),
        ({"name": "trainingJobs"}, grpc.StatusCode.INVALID_ARGUMENT, "name"),
        ({"name": "trainingJobs/none"}, grpc.StatusCode.NOT_FOUND, "trainingJobs/none"),
        ({"name": f"{JOB}/checkpoints/none"}, grpc.StatusCode.NOT_FOUND, f"{JOB}/checkpoints/none"),
        ({"name": "trainingJobs/empty"}, grpc.StatusCode.FAILED_PRECONDITION, "no checkpoint yet"),
        ({"name": entry.name, "manifest_sha256": "0" * 64}, grpc.StatusCode.ABORTED, entry.manifest_sha256),
        ({"name": entry.name, "path": "none"}, grpc.StatusCode.INVALID_ARGUMENT, "path"),
        ({"name": entry.name, "offset": 5}, grpc.StatusCode.INVALID_ARGUMENT, "path"),
        ({"name": entry.name, "offset": -1}, grpc.StatusCode.INVALID_ARGUMENT, "offset"),
        (
            {"name": entry.name, "path": "model.safetensors", "offset": 10_241},
            grpc.StatusCode.OUT_OF_RANGE,
            "use 0 to 10240",
        ),
    ]

    async with train_stub(store) as stub:
        for fields, code, text in cases:
            refused = await call_error(received(stub.GetCheckpoint(pb.GetCheckpointRequest(**fields))))
            assert refused.code is code, fields
            assert text in str(refused), fields

    assert markers(store, entry.name) == []


def make_job_named(store: ObjectStore, name: str) -> None:
    jobs = Jobs(store, TRAIN_KIND)
    spec = jobs.get(JOB, JOB).spec
    jobs.create(name, JobRecord(uid="e", name=name, spec=spec, create_time=0, update_time=0))


@pytest.mark.parametrize("damage", ["changed", "gone", "manifest"])
async def test_a_damaged_file_is_data_loss_behind_its_last_byte(store: ObjectStore, damage: str) -> None:
    entry = commit_model(store)
    key = f"{entry.folder}/model.safetensors"
    if damage == "changed":
        store.put(key, MODEL_FILES["model.safetensors"][:-1] + b"x")
    elif damage == "gone":
        store.delete(key)
    else:
        store.put(f"{entry.folder}/manifest.json", b"{}")

    async with train_stub(store) as stub:
        lost = await call_error(received(stub.GetCheckpoint(pb.GetCheckpointRequest(name=entry.name))))
        assert lost.code is grpc.StatusCode.DATA_LOSS
        assert ("manifest.json" if damage == "manifest" else key) in str(lost)


async def test_a_checkpoint_stays_while_it_is_sent_and_not_longer(store: ObjectStore) -> None:
    entry = commit_model(store)
    registry = CheckpointRegistry(store, JOB)

    async with train_stub(store) as stub:
        call = stub.GetCheckpoint(pb.GetCheckpointRequest(name=entry.name))
        await call.read()
        assert registry.retire([entry]) == []
        assert registry.entries() == [entry]
        call.cancel()
        await released(store, entry.name)
        assert registry.retire([entry]) == [entry]


async def released(store: ObjectStore, name: str) -> None:
    await asyncio.to_thread(wait_until, lambda: not markers(store, name), "the mark to go")


async def test_no_more_downloads_than_there_are_places(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MAX_DOWNLOADS", 1)
    entry = commit_model(store)

    async with train_stub(store) as stub:
        first = stub.GetCheckpoint(pb.GetCheckpointRequest(name=entry.name))
        await first.read()
        refused = await call_error(received(stub.GetCheckpoint(pb.GetCheckpointRequest(name=entry.name))))
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.info.reason == "TOO_MANY_DOWNLOADS"
        first.cancel()


class CountingStore:
    """Counts the pieces that are read of a store."""

    def __init__(self, store: ObjectStore, read: Callable[[int], None]) -> None:
        self._store = store
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._read(length)
        return self._store.get_range(key, start, length)


async def test_a_client_that_takes_nothing_has_nothing_read_ahead_for_it(store: ObjectStore) -> None:
    pieces: list[int] = []
    counting: Any = CountingStore(store, pieces.append)
    entry = commit_model(store, files={"model.safetensors": bytes(24 * PIECE_BYTES)})

    async with train_stub(counting) as stub:
        call = stub.GetCheckpoint(pb.GetCheckpointRequest(name=entry.name))
        await call.read()
        await settled(pieces)
        # What gRPC's window holds, one that is being sent and one behind it.
        assert len(pieces) <= 8
        call.cancel()


async def settled(counted: list[int]) -> None:
    """Until for a second nothing more was counted."""
    before = -1
    async with asyncio.timeout(60):
        while before != len(counted):
            before = len(counted)
            await asyncio.sleep(1)


def test_a_long_download_renews_its_mark(store: ObjectStore) -> None:
    entry = commit_model(store, files={"model.safetensors": bytes(3 * PIECE_BYTES)})
    now = [0.0]
    parts = CheckpointReader(store, clock=lambda: now[0]).read(entry.name, "", "model.safetensors", 0)
    for _ in range(3):  # the listing, the file and its first piece
        next(parts)
    (before,) = markers(store, entry.name)
    now[0] = 200.0
    next(parts)
    next(parts)
    (after,) = markers(store, entry.name)
    assert after.marked_at > before.marked_at
    parts.close()
    assert markers(store, entry.name) == []
