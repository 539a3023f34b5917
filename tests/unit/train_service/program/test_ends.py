"""How a program's run ends: no stop and no failed report is forgotten, whatever the training function does with it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.dataset_version import load_version
from shared.errors import Internal, InvalidArgument
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from tests.support.versions import commit_version, striped_digits
from tests.unit.train_service.conftest import TRAIN_ROWS, VERSION
from tests.unit.train_service.program.test_reports import ANSWERED_S, Attempt, Begun
from train_service.domain.coverage_counts import shard_identity
from train_service.domain.spec import CONTINUE, CheckpointPolicy, TrainingSpec
from train_service.program.coordinator import NOT_BY_ALL
from train_service.program.report_sender import ASYNC, ProgramStopped
from train_service.records.event_log import CANCEL, STALE

MODEL = ModelSpec(builder="", in_channels=0, num_classes=0)


@pytest.fixture
def attempt(store: ObjectStore, tmp_path: Path) -> Iterator[Begun]:
    with ExitStack() as stack:

        def begin(number: int = 1, world_size: int = 1, **options: Any) -> Attempt:
            return stack.enter_context(Attempt(store, number, world_size, tmp_path / "node", **options))

        yield begin


def test_a_stop_that_the_function_swallowed_is_raised_again_at_every_report_and_at_its_end(attempt: Begun) -> None:
    run = attempt()
    run.request = CANCEL
    (rank,) = run.ranks
    for _ in range(3):
        with pytest.raises(ProgramStopped) as stopped:
            rank.report({}, None)
        assert stopped.value.reason == CANCEL
    assert rank.number == 1  # the attempt was asked once
    with pytest.raises(ProgramStopped):
        rank.finish()


def test_a_report_that_failed_ends_the_run_though_the_function_caught_its_error(attempt: Begun, tmp_path: Path) -> None:
    run = attempt()
    (rank,) = run.ranks
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="does not exist"):
            rank.report({}, tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match="does not exist"):
        rank.report({}, None)
    with pytest.raises(InvalidArgument, match="does not exist"):
        rank.finish()
    assert rank.number == 0


def test_an_asynchronous_report_that_failed_is_raised_at_the_end_again(attempt: Begun) -> None:
    run = attempt()
    (rank,) = run.ranks

    def upload() -> Path:
        raise OSError("the disk is full")

    rank.report({}, run.tmp, mode=ASYNC, upload=upload)
    with pytest.raises(OSError, match="the disk is full"):
        rank.finish()
    with pytest.raises(OSError, match="the disk is full"):
        rank.report({}, None)
    with pytest.raises(OSError, match="the disk is full"):
        rank.finish()


def test_no_rows_are_taken_for_a_report_whose_files_cannot_be_read_or_copied(attempt: Begun, tmp_path: Path) -> None:
    taken: list[int] = []

    def take_shards() -> dict[str, Any]:
        taken.append(1)
        return {}

    run = attempt(world_size=2, take_shards=take_shards)
    with pytest.raises(InvalidArgument):
        run.ranks[0].report({}, tmp_path / "nothing")
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"1")
    (run.tmp / "r1" / "waiting-00000001").write_bytes(b"in the way of the copy")
    with pytest.raises(OSError, match="waiting-00000001"):
        run.ranks[1].report({}, folder, mode=ASYNC)
    assert taken == []


def test_two_threads_of_a_rank_never_report_under_one_number(attempt: Begun) -> None:
    meeting = threading.Barrier(2)

    def take_shards() -> dict[str, Any]:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)  # until the other thread is in here, too, if it can be
        return {}

    run = attempt(take_shards=take_shards)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run.ranks[0].report, {"loss": loss}, None) for loss in (1.0, 2.0)]
        for call in calls:
            call.result(ANSWERED_S)
    assert run.ranks[0].number == 2


def test_a_run_that_was_stopped_or_has_a_cause_is_not_done_though_all_ranks_return(attempt: Begun) -> None:
    stopped = attempt()
    stopped.request = CANCEL
    with pytest.raises(ProgramStopped):
        stopped.ranks[0].report({}, None)
    stopped.say(0, "returned")
    assert not stopped.coordinator.all_returned

    failed = attempt(2)
    failed.heartbeats[0].ask({"kind": "failing", "error": Internal("it raised").as_record()}, timeout_s=ANSWERED_S)
    failed.say(0, "returned")
    assert not failed.coordinator.all_returned


def test_a_stale_attempt_is_not_done_though_all_ranks_return(attempt: Begun) -> None:
    stale = attempt(1)
    attempt(2)
    folder = stale.tmp / "files"
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"1")
    with pytest.raises(ProgramStopped):
        stale.ranks[0].report({}, folder)
    stale.say(0, "returned")
    assert not stale.coordinator.all_returned


def test_the_result_names_the_newest_checkpoint_that_is_whole(attempt: Begun) -> None:
    first = attempt(1, policy=CheckpointPolicy(best_metric="loss", maximize=False))
    for number, loss in enumerate((3.0, 2.0, 1.0), 1):
        first.report({"model.pt": b"%d" % number}, loss=loss)
    one, two, three = first.entries()
    first.store.put(f"{three.folder}/r0000/model.pt", b"x")

    second = attempt(2)  # its function sees that nothing is left to do

    assert second.coordinator.result() == {"checkpoint": two.name, "best_checkpoint": two.name}
    assert second.coordinator.result()["best_checkpoint"] != one.name


def test_a_program_without_a_checkpoint_has_none_in_its_result(attempt: Begun) -> None:
    run = attempt()
    run.report(None, loss=1.0)
    assert run.coordinator.result() == {"checkpoint": "", "best_checkpoint": ""}


def test_of_a_report_that_not_all_ranks_made_the_line_of_the_program_is_kept(attempt: Begun) -> None:
    run = attempt(world_size=2)
    waiting = run.on_rank(0, {}, None)
    run.say(1, "returned")
    with pytest.raises(Internal) as raised:
        waiting.result(ANSWERED_S)
    error = raised.value
    error.message, error.metadata["line"] = f"{error.message} (rank 0 at train.py:7)", "train.py:7"
    other = Internal("another error, which only follows", metadata={"line": "train.py:9"})
    for rank, one in enumerate((error, other)):
        run.heartbeats[rank].ask({"kind": "failing", "error": one.as_record()}, timeout_s=ANSWERED_S)
    cause = run.coordinator.cause
    assert cause is not None
    assert cause.message.endswith("(rank 0 at train.py:7)")
    assert (cause.specific_reason, cause.metadata["ranks"]) == (NOT_BY_ALL, "1")


def commit_digits(store: ObjectStore) -> dict[str, Any]:
    """Commit `VERSION`, and give the identity of its training split in a job like `Attempt`'s."""
    commit_version(store, VERSION, {"train": striped_digits(TRAIN_ROWS)})
    spec = TrainingSpec(dataset_version=VERSION, model=MODEL, epochs=0, global_batch_size=0)
    return shard_identity(VERSION, load_version(store, VERSION).manifest_sha256, "train", TRAIN_ROWS, spec)


