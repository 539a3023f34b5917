"""Ranks of a program on an S3 store, over real connections: their attempt signs what is their job's, and nothing else.

The store is a real S3 server; the ranks have no key of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.code_bundle_registry import unpack_on_node
from shared.code_packing import pack
from shared.dataset_version import VersionReader
from shared.dataset_version.version import load_version
from shared.errors import FailedPrecondition, InvalidArgument, NotFound
from shared.settings import StoreSettings
from shared.storage import ObjectStore, object_store, open_store, presigning
from shared.storage.presigning import SignedStore
from tests.support.paged_versions import make_versions_paged
from tests.support.s3_fault_proxy import NONE, S3FaultProxy, failing, fault_proxy
from tests.support.versions import commit_version, striped_digits
from tests.support.waiting import wait_until
from tests.unit.train_service.program.test_reports import ANSWERED_S, BUNDLE, JOB, Attempt
from train_service import store_retry
from train_service.program.report_sender import ASYNC, NO_UPLOAD, SYNC
from train_service.program.signing import RemoteVersions, StoreSigner
from train_service.program.worker_setup import NodeCopies
from train_service.store_retry import waits_for_store
from train_service.worker.heartbeat import HeartbeatSender

VERSION = "datasets/digits/versions/v1"
MIB = 1024 * 1024


class SignedAttempt(Attempt):
    """Its ranks reach the store by what the attempt signs alone."""

    def __init__(self, store: ObjectStore, *arguments: Any, **options: Any) -> None:
        super().__init__(store, *arguments, **options)
        self.signer = StoreSigner(store, JOB, self.number, self.spec, self.coordinator)
        self.handle = self.signer.handle
        self.stores: list[SignedStore] = []

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.signer.__exit__()
        for store in self.stores:
            store.close()

    def store_of(self, heartbeat: HeartbeatSender) -> Any:
        self.stores.append(SignedStore(heartbeat.ask, heartbeat.note_progress))
        return self.stores[-1]

    def folder_of(self, number: int, rank: int) -> str:
        return f"{self.coordinator.folder(number)}/r{rank:04d}"


Begun = Callable[..., SignedAttempt]


@pytest.fixture
def store(s3_store: StoreSettings) -> ObjectStore:
    return open_store(s3_store)


@pytest.fixture
def attempt(store: ObjectStore, tmp_path: Path) -> Iterator[Begun]:
    with ExitStack() as stack:

        def begin(number: int = 1, world_size: int = 2, of: ObjectStore = store, **options: Any) -> SignedAttempt:
            begun = stack.enter_context(SignedAttempt(of, number, world_size, tmp_path / "node", **options))
            assert isinstance(begun, SignedAttempt)
            return begun

        yield begin


def test_files_of_all_ranks_become_a_checkpoint_that_the_next_attempt_restores(attempt: Begun, tmp_path: Path) -> None:
    large = os.urandom(40 * MIB)
    run = attempt()
    calls = [run.on_rank(rank, {"loss": 1.0}, {f"part-{rank}": large, "deep/x y#z": b"small"}) for rank in (0, 1)]
    for call in calls:
        call.result(ANSWERED_S)
    assert run.read(1) == {"deep/x y#z": b"small", "part-0": large, "part-1": large}

    later = attempt(2)
    described = later.begins[1].checkpoint
    assert described is not None
    copy = NodeCopies(later.stores[1], tmp_path / "copies").folder_of(described)
    assert (copy / "part-0").read_bytes() == large
    assert (copy / "deep" / "x y#z").read_bytes() == b"small"


@pytest.mark.parametrize("mode", [SYNC, ASYNC, NO_UPLOAD])
def test_a_folder_that_is_gone_after_report_loses_nothing(attempt: Begun, mode: str) -> None:
    run = attempt(world_size=1)
    for number in (1, 2, 3):
        run.on_rank(0, {}, {"model.pt": b"%d" % number}, mode=mode, delete=True).result(ANSWERED_S)
    run.ranks[0].finish()
    assert [run.read(number)["model.pt"] for number in (1, 2, 3)] == [b"1", b"2", b"3"]


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of everything that waits for a store, so that a test sees it wait several times."""
    monkeypatch.setattr(presigning, "RETRY_FOR_S", 0.5)
    monkeypatch.setattr(presigning, "RETRY_PART_FOR_S", 0.5)
    monkeypatch.setattr(object_store, "RETRY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(object_store, "RETRY_FOR", timedelta(seconds=0.5))
    monkeypatch.setattr(store_retry, "RETRY_DELAY_S", 0.1)


@pytest.fixture
def proxied(s3_store: StoreSettings) -> Iterator[tuple[S3FaultProxy, StoreSettings]]:
    with fault_proxy(s3_store) as proxy:
        yield proxy, proxy.settings(s3_store)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("size", [100, 40 * MIB], ids=["small", "in parts"])
def test_a_report_waits_while_the_store_is_away_and_is_committed_once_it_is_back(
    attempt: Begun, proxied: tuple[S3FaultProxy, StoreSettings], size: int
) -> None:
    proxy, settings = proxied
    run, data = attempt(world_size=1, of=open_store(settings)), os.urandom(size)
    proxy.fault = failing(503)
    call = run.on_rank(0, {"loss": 1.0}, {"model.pt": data}, mode=SYNC)
    reporting = run.ranks[0]._thread
    wait_until(lambda: proxy.struck > 4 and waits_for_store(reporting.ident or 0), "the report to wait")
    assert not call.done()
    proxy.fault = NONE
    call.result(ANSWERED_S)
    assert run.read(1) == {"model.pt": data}


@pytest.mark.usefixtures("short_waits")
def test_asynchronous_reports_go_on_while_the_store_is_away_and_are_committed_in_order(
    attempt: Begun, proxied: tuple[S3FaultProxy, StoreSettings]
) -> None:
    proxy, settings = proxied
    run = attempt(world_size=1, of=open_store(settings))
    proxy.fault = failing(503)
    for number in (1, 2):
        run.on_rank(0, {}, {"model.pt": b"%d" % number}, mode=ASYNC, delete=True).result(ANSWERED_S)
    third = run.on_rank(0, {}, {"model.pt": b"3"}, mode=ASYNC, delete=True)
    wait_until(lambda: proxy.struck > 4, "requests")
    assert not third.done()  # the disk is not to fill up
    proxy.fault = NONE
    third.result(ANSWERED_S)
    run.ranks[0].finish()
    assert [one.step for one in run.entries()] == [1, 2, 3]
    assert [run.read(number)["model.pt"] for number in (1, 2, 3)] == [b"1", b"2", b"3"]


def test_a_rank_may_neither_read_nor_write_what_is_not_its_jobs(attempt: Begun, store: ObjectStore) -> None:
    run = attempt()
    run.report({"model.pt": b"1"})
    mine, log = run.folder_of(2, 1), f"{JOB}/logs/a00001/r0001"
    rank = run.stores[1]
    rank.put(f"{mine}/deep/er/file", b"")
    rank.put(f"{run.folder_of(3, 1)}/file", b"")  # an asynchronous report may be ahead
    rank.put(f"{log}/00000000.txt", b"line")
    for key in (
        f"{run.folder_of(1, 1)}/file",  # that report is committed
        f"{run.folder_of(2, 0)}/file",
        f"{run.folder_of(2, 1)}0/file",
        run.folder_of(2, 1),
        f"{run.coordinator.folder(2)}/manifest.json",
        f"{run.coordinator.folder(2).replace('a00001', 'a00002')}/r0001/file",
        f"{run.coordinator.folder(2)[:-8]}00000000/r0001/file",
        f"{JOB}/logs/a00001/r0000/00000000.txt",
        f"{JOB}/logs/a00002/r0001/00000000.txt",
        f"{JOB}/checkpoints/log/00000000000000000005.json",
        "trainingJobs/own2/logs/a00001/r0001/x",
        "trainingJobs/other/checkpoints/data/model.pt",
        f"{BUNDLE}/bundle.tar",
        "key",
    ):
        with pytest.raises(
            FailedPrecondition, match=r"rank 1 may not write .*: it may write its own logs, and "
        ) as raised:
            rank.put(key, b"forged")
        assert raised.value.specific_reason == "KEY_REFUSED"
        assert not store.exists(key) or key.endswith("manifest.json")
        with pytest.raises(FailedPrecondition):
            rank.put_pieces(key, lambda: iter([bytes(17 * MIB), b"x"]))
    store.put("trainingJobs/other/checkpoints/data/model.pt", b"another's")
    for key in (
        "trainingJobs/other/checkpoints/data/model.pt",
        f"{JOB}/checkpoints/log/00000000000000000001.json",
        f"{JOB}/checkpoints/data",
        f"codeBundles/{'b' * 64}/bundle.tar",
        f"{VERSION}/data/x/manifest.json",
    ):
        with pytest.raises(FailedPrecondition, match="rank 1 may not read"):
            rank.get(key)


@pytest.mark.parametrize(
    "tail",
    ["../r0000/x", "./x", "a//b", "/x", "a/", "..", "a/../../../../log/1.json", "a\\b", "a\nb", "x" * 1100],
)
def test_a_key_that_a_server_could_take_for_another_is_refused(attempt: Begun, tail: str) -> None:
    run = attempt(world_size=1)
    with pytest.raises(InvalidArgument, match="rank 0 names the object"):
        run.stores[0].put(f"{run.folder_of(1, 0)}/{tail}", b"")


def test_an_address_of_one_object_is_none_of_another(attempt: Begun, store: ObjectStore) -> None:
    run = attempt(world_size=1)
    rank, own = run.stores[0], f"{run.folder_of(1, 0)}/model.pt"
    forged = rank._address("PUT", own).replace("model.pt", "other.pt")
    with pytest.raises(Exception, match="it refuses PUT"):
        rank._send(own, "PUT", lambda _: forged, [b"forged"])
    assert not store.exists(own.replace("model.pt", "other.pt"))


def test_malformed_requests_are_answered_with_an_error(attempt: Begun) -> None:
    run = attempt(world_size=1)
    for body in (
        {"kind": "sign"},
        {"kind": "sign", "method": "DELETE", "keys": ["key"]},
        {"kind": "sign", "method": "GET", "keys": ["key"] * 65},
        {"kind": "sign_parts", "key": f"{run.folder_of(1, 0)}/x", "upload_id": "x", "first": "many"},
        {"kind": "complete_parts", "key": f"{run.folder_of(1, 0)}/x"},
    ):
        answer = run.heartbeats[0].ask(body, timeout_s=ANSWERED_S)
        assert answer["error"]["kind"] == "InvalidArgument", body


def test_a_rank_finds_and_reads_the_version_of_its_job(
    attempt: Begun, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_version(store, VERSION, {"train": striped_digits(300), "validation": striped_digits(40, 1)})
    run = attempt(dataset_version=VERSION)
    versions = [RemoteVersions(one, heartbeat) for one, heartbeat in zip(run.stores, run.heartbeats, strict=True)]
    found = versions[0].load(VERSION)
    assert found == load_version(store, VERSION)
    assert versions[1].load(VERSION) == found

    # One message brings a rank the addresses of all files, and they are signed once for all ranks.
    asked, signed = watched(monkeypatch, run.signer, "_sign"), watched(monkeypatch, run.signer._presigner, "get_url")
    for rank in run.stores:
        for file in found.manifest.files:
            assert rank.get_range(f"{found.folder}/{file.path}", 0, 4) == b"PAR1"
    assert (len(asked), len(signed)) == (2, 2)

    versions[0].check_not_deleted(found)
    store.delete_folder(VERSION)
    with pytest.raises(NotFound, match="deleted"):
        versions[1].check_not_deleted(found)


def test_a_rank_reads_the_pages_and_files_of_a_large_version_and_no_other(
    attempt: Begun, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_versions_paged(monkeypatch, file_bytes=250_000)
    commit_version(store, VERSION, {"train": striped_digits(700)})
    run = attempt(dataset_version=VERSION)
    rank, versions = run.stores[0], RemoteVersions(run.stores[0], run.heartbeats[0])
    found = versions.load(VERSION)
    assert found.manifest.pages is not None
    reader = VersionReader(rank, found, check_there=versions.check_not_deleted)
    images, _ = striped_digits(700)
    read = reader.read_many(reader.row_groups("train"), ["image"])
    assert np.array_equal(read["image"].combine_chunks().to_numpy_ndarray(), images)
    for path in ("train-99999.parquet", "pages/0-99999999.arrow", "report.json", "x" * 200):
        store.put(f"{found.folder}/{path}", b"not of the version")
        with pytest.raises(FailedPrecondition, match="rank 0 may not read"):
            rank.get(f"{found.folder}/{path}")


def watched(monkeypatch: pytest.MonkeyPatch, target: object, name: str) -> list[Any]:
    """The arguments of each call of that method from here on."""
    calls: list[Any] = []
    method = getattr(target, name)

    def watch(*arguments: Any) -> Any:
        calls.append(arguments)
        return method(*arguments)

    monkeypatch.setattr(target, name, watch)
    if isinstance(target, StoreSigner):
        monkeypatch.setitem(target._answers, "sign", watch)
    return calls


def test_a_rank_unpacks_the_bundle_of_its_job(attempt: Begun, store: ObjectStore, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("def loop(config): pass\n")
    packed = tmp_path / "bundle.tar"
    with packed.open("wb") as file:
        digest = pack(code, file).sha256
    store.upload_file(packed, f"codeBundles/{digest}/bundle.tar")
    run = attempt(world_size=1, code_bundle=f"codeBundles/{digest}")
    folder = unpack_on_node(run.stores[0], digest, tmp_path / "unpacked")
    assert (folder / "train.py").read_text().startswith("def loop")


READS = """
import ctypes, os, sys
from pathlib import Path
from train_service.program.signing import PR_SET_DUMPABLE, hide_memory

if os.getuid() == 0:  # whom nothing is hidden from
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as for a process that was that user's from its start

def read_by_another():
    pid, (reading, writing) = os.getpid(), os.pipe()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        try:
            os.write(writing, b"read" if b"A_KEY=secret" in Path(f"/proc/{pid}/environ").read_bytes() else b"not there")
        except PermissionError:
            os.write(writing, b"refused")
        os._exit(0)
    os.wait()
    return os.read(reading, 100).decode()

before = read_by_another()
hide_memory()
print(before, read_by_another())
"""


def test_other_processes_of_the_user_do_not_read_the_attempts_environment() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "A_KEY": "secret"}
    ended = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, timeout=240, env=environ)
    assert ended.stdout.split() == ["read", "refused"], ended.stderr
