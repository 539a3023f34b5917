"""The frontend processes of an inference service, as the kernel reports them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path


def frontends_of(parent: int) -> dict[int, int]:
    """The pids of the parent's children by their numbers, which are their first arguments."""
    found = {}
    with suppress(OSError):
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with suppress(OSError, IndexError, ValueError):  # it has ended, or is no other program yet
                found[int(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3])] = int(pid)
    return found


def listens(parent: int, number: int) -> bool:
    """Return whether the frontend with this number now reports to the others that it has the port."""
    pid = frontends_of(parent).get(number)
    with suppress(OSError, IndexError):  # it has ended, or has told nothing yet
        folder = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[4]
        reported = json.loads((Path(folder) / f"{number}.json").read_text())
        return bool(reported["pid"] == pid and reported["listens"])
    return False