def test_a_rank_that_begins_gets_no_spans_of_what_was_given(attempt: Begun, store: ObjectStore) -> None:
    identity = commit_digits(store)
    shard = {"shard": identity, "place": [0, 0, 5], "given": [[0, 0, 5, 1]]}
    first = attempt(1, take_shards=lambda: {"train": shard}, dataset_version=VERSION)
    first.report({"model.pt": b"1"})

    (begin,) = attempt(2, dataset_version=VERSION).begins

    assert begin.positions == {"train": {**identity, "world_size": 1, "places": [[0, 0, 5]]}}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"place": [0, 0, 6]}, r"\['train'\].place = \[0, 0, 6\] is at position 12, where none"),
        ({"given": [[0, 0, 10, 0]]}, r"\['train'\].given\[0\] = \[0, 0, 10, 0\] must have the step 2"),
        ({"given": [[0, 0, 3, 2]]}, r"\['train'\].given\[0\] = \[0, 0, 3, 2\] must be positions from 0"),
        ({"shard": {"seed": 9}}, r"\['train'\].shard.seed = 9 must be 0, that of this job"),
    ],
)
def test_a_forged_position_fails_the_run_and_names_its_rank(
    attempt: Begun, store: ObjectStore, change: dict[str, Any], text: str
) -> None:
    """Ranges that end between two steps could have the attempt join them for ever, and a rank that waits for the
    attempt is not taken for hung."""
    identity = commit_digits(store)
    shard = {"shard": {**identity, **change.pop("shard", {})}, "place": [0, 0, 5], "given": [[0, 0, 10, 2]], **change}
    run = attempt(world_size=2, take_shards=lambda: {"train": shard}, dataset_version=VERSION)
    with pytest.raises(InvalidArgument, match=f"rank 0 reports a wrong position of its data: shards{text}"):
        run.on_rank(0, {}, None).result(ANSWERED_S)
    cause = run.coordinator.cause
    assert cause is not None
    assert (cause.specific_reason, cause.metadata["ranks"]) == ("WRONG_SHARD_POSITION", "0")


