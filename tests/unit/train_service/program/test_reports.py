"""Reports of W ranks, each a thread with a real connection, that meet at a real coordinator over a local store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.checkpoint import load_checkpoint, resolve
from shared.checkpoint.format import load_program_checkpoint
from shared.checkpoint.registry import CheckpointRegistry
from shared.errors import FailedPrecondition, Internal, InvalidArgument
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from tests.support.waiting import wait_until
from train_service.domain.spec import REPLAY, CheckpointPolicy, Program, TrainingSpec
from train_service.program import coordinator
from train_service.program.coordinator import NOT_BY_ALL, ReportCoordinator
from train_service.program.report_sender import ASYNC, Begin, ProgramStopped, RankReports
from train_service.program.worker_setup import NodeCopies
from train_service.records.event_log import CANCEL, GO_ON, STALE, SUSPEND, EventKind
from train_service.worker.heartbeat import HeartbeatSender, HeartbeatServer

JOB = "trainingJobs/own"
BUNDLE = f"codeBundles/{'a' * 64}"
# For a report to be answered, on a busy machine.
ANSWERED_S = 120.0


class Attempt:
    """One attempt's coordinator and its ranks."""

    def __init__(self, store: ObjectStore, number: int, world_size: int, tmp: Path, **options: Any) -> None:
        self.store = store
        self.number = number
        self.world_size = world_size
        self.events: list[tuple[EventKind, dict[str, Any]]] = []
        self.request = GO_ON
        policy = options.pop("policy", CheckpointPolicy(best_metric="loss", maximize=False))
        self._of_ranks = {name: options.pop(name) for name in ("take_shards", "take_indices") if name in options}
        self.spec = spec = TrainingSpec(
            dataset_version=options.pop("dataset_version", ""),
            model=ModelSpec(builder="", in_channels=0, num_classes=0),
            epochs=0,
            global_batch_size=0,
            num_workers=world_size,
            checkpoints=policy,
            program=Program(
                code_bundle=options.pop("code_bundle", BUNDLE),
                entry="train:loop",
                data_resume=options.pop("data_resume", REPLAY),
            ),
        )
        self.coordinator = ReportCoordinator(
            store,
            JOB,
            number,
            spec,
            world_size,
            report_event=lambda kind, payload: self.events.append((kind, payload)),
            stop_reason=lambda: self.request,
            **options,
        )
        self.handle = self.coordinator.handle
        self.tmp = tmp / f"a{number}"
        self._stack = ExitStack()
        self.ranks: list[RankReports] = []
        self.heartbeats: list[HeartbeatSender] = []
        self.begins: list[Begin] = []
        self._pool = ThreadPoolExecutor(world_size)

    def __enter__(self) -> Attempt:
        heartbeats = self._stack.enter_context(HeartbeatServer("127.0.0.1", self.handle))
        self._stack.enter_context(self.coordinator)
        for rank in range(self.world_size):
            heartbeat = self._stack.enter_context(HeartbeatSender(rank, heartbeats.address))
            begin = Begin.ask(heartbeat)
            spool = self.tmp / f"r{rank}"
            spool.mkdir(parents=True)
            folder = CheckpointRegistry(self.store, JOB).data_folder
            self.heartbeats.append(heartbeat)
            self.begins.append(begin)
            store = self.store_of(heartbeat)
            reports = RankReports(store, heartbeat, rank, folder, self.number, begin, spool, **self._of_ranks)
            self.ranks.append(reports)
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in self.ranks:
            rank.close()
        self._stack.__exit__(None, None, None)
        self._pool.shutdown(wait=True)

    def store_of(self, heartbeat: HeartbeatSender) -> Any:  # noqa: ARG002 - others need it
        """The store as a rank has it that speaks by `heartbeat`."""
        return self.store

    def on_rank(self, rank: int, metrics: dict[str, Any], files: dict[str, bytes] | None, **how: Any) -> Future[None]:
        """Report on one rank, in a thread of its own; the folder is gone once `report` has returned."""
        folder = None
        if files is not None:
            folder = self.tmp / f"files-{rank}-{len(list(self.tmp.iterdir()))}"
            for path, data in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
        return self._pool.submit(self.ranks[rank].report, metrics, folder, **how)

    def report(self, files: dict[str, bytes] | None, **metrics: Any) -> None:
        """On all ranks, with the files on rank 0."""
        calls = [self.on_rank(rank, metrics, files if rank == 0 else None) for rank in range(self.world_size)]
        for call in calls:
            call.result(ANSWERED_S)

    def say(self, rank: int, kind: str) -> None:
        self.heartbeats[rank].ask({"kind": kind}, timeout_s=ANSWERED_S)

    def warnings(self) -> list[str]:
        return [payload["text"] for kind, payload in self.events if kind is EventKind.WARNING]

    def read(self, number: int) -> dict[str, bytes]:
        (entry,) = [one for one in self.entries() if one.step == number]
        content = load_program_checkpoint(self.store, entry.folder, entry.manifest_sha256)
        return {file.path: self.store.get(f"{entry.folder}/{file.object}") for file in content.files}

    def entries(self) -> Any:
        return CheckpointRegistry(self.store, JOB).entries()


