"""Folders on local disk for what is not yet in the store. They go with the work, or with the next one's beginning."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"millrace-(\d+)-.*")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, which goes with the body. What processes left that were killed is taken away before."""
    _sweep_dead()
    with tempfile.TemporaryDirectory(prefix=f"millrace-{os.getpid()}-") as folder:
        yield Path(folder)


def _sweep_dead() -> None:
    for folder in Path(tempfile.gettempdir()).glob("millrace-*"):
        name = _NAME.fullmatch(folder.name)
        if name and not Path(f"/proc/{name[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)  # another may be at it, too