def test_a_run_without_a_version_has_no_shards_to_report(attempt: Begun) -> None:
    run = attempt(take_shards=lambda: {"train": {}})
    with pytest.raises(InvalidArgument, match=r"rank 0 .* split = 'train' must be one of none"):
        run.report(None)


def test_reports_without_a_checkpoint_do_not_grow_the_attempt(attempt: Begun, store: ObjectStore) -> None:
    """Of each report the attempt keeps a point of metrics, until it is written, and where the shards are."""
    identity = commit_digits(store)
    given = itertools.count()

    def take_shards() -> dict[str, Any]:
        begin = next(given)
        spans = [[0, begin, begin + 1, 1]]
        return {"train": {"shard": identity, "place": [0, 0, begin + 1], "given": spans}}

    run = attempt(take_shards=take_shards, dataset_version=VERSION)

    def size_after(reports: int) -> int:
        for _ in range(reports):
            run.report(None)
        coordinator = run.coordinator
        kept = {name: value for name, value in vars(coordinator).items() if isinstance(value, (dict, list, set))}
        assert coordinator._metrics is not None
        coordinator._metrics.write()
        return len(repr(kept))

    after_20 = size_after(20)
    assert size_after(100) < after_20 + 200
    assert run.coordinator._positions["train"]["given"] == [[0, 0, 120, 1]]


def test_the_retention_of_a_stale_attempt_deletes_no_committed_checkpoint(
    attempt: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later attempt begins between the commit and the retention, and goes on from that checkpoint."""
    policy = CheckpointPolicy(best_metric="loss", maximize=False, keep_newest=1)
    stale = attempt(1, policy=policy)
    stale.report({"model.pt": b"1"})
    later: list[Attempt] = []

    def commit_and_lose(registry: CheckpointRegistry, entry: CheckpointEntry) -> Any:
        state = commit(registry, entry)
        if not later:
            later.append(attempt(2, policy=policy))
        return state

    commit = CheckpointRegistry.commit
    monkeypatch.setattr(CheckpointRegistry, "commit", commit_and_lose)
    folder = stale.tmp / "files"
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"2")
    with pytest.raises(ProgramStopped) as stopped:
        stale.ranks[0].report({}, folder)
    assert stopped.value.reason == STALE

    (new,) = later
    assert new.begins[0].report == 2
    assert new.read(2) == {"model.pt": b"2"}
    assert new.read(1) == {"model.pt": b"1"}
    new.report({"model.pt": b"3"})
    assert [entry.step for entry in new.entries()] == [3]


def test_a_program_that_starts_over_or_reads_an_epoch_again_is_warned_of(attempt: Begun, store: ObjectStore) -> None:
    identity = commit_digits(store)
    shard = {"shard": identity, "place": [1, 0, 5], "given": [[1, 0, 5, 1]]}
    assert attempt(1, dataset_version=VERSION).warnings() == []
    lost = attempt(2, take_shards=lambda: {"train": shard}, dataset_version=VERSION, began_before=True)
    (text,) = lost.warnings()
    assert text.startswith("the program starts over: no checkpoint was reported before the attempt was lost")
    lost.report({"model.pt": b"1"})

    (text,) = attempt(3, dataset_version=VERSION, began_before=True).warnings()
    assert text.startswith("the checkpoint was taken within epoch 1 of split 'train': its rows are given again")
    continuing = attempt(4, dataset_version=VERSION, began_before=True, data_resume=CONTINUE)
    assert continuing.warnings() == []