Begun = Callable[..., Attempt]


@pytest.fixture
def attempt(store: ObjectStore, tmp_path: Path) -> Iterator[Begun]:
    with ExitStack() as stack:

        def begin(number: int = 1, world_size: int = 2, **options: Any) -> Attempt:
            return stack.enter_context(Attempt(store, number, world_size, tmp_path / "node", **options))

        yield begin


def test_a_report_returns_on_no_rank_before_all_have_come_and_the_checkpoint_is_named(attempt: Begun) -> None:
    run = attempt()
    first = run.on_rank(0, {"loss": 0.5, "epoch": 3}, {"model.pt": b"weights", "deep/er/x": b""})
    wait_until(lambda: run.coordinator._parts.keys() == {0}, "rank 0 to come")
    assert not first.done()
    assert run.entries() == []

    run.on_rank(1, {"loss": 9.0}, None).result(ANSWERED_S)
    first.result(ANSWERED_S)

    (entry,) = run.entries()
    assert (entry.name, entry.step, entry.epoch, entry.attempt) == (f"{JOB}/checkpoints/report-00000001", 1, 3, 1)
    assert (entry.metrics, entry.code_bundle) == ({"loss": 0.5, "epoch": 3.0}, BUNDLE)
    assert run.read(1) == {"model.pt": b"weights", "deep/er/x": b""}


def test_a_report_without_a_checkpoint_is_a_point_of_metrics_alone(attempt: Begun) -> None:
    run = attempt()
    run.report(None, loss=1.0)
    run.report({"model.pt": b"2"}, loss=0.5)
    assert [one.step for one in run.entries()] == [2]


def test_of_a_path_that_ranks_report_with_different_bytes_the_lowest_ranks_counts_and_that_is_reported(
    attempt: Begun,
) -> None:
    run = attempt(world_size=3)
    calls = [run.on_rank(rank, {}, {"model.pt": b"of %d" % rank, "same": b"s", f"r{rank}": b""}) for rank in (1, 2, 0)]
    for call in calls:
        call.result(ANSWERED_S)

    assert run.read(1) == {"model.pt": b"of 0", "same": b"s", "r0": b"", "r1": b"", "r2": b""}
    (warning,) = run.warnings()
    assert "model.pt" in warning
    assert "same" not in warning
    # What does not count is gone.
    assert not any(info.key.endswith("r0001/model.pt") for info in run.store.list(JOB))


def test_the_next_attempt_goes_on_behind_the_newest_checkpoint_and_sweeps_what_was_never_committed(
    attempt: Begun, tmp_path: Path
) -> None:
    first = attempt(1)
    first.report({"model.pt": b"1"}, loss=1.0)
    half = first.on_rank(0, {}, {"model.pt": b"half"})
    wait_until(lambda: 0 in first.coordinator._parts, "the upload")

    second = attempt(2)

    assert [begin.report for begin in second.begins] == [1, 1]
    described = second.begins[0].checkpoint
    assert described is not None
    copy = NodeCopies(second.store, tmp_path / "copies").folder_of(described)
    assert (copy / "model.pt").read_bytes() == b"1"
    assert not any("report-00000002" in info.key for info in second.store.list(JOB))
    second.report({"model.pt": b"2"}, loss=0.5)
    assert [(one.step, one.attempt) for one in second.entries()] == [(1, 1), (2, 2)]

    # The first attempt was only asleep: its commit is refused, and its files are taken away.
    with pytest.raises(ProgramStopped) as stopped:
        first.on_rank(1, {}, None).result(ANSWERED_S)
    assert stopped.value.reason == STALE
    with pytest.raises(ProgramStopped):
        half.result(ANSWERED_S)
    assert [(one.step, one.attempt) for one in second.entries()] == [(1, 1), (2, 2)]
    assert not any(f"report-00000002-a00001-{first.coordinator.token}" in i.key for i in second.store.list(JOB))


