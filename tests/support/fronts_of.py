"""The front processes of an inference service, as the kernel tells them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def fronts_of(parent: int) -> dict[int, int]:
    """The pids of the parent's children by their numbers, which are their first arguments."""
    found = {}
    with suppress(OSError):
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with suppress(OSError, IndexError, ValueError):  # it has ended, or is no other program yet
                found[int(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3])] = int(pid)
    return found
