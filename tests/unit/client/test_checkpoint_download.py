"""`download_checkpoint` and `millrace train download`, on the service's own servicer and a real store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.train.v1 import train_service_pb2 as pb
from millrace.train.v1 import train_service_pb2_grpc
from millrace_client import connect, errors
from millrace_client.train import TrainClient
from shared.checkpoint import CheckpointEntry, reading
from shared.checkpoint.reading import PIECE_BYTES
from shared.errors import Unavailable
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.checkpoint_exports import MODEL_FILES, PROGRAM_FILES, commit_model, commit_program
from tests.support.grpc_answers import serving
from tests.support.train_server import commanded, with_client
from tests.support.training_records import JOB, begin, make_job

OPTIMIZER = "optimizer.safetensors"


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    store = open_store(file_store)
    begin(make_job(store, "datasets/d/versions/v1"))
    return store


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "checkpoint"


def fetch(store: Any, name: str, target: Path, on_progress: Any = None) -> Any:
    return with_client(store, lambda train: train.download_checkpoint(name, target, on_progress=on_progress))


def files_in(folder: Path) -> dict[str, bytes]:
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def expected(store: ObjectStore, entry: CheckpointEntry) -> dict[str, bytes]:
    manifest = store.get(f"{entry.folder}/manifest.json")
    if entry.code_bundle:
        return {**PROGRAM_FILES, "millrace-manifest.json": manifest}
    return {**MODEL_FILES, "manifest.json": manifest}


@pytest.mark.parametrize("commit", [commit_model, commit_program])
def test_a_checkpoint_becomes_a_folder_of_its_files(store: ObjectStore, target: Path, commit: Any) -> None:
    entry = commit(store)
    seen: list[tuple[int, int]] = []
    found = fetch(store, entry.name, target, lambda *now: seen.append(now))
    assert (found.name, found.manifest_sha256) == (entry.name, entry.manifest_sha256)
    assert files_in(target) == expected(store, entry)
    assert seen[-1] == (entry.size_bytes, entry.size_bytes)
    assert list(target.parent.iterdir()) == [target]


def test_an_empty_folder_is_filled_and_the_same_checkpoint_left_as_it_is(store: ObjectStore, target: Path) -> None:
    entry = commit_model(store)
    target.mkdir(parents=True)
    fetch(store, entry.name, target)
    before = {one: one.stat().st_mtime_ns for one in target.rglob("*")}
    fetch(store, entry.name, target)
    assert {one: one.stat().st_mtime_ns for one in target.rglob("*")} == before
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("what", ["more", "changed", "less", "file"])
def test_other_content_is_left_alone(store: ObjectStore, target: Path, what: str) -> None:
    entry = commit_model(store)
    if what == "file":
        target.parent.mkdir(parents=True)
        target.write_text("mine")
    else:
        fetch(store, entry.name, target)
        if what == "less":
            (target / OPTIMIZER).unlink()
        else:
            (target / ("notes.txt" if what == "more" else OPTIMIZER)).write_text("mine")
    before = files_in(target)
    with pytest.raises(FileExistsError):
        fetch(store, entry.name, target)
    assert files_in(target) == before
    assert list(target.parent.iterdir()) == [target]


class Cut(Exception):
    """Stands for the death of the process."""


def cut_after(size_bytes: int) -> Any:
    def on_progress(done: int, _: int) -> None:
        if done > size_bytes:
            raise Cut

    return on_progress


def test_a_download_whose_process_died_goes_on_where_it_was(store: ObjectStore, target: Path) -> None:
    entry = commit_model(store)
    with pytest.raises(Cut):
        fetch(store, entry.name, target, cut_after(5 << 20))
    assert not target.exists()
    seen: list[int] = []
    fetch(store, entry.name, target, lambda done, _: seen.append(done))
    assert files_in(target) == expected(store, entry)
    assert seen[0] > 5 << 20


def test_a_partial_download_of_another_checkpoint_is_not_continued(store: ObjectStore, target: Path) -> None:
    first = commit_model(store, 10)
    with pytest.raises(Cut):
        fetch(store, first.name, target, cut_after(5 << 20))
    second = commit_model(store, 20, {**MODEL_FILES, OPTIMIZER: MODEL_FILES[OPTIMIZER][::-1]})
    fetch(store, second.name, target)
    assert files_in(target)[OPTIMIZER] == MODEL_FILES[OPTIMIZER][::-1]


def test_a_resumed_download_fetches_a_locally_changed_file_again(store: ObjectStore, target: Path) -> None:
    entry = commit_model(store)
    with pytest.raises(Cut):
        fetch(store, entry.name, target, cut_after(5 << 20))
    partial = target.parent / f".{target.name}.millrace-partial"
    (partial / "files" / "model.safetensors").write_bytes(b"changed")
    fetch(store, entry.name, target)
    assert files_in(target) == expected(store, entry)


class Reads:
    """A store that notes what is read of its objects, and at `break_at` does not answer, once."""

    def __init__(self, store: ObjectStore, break_at: tuple[str, int] | None = None) -> None:
        self._store = store
        self._break_at = break_at
        self.ranges: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.ranges.append((key, start))
        if self._break_at and key.endswith(self._break_at[0]) and start == self._break_at[1]:
            self._break_at = None
            raise Unavailable("the object store does not answer")
        return self._store.get_range(key, start, length)


def test_a_stream_that_breaks_is_taken_up_where_it_broke(store: ObjectStore, target: Path) -> None:
    entry = commit_model(store)
    breaking = Reads(store, break_at=(OPTIMIZER, PIECE_BYTES))
    fetch(breaking, entry.name, target)
    assert files_in(target) == expected(store, entry)
    assert breaking.ranges.count((f"{entry.folder}/model.safetensors", 0)) == 1


def test_no_byte_of_a_damaged_block_is_sent(store: ObjectStore, target: Path) -> None:
    entry = commit_model(store)
    key = f"{entry.folder}/{OPTIMIZER}"
    store.put(key, MODEL_FILES[OPTIMIZER][:-1] + b"x")
    with pytest.raises(errors.DataLoss, match="optimizer"):
        fetch(store, entry.name, target)
    assert not target.exists()
    store.put(key, MODEL_FILES[OPTIMIZER])
    fetch(store, entry.name, target)
    assert files_in(target) == expected(store, entry)


def test_a_file_that_is_not_what_was_committed_leaves_no_folder(
    store: ObjectStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is as earlier releases wrote it, without digests of blocks."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 30)
    entry = commit_model(store)
    key = f"{entry.folder}/{OPTIMIZER}"
    store.put(key, b"x" * len(MODEL_FILES[OPTIMIZER]))
    with pytest.raises(errors.DataLoss, match="optimizer"):
        fetch(store, entry.name, target)
    assert not target.exists()
    store.put(key, MODEL_FILES[OPTIMIZER])
    with pytest.raises(errors.DataLoss, match="did not arrive"):  # what had come was compared, and thrown away
        fetch(store, entry.name, target)
    fetch(store, entry.name, target)
    assert files_in(target) == expected(store, entry)


def test_two_downloads_into_one_folder_do_not_mix(store: ObjectStore, target: Path) -> None:
    entry = commit_model(store)
    begun, go_on = threading.Event(), threading.Event()

    def wait(_done: int, _all: int) -> None:
        begun.set()
        assert go_on.wait(120)

    def both(train: TrainClient) -> None:
        first = threading.Thread(
            target=train.download_checkpoint, args=(entry.name, target), kwargs={"on_progress": wait}
        )
        first.start()
        assert begun.wait(120)
        with pytest.raises(FileExistsError, match="at work"):
            train.download_checkpoint(entry.name, target)
        go_on.set()
        first.join()

    with_client(store, both)
    assert files_in(target) == expected(store, entry)


@pytest.mark.parametrize("path", ["../evil", "/evil", "a/../../evil", "a\\evil", "", "a//b", "."])
def test_a_service_cannot_write_outside_of_the_folder(tmp_path: Path, path: str) -> None:
    class Evil(train_service_pb2_grpc.TrainServiceServicer):
        def GetCheckpoint(self, _request: Any, _context: Any) -> Iterator[pb.GetCheckpointResponse]:  # noqa: N802
            yield pb.GetCheckpointResponse(header=pb.GetCheckpointResponse.Header(size_bytes=1))
            yield pb.GetCheckpointResponse(file=pb.GetCheckpointResponse.File(path=path, size_bytes=1))
            yield pb.GetCheckpointResponse(chunk=b"x")

    register: Any = lambda server: train_service_pb2_grpc.add_TrainServiceServicer_to_server(Evil(), server)  # noqa: E731
    with (
        serving(register) as address,
        connect(train=address) as millrace,
        pytest.raises(errors.DataLoss, match="outside"),
    ):
        millrace.train.download_checkpoint(JOB, tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("*evil*"))
    assert not (tmp_path / "deep" / "out").exists()


def test_a_service_that_sends_nothing_is_reported(tmp_path: Path) -> None:
    class Silent(train_service_pb2_grpc.TrainServiceServicer):
        def GetCheckpoint(self, _request: Any, _context: Any) -> Iterator[pb.GetCheckpointResponse]:  # noqa: N802
            yield from ()

    register: Any = lambda server: train_service_pb2_grpc.add_TrainServiceServicer_to_server(Silent(), server)  # noqa: E731
    with (
        serving(register) as address,
        connect(train=address) as millrace,
        pytest.raises(errors.DataLoss, match="header"),
    ):
        millrace.train.download_checkpoint(JOB, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_a_checkpoint_the_best_one_or_that_of_a_step(store: ObjectStore, tmp_path: Path) -> None:
    commit_model(store, 10, {"model.safetensors": b"1"}, validation_accuracy=0.9)
    commit_model(store, 20, {"model.safetensors": b"2"}, validation_accuracy=0.5)

    def taken(*arguments: str) -> bytes:
        folder = tmp_path / "-".join(arguments).replace("/", "_")
        result = commanded(store, "train", "download", *arguments, str(folder), "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["directory"] == str(folder)
        return (folder / "model.safetensors").read_bytes()

    assert taken("j") == b"1"
    assert taken("trainingJobs/j", "--best") == b"1"
    assert taken("j", "--step", "20") == b"2"
    assert taken("j/checkpoints/step-00000020") == b"2"


def test_an_impossible_download_is_reported(store: ObjectStore, tmp_path: Path) -> None:
    entry = commit_model(store, 10)
    folder = str(tmp_path / "folder")
    missing = commanded(store, "train", "download", "j", "--step", "11", folder)
    assert (missing.exit_code, "it has some at steps 10" in missing.output) == (3, True)
    assert commanded(store, "train", "download", "none", folder).exit_code == 3
    assert commanded(store, "train", "download", entry.name, "--step", "10", folder).exit_code == 2
    assert not any(tmp_path.glob("*folder*"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    refused = commanded(store, "train", "download", "j", folder)
    assert refused.exit_code == 1
    assert f"{folder}: has other content" in " ".join(refused.output.split())