def test_damaged_checkpoints_are_skipped_with_a_warning_each(attempt: Begun) -> None:
    first = attempt(1)
    for number in (1, 2, 3):
        first.report({"model.pt": b"%d" % number}, loss=1.0)
    one, two, three = first.entries()
    first.store.put(f"{three.folder}/r0000/model.pt", b"x")
    first.store.delete(f"{two.folder}/r0000/model.pt")

    second = attempt(2)

    assert [begin.checkpoint and begin.checkpoint["name"] for begin in second.begins] == [one.name] * 2
    assert [text.split(" is damaged")[0] for text in second.warnings()] == [three.name, two.name]


def test_a_rank_that_returns_while_another_waits_in_a_report_ends_the_run_at_once(attempt: Begun) -> None:
    run = attempt()
    waiting = run.on_rank(0, {}, None)
    run.say(1, "returned")
    with pytest.raises(Internal, match=r"has not been called by all 2 workers .* \[1\]") as raised:
        waiting.result(ANSWERED_S)
    assert raised.value.specific_reason == NOT_BY_ALL
    assert raised.value.metadata["ranks"] == "1"
    assert not run.coordinator.all_returned


def test_missing_ranks_are_named_and_at_last_end_the_run(attempt: Begun) -> None:
    run = attempt(world_size=3, named_after_s=0.5, missing_for_s=3600.0)
    waiting = run.on_rank(0, {}, None)
    wait_until(lambda: run.coordinator.missing == [1, 2] and run.warnings(), "the missing ranks to be named")
    assert not waiting.done()
    assert "ray.train.report has not been called by all 3 workers in the group" in run.warnings()[0]
    run.coordinator._missing_for_s = 0.5
    with pytest.raises(Internal, match=r"\[1, 2\] within"):
        waiting.result(ANSWERED_S)


def test_a_request_to_suspend_acts_at_a_report_with_a_checkpoint_on_all_ranks_at_once(attempt: Begun) -> None:
    run = attempt()
    run.request = SUSPEND
    run.report(None, loss=1.0)  # nothing is lost by going on
    calls = [run.on_rank(rank, {}, {"m": b"2"} if rank == 0 else None) for rank in range(2)]
    for call in calls:
        with pytest.raises(ProgramStopped) as stopped:
            call.result(ANSWERED_S)
        assert stopped.value.reason == SUSPEND
    assert [one.step for one in run.entries()] == [2]
    run.say(0, "stopped")
    assert run.coordinator.overdue(now=1e12) == [1]


def test_a_request_to_cancel_acts_at_any_report(attempt: Begun) -> None:
    run = attempt()
    run.request = CANCEL
    calls = [run.on_rank(rank, {}, None) for rank in range(2)]
    for call in calls:
        with pytest.raises(ProgramStopped):
            call.result(ANSWERED_S)


def test_the_last_report_is_in_the_progress_of_a_run_that_has_ended(
    attempt: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "REPORT_INTERVAL_S", 3600.0)
    run = attempt(world_size=1)
    for number in range(1, 4):
        run.report({"model.pt": b"x"}, loss=1 / number)

    def recorded() -> list[tuple[int, float]]:
        return [(payload["step"], payload["loss"]) for kind, payload in run.events if kind is EventKind.PROGRESS]

    assert recorded() == [(1, 1.0)]
    run.coordinator.finish()
    run.coordinator.finish()
    assert recorded() == [(1, 1.0), (3, 1 / 3)]


def test_asynchronous_reports_are_committed_in_order_from_copies(attempt: Begun) -> None:
    run = attempt(world_size=1)
    for number in range(1, 6):
        run.on_rank(0, {}, {"model.pt": b"%d" % number}, mode=ASYNC, delete=number % 2 == 0).result(ANSWERED_S)
    run.ranks[0].finish()
    assert [one.step for one in run.entries()] == [1, 2, 3, 4, 5]
    assert [run.read(number)["model.pt"] for number in range(1, 6)] == [b"1", b"2", b"3", b"4", b"5"]
    assert list((run.tmp / "r0").iterdir()) == []


