"""Scratch folders go with their work, also where it was killed; those of living owners stay."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_service.version_attempt import PREFIX, scratch_folder

OWNER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from data_service.version_attempt import scratch_folder
with scratch_folder() as folder:
    (folder / "half.parquet").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_goes_with_its_body(place: Path) -> None:
    with scratch_folder() as folder:
        (folder / "half").touch()
        with scratch_folder() as another:
            assert folder != another
            assert (folder / "half").exists()

    assert not list(place.iterdir())


def test_a_folder_stays_while_its_owner_lives_and_goes_once_that_was_killed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is in another container: nobody here sees its process."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: not path.is_relative_to("/proc") and exists(path))
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        folder = Path(owner.stdout.readline().strip())
        with scratch_folder():
            assert (folder / "half.parquet").exists()
        owner.kill()
        owner.wait()
    with scratch_folder():
        assert not folder.exists()


def test_nothing_else_is_taken_away(place: Path) -> None:
    others = [place / "millrace-notes", place / "somebody-1-else"]
    for other in others:
        other.mkdir()
    (place / f"{PREFIX}file").touch()
    (place / f"{PREFIX}link").symlink_to(others[0])
    with scratch_folder():
        assert all(other.exists() for other in others)
        assert (place / f"{PREFIX}file").exists()


@pytest.mark.parametrize("when", ["open", "flock"])
def test_a_folder_that_another_process_swept_before_it_was_owned_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    module: Any = {"open": os, "flock": fcntl}[when]
    real: Callable[..., object] = getattr(module, when)
    collected: list[str] = []

    def collect_first(*given: object, **named: object) -> object:
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if not collected:
                collected.append(str(folder))
                folder.rmdir()
        return real(*given, **named)

    monkeypatch.setattr(module, when, collect_first)
    with scratch_folder() as folder:
        assert folder.exists()
        assert collected
        assert str(folder) not in collected
