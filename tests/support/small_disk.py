"""A disk that is soon full: a tmpfs of a few MiB. Mounting one needs rights that not every machine gives to tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """Skips the test where it cannot be mounted."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount program, so no small disk to fill")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here, so there is no small disk to fill: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