def test_at_most_one_asynchronous_report_waits_beside_the_one_that_is_delivered(attempt: Begun) -> None:
    run = attempt()
    for number in (1, 2):
        run.on_rank(0, {}, {"model.pt": b"%d" % number}, mode=ASYNC).result(ANSWERED_S)
    third = run.on_rank(0, {}, {"model.pt": b"3"}, mode=ASYNC)
    spool = run.tmp / "r0"
    wait_until(lambda: 0 in run.coordinator._parts, "rank 0's first report")
    assert not third.done()
    assert sorted(path.name for path in spool.iterdir()) == ["waiting-00000001", "waiting-00000002"]
    run.on_rank(1, {}, None).result(ANSWERED_S)
    third.result(ANSWERED_S)
    for _ in (2, 3):
        run.on_rank(1, {}, None).result(ANSWERED_S)
    run.ranks[0].finish()
    assert [run.read(number)["model.pt"] for number in (1, 2, 3)] == [b"1", b"2", b"3"]
    assert list(spool.iterdir()) == []


def test_the_last_checkpoint_is_final_and_none_at_all_is_reported(attempt: Begun) -> None:
    run = attempt(world_size=1)
    run.report({"m": b"1"})
    run.report(None)
    run.say(0, "returned")
    assert run.coordinator.all_returned
    run.coordinator.finish()
    assert [one.final for one in run.entries()] == [True]

    later = attempt(2, world_size=1)
    later.say(0, "returned")
    later.coordinator.finish()  # it began at the end: its checkpoint is an earlier attempt's
    assert [(one.final, one.attempt) for one in later.entries()] == [(True, 1)]


def test_a_run_without_a_checkpoint_warns(attempt: Begun) -> None:
    run = attempt(world_size=1)
    run.say(0, "returned")
    run.coordinator.finish()
    assert "without a checkpoint" in run.warnings()[0]


def test_old_checkpoints_go_as_the_policy_says(attempt: Begun) -> None:
    policy = CheckpointPolicy(best_metric="loss", maximize=False, keep_newest=1, keep_best=1)
    run = attempt(world_size=1, policy=policy)
    for number, loss in enumerate((3.0, 1.0, 2.0, 4.0), 1):
        run.report({"m": b"%d" % number}, loss=loss)
    assert [one.step for one in run.entries()] == [2, 4]


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(InvalidArgument, match=text):
        yield


def test_links_folders_that_are_gone_and_too_many_metrics_are_refused(attempt: Begun, tmp_path: Path) -> None:
    run = attempt(world_size=3)
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "passwords").symlink_to("/etc/passwd")
    with refused("'passwords' in the checkpoint is a symbolic link"):
        run.ranks[0].report({}, folder)
    with refused("does not exist"):
        run.ranks[1].report({}, tmp_path / "nothing")
    with refused("65536 are allowed"):
        run.ranks[2].report({f"metric {number}": 1.0 for number in range(5000)}, None)
    assert run.entries() == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"model#1", "'model#1' .* ends with # and a number.*; rename it"),
        (b"#1", "ends with # and a number"),
        (b"a\nb", r"'a\\nb' .* has a control character"),
        (b"\xff", r"'\\udcff' .* is not valid UTF-8"),
        (b"n" * 255, "has a name of 255 bytes"),
        (b"/".join([b"deep" * 60] * 4), "makes a key of .* at most 896 are allowed"),
    ],
)
def test_names_that_a_store_cannot_hold_are_refused(attempt: Begun, tmp_path: Path, name: bytes, text: str) -> None:
    run = attempt(world_size=1)
    folder = tmp_path / "files"
    path = folder / os.fsdecode(name)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"1")
    with refused(text):
        run.ranks[0].report({}, folder)


def test_unusual_names_that_a_store_can_hold_are_kept(attempt: Begun) -> None:
    run = attempt(world_size=1)
    files = dict.fromkeys(("a b", "%20", "ü", "#1/model", "model#", "model#1.pt", "a\\b", ".hidden", "n" * 245), b"1")
    run.report(files)
    assert run.read(1) == files


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "file", "below"),
    [("model", "model/w", 0, 1), ("model/w", "model", 1, 0), ("a/b", "a/b/c/d", 0, 1)],
)
def test_a_file_of_one_rank_that_is_a_folder_of_another_is_refused(
    attempt: Begun, of_rank_0: str, of_rank_1: str, file: int, below: int
) -> None:
    run = attempt()
    paths = [of_rank_0, of_rank_1]
    calls = [run.on_rank(rank, {}, {path: b"1"}) for rank, path in enumerate(paths)]
    for call in calls:
        with refused(f"rank {file} reported the file '{paths[file]}', and rank {below} '{paths[below]}' below it"):
            call.result(ANSWERED_S)
    assert run.entries() == []
    assert list(run.store.list(CheckpointRegistry(run.store, JOB).data_folder)) == []


