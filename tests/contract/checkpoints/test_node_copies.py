"""A checkpoint's copy on a node: verified, shared by its processes, and gone when none of them lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from shared.checkpoint import CheckpointEntry
from shared.checkpoint import format as copies
from shared.checkpoint.format import node_copy
from shared.errors import DataLoss, Unavailable
from shared.storage import ObjectStore
from tests.support.checkpoint_exports import PROGRAM_FILES, commit_model, commit_program


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "copies"


@pytest.fixture(autouse=True)
def _other_process() -> Iterator[None]:
    """As if a new process began: none holds a copy."""

    def let_go() -> None:
        for lock in copies._held.values():
            os.close(lock)
        copies._held.clear()

    let_go()
    yield
    let_go()


def files_in(folder: Path) -> dict[str, bytes]:
    found = {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    found.pop("millrace-manifest.json")
    return found


def copied_elsewhere(store: ObjectStore, entry: CheckpointEntry, root: Path) -> Path:
    """The copy that a process of its own gets."""
    script = (
        "import sys, pathlib; from shared.settings import StoreSettings; from shared.storage import open_store\n"
        "from shared.checkpoint.format import node_copy\n"
        "import json; store = open_store(StoreSettings(**json.loads(sys.argv[1])))\n"
        "print(node_copy(store, sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4])))"
    )
    arguments = [json.dumps(asdict(store.settings)), entry.folder, entry.manifest_sha256, str(root)]
    command = [sys.executable, "-c", script, *arguments]
    return Path(subprocess.run(command, check=True, timeout=240, stdout=subprocess.PIPE, text=True).stdout.strip())


def test_a_copy_has_the_files_that_the_program_reported(store: ObjectStore, root: Path) -> None:
    entry = commit_program(store)
    folder = node_copy(store, entry.folder, entry.manifest_sha256, root)
    assert files_in(folder) == PROGRAM_FILES
    assert node_copy(store, entry.folder, entry.manifest_sha256, root) == folder
    assert sorted(one.name for one in root.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_a_copy_that_was_changed_is_made_anew(store: ObjectStore, root: Path) -> None:
    entry = commit_program(store)
    folder = node_copy(store, entry.folder, entry.manifest_sha256, root)
    (folder / "model.pt").chmod(0o600)
    (folder / "model.pt").write_bytes(b"changed")
    for lock in copies._held.values():
        os.close(lock)
    copies._held.clear()
    assert files_in(node_copy(store, entry.folder, entry.manifest_sha256, root)) == PROGRAM_FILES


def test_two_processes_use_one_copy_at_the_same_time(store: ObjectStore, root: Path) -> None:
    entry = commit_program(store)
    folder = node_copy(store, entry.folder, entry.manifest_sha256, root)
    made = folder.stat()
    assert copied_elsewhere(store, entry, root) == folder
    assert os.path.samestat(folder.stat(), made)


def test_a_copy_that_was_changed_and_is_in_use_is_refused_after_a_while(
    store: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "IN_USE_TIMEOUT_S", 0.1)
    entry = commit_program(store)
    folder = node_copy(store, entry.folder, entry.manifest_sha256, root)
    (folder / "model.pt").chmod(0o600)
    (folder / "model.pt").write_bytes(b"changed")
    references = dict(copies._held)
    copies._held.clear()
    with pytest.raises(Unavailable, match="was changed while other processes use it"):
        node_copy(store, entry.folder, entry.manifest_sha256, root)
    copies._held.update(references)


def test_a_damaged_file_leaves_no_copy(store: ObjectStore, root: Path) -> None:
    entry = commit_program(store)
    store.put(f"{entry.folder}/r0001/model.pt", b"x" * len(PROGRAM_FILES["model.pt"]))
    with pytest.raises(DataLoss):
        node_copy(store, entry.folder, entry.manifest_sha256, root)
    assert [one.name for one in root.iterdir()] == [f"{entry.manifest_sha256}.lock"]


def test_others_cannot_write_beside_the_copies(store: ObjectStore, root: Path) -> None:
    entry = commit_program(store)
    before = os.umask(0o002)
    try:
        node_copy(store, entry.folder, entry.manifest_sha256, root / "millrace" / "copies")
    finally:
        os.umask(before)
    assert [one.stat().st_mode & 0o777 for one in (root / "millrace", root / "millrace" / "copies")] == [0o700, 0o700]


def test_copies_that_no_process_uses_go_and_others_stay(store: ObjectStore, root: Path) -> None:
    first, second = commit_program(store, 1), commit_program(store, 2)
    third = commit_model(store)
    used = node_copy(store, first.folder, first.manifest_sha256, root)
    # A copy of a process that has died.
    left = root / second.manifest_sha256
    left.mkdir()
    (left / "model.pt").write_bytes(b"left")
    (root / f"{left.name}.lock").touch()
    # This process holds the first copy.
    copied_elsewhere(store, third, root)
    assert used.is_dir()
    assert not left.exists()
    assert (root / third.manifest_sha256).is_dir()
