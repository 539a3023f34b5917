"""Scratch folders go with their work, also where it was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from data_service.scratch import scratch_folder


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


def test_what_a_killed_process_left_is_taken_away_and_nothing_else(place: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = place / f"millrace-{int(dead.stdout)}-abc"
    left.mkdir()
    (left / "half.parquet").touch()
    others = [place / "millrace-notes", place / "somebody-1-else"]
    for other in others:
        other.mkdir()

    with scratch_folder():
        assert not left.exists()

    assert all(other.exists() for other in others)