def test_a_metric_that_is_not_finite_is_left_out_and_reported_once(attempt: Begun) -> None:
    run = attempt(world_size=1)
    for _ in range(2):
        run.report({"m": b""}, loss=float("nan"), name="a text", accuracy=0.5)
    assert [one.metrics for one in run.entries()] == [{"accuracy": 0.5}] * 2
    assert sorted(text.split("'")[1] for text in run.warnings()) == ["loss", "name"]


def test_readers_of_models_refuse_a_programs_checkpoint(attempt: Begun) -> None:
    run = attempt(world_size=1)
    run.report({"model.pt": b"1"})
    (entry,) = run.entries()
    with pytest.raises(FailedPrecondition) as by_name:
        resolve(run.store, "spec.checkpoint", entry.name)
    assert by_name.value.specific_reason == "PROGRAM_CHECKPOINT"
    assert by_name.value.fields[0][0] == "spec.checkpoint"
    with pytest.raises(FailedPrecondition) as by_folder:
        load_checkpoint(run.store, entry.folder, entry.manifest_sha256)
    assert by_folder.value.specific_reason == "PROGRAM_CHECKPOINT"


def test_ranks_of_a_node_share_one_verified_read_only_copy(attempt: Begun, tmp_path: Path) -> None:
    run = attempt(world_size=1)
    run.report({"model.pt": b"weights"})
    described = run.ranks[0].checkpoint
    assert described is not None
    copies = [NodeCopies(run.store, tmp_path / "copies") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(lambda one: one.folder_of(described), copies))
    assert (folder / "model.pt").read_bytes() == b"weights"
    assert (folder / "model.pt").stat().st_mode & 0o777 == 0o444

    run.store.put(f"{described['folder']}/r0000/model.pt", b"changed")
    with pytest.raises(Internal) as damaged:
        NodeCopies(run.store, tmp_path / "another node").folder_of(described)
    assert damaged.value.specific_reason == "READ_DAMAGED"


def test_a_node_keeps_the_newest_two_copies(attempt: Begun, tmp_path: Path) -> None:
    run = attempt(world_size=1)
    copies = NodeCopies(run.store, tmp_path / "copies")
    folders = []
    for number in (1, 2, 3, 4):
        run.report({"model.pt": b"%d" % number})
        assert run.ranks[0].checkpoint is not None
        folders.append(copies.folder_of(run.ranks[0].checkpoint))
    assert [folder.exists() for folder in folders] == [False, False, True, True]
    assert (folders[2] / "model.pt").read_bytes() == b"3"


@pytest.mark.timeout(900)
def test_copies_are_fetched_in_any_order_and_one_that_was_just_asked_for_stays(attempt: Begun, tmp_path: Path) -> None:
    run = attempt(world_size=1)
    reported = []
    for number in (1, 2, 3):
        run.report({"model.pt": b"%d" % number})
        reported.append(run.ranks[0].checkpoint)
    few, all_of_them = (NodeCopies(run.store, tmp_path / name, keeps_all=name == "all") for name in ("few", "all"))

    of_few = [few.folder_of(one) for one in reversed(reported) if one is not None]
    assert [folder.exists() for folder in of_few] == [True, False, True]
    assert (of_few[2] / "model.pt").read_bytes() == b"1"
    of_all = [all_of_them.folder_of(one) for one in reversed(reported) if one is not None]
    assert [folder.exists() for folder in of_all] == [True, True, True]


def test_a_request_whose_connection_broke_is_asked_again(attempt: Begun) -> None:
    run = attempt()
    waiting = run.on_rank(0, {"loss": 1.0}, {"m": b"1"})
    wait_until(lambda: 0 in run.coordinator._parts, "rank 0 to come")
    connection = run.heartbeats[0]._connection
    assert connection is not None
    connection.shutdown(2)
    wait_until(lambda: run.heartbeats[0]._connection not in (None, connection), "another connection")
    run.on_rank(1, {}, None).result(ANSWERED_S)
    waiting.result(ANSWERED_S)
    assert [one.step for one in run.entries()] == [1]
