"""The folder of an attempt on a node: whose it is, how long it lasts, and who takes it away."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shared.errors import FailedPrecondition
from tests.unit.train_service.in_ranks import forked_process
from train_service.program.worker_setup import AttemptFolder

STORE, JOB = "s3://millrace/dev", "trainingJobs/own"


def hold(connection: Connection, store: str, job: str, attempt: int, root: Path) -> None:
    with AttemptFolder(store, job, attempt, 0, root).entered() as folder:
        (folder.tmp / "left").write_text("by a rank that was killed")
        connection.send(folder.path)
        connection.recv()


class Holder:
    """A rank in a process of its own, inside of its folder."""

    def __init__(self, root: Path, store: str = STORE, job: str = JOB, attempt: int = 1) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self.process = forked_process(hold, theirs, store, job, attempt, root)
        theirs.close()
        self.path: Path = self._connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def leave(self) -> None:
        self._connection.send("leave")
        self.process.join()
        assert self.process.exitcode == 0


def test_tmpdir_is_the_ranks_own_while_it_is_there(tmp_path: Path) -> None:
    before = tempfile.gettempdir()
    with AttemptFolder(STORE, JOB, 2, 0, tmp_path).entered() as first:
        with tempfile.TemporaryDirectory() as made:
            assert Path(made).is_relative_to(first.tmp)
        with AttemptFolder(STORE, JOB, 2, 1, tmp_path).entered() as second:
            assert second.checkpoints == first.checkpoints
        assert first.tmp.exists()
    assert not first.path.exists()
    assert tempfile.gettempdir() == before


def test_stacks_of_one_user_do_not_share_the_folders_of_jobs_of_one_name(tmp_path: Path) -> None:
    other = Holder(tmp_path, store="s3://millrace/another")
    with AttemptFolder(STORE, JOB, 1, 0, tmp_path).entered() as own:
        assert own.path != other.path
        assert (other.path / "r0" / "tmp" / "left").exists()
    assert other.path.exists()
    other.leave()
    assert not other.path.exists()


def test_folders_of_killed_ranks_of_any_job_are_swept_and_those_in_use_are_not(tmp_path: Path) -> None:
    killed, elsewhere, stopped = (
        Holder(tmp_path),
        Holder(tmp_path, job="trainingJobs/ended"),
        Holder(tmp_path, attempt=2),
    )
    killed.kill()
    elsewhere.kill()
    with AttemptFolder(STORE, JOB, 3, 0, tmp_path).entered() as own:
        assert not killed.path.exists()
        assert not elsewhere.path.exists()
        # An attempt that a later one has overtaken may only be asleep, and still uses what it has.
        assert stopped.path.exists()
        folders = sorted(path.name for path in own.path.parent.iterdir())
        assert folders == sorted(["lock", own.path.name, stopped.path.name])
    stopped.kill()


def test_a_folder_without_a_lock_and_one_half_taken_away_are_swept(tmp_path: Path) -> None:
    own = AttemptFolder(STORE, JOB, 1, 0, tmp_path)
    root = own.path.parent
    for name in ("0123456789-a1", "going-01234567"):
        (root / name / "r0").mkdir(parents=True)
    with own.entered():
        assert sorted(path.name for path in root.iterdir()) == sorted(["lock", own.path.name])


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"millrace-{os.getuid()}").symlink_to(tmp_path)
    with (
        pytest.raises(FailedPrecondition, match="is a link, another user's"),
        AttemptFolder(STORE, JOB, 1, 0, tmp_path).entered(),
    ):
        pass
