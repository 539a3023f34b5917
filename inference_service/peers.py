"""What the front processes of one service, which share its port, know of each other: a file of each, in one folder.

The first of them leads: it alone asks Ray Serve for applications and takes them away, and drives roll-outs, by what all
have seen. Should it die, the parent process starts it again; meanwhile the others go on answering.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inference_service.domain.statistics import Counts

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
# One that lives, and has told nothing for so long, hangs or cannot write: what it told last may be true no more.
UNRESPONSIVE_AFTER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class PeerState:
    """By one process: whether it listens on the port, whether it is ready to answer, the applications that it may send
    batches to, those that it is taking out of Serve, how many logs it has written, and its own requests of versions
    that a roll-out is about, by application."""

    pid: int
    listens: bool
    ready: bool
    holds: list[str]
    going: list[str] = field(default_factory=list)
    written: int = 0
    counts: Mapping[str, Counts] = field(default_factory=dict)

    @staticmethod
    def from_json(text: str) -> PeerState:
        found: dict[str, Any] = json.loads(text)
        counts = {
            name: Counts(one["answered"], one["faults"], {int(place): count for place, count in one["took"].items()})
            for name, one in found.pop("counts").items()
        }
        return PeerState(**found, counts=counts)


class Peers:
    """Without a `folder` there are none. `number` counts from 0."""

    def __init__(self, folder: Path | None = None, number: int = 0) -> None:
        self._folder = folder
        self._number = number

    @property
    def is_leader(self) -> bool:
        return self._number == 0

    @property
    def are_there(self) -> bool:
        """Whether there may be any."""
        return self._folder is not None

    def heartbeat(self) -> None:
        """The sign of life that the parent process looks for. It raises nothing, and but for the first it needs neither
        a descriptor nor room on the disk: who lacks these, and answers, does not hang."""
        if self._folder is None:
            return
        own = heartbeat_of(self._folder, self._number, os.getpid())
        with suppress(OSError):
            if not own.exists():
                for before in self._folder.glob(f"{self._number}.*.beat"):
                    before.unlink(missing_ok=True)
            own.touch()

    def tell(self, told: PeerState) -> None:
        """Replaces what this process told before; who reads meanwhile reads one or the other."""
        self._write("json", json.dumps(asdict(told)).encode())

    def leave(self, name: str, data: bytes) -> None:
        """Replaces what this process left before under that name."""
        self._write(name, data)

    def left(self, name: str) -> list[bytes]:
        """By each other process; by one that has died until it is started again."""
        found = []
        for path in self._folder.glob(f"*.{name}") if self._folder is not None else ():
            if path.stem != str(self._number):
                with suppress(FileNotFoundError):
                    found.append(path.read_bytes())
        return found

    def counts(self, application: str) -> Iterable[Counts]:
        """Of each other process that tells."""
        return [
            told.counts[application]
            for reported_at, told in self._others()
            if application in told.counts and _is_recent(reported_at)
        ]

    def may_listen(self, ready: bool, holds: Iterable[str]) -> bool:
        """Whether this process, which `holds` these applications, may open the port: what the kernel gives it is then
        answered as well as by those that have it. So while nobody has, the first does, to say that the service starts;
        the others once all are ready, and it reaches whatever those reach that still tell."""
        listening = [(at, told) for at, told in self._others() if told.listens]
        if self.is_leader and not listening:
            return True
        own = set(holds)
        return ready and all(told.ready and own.issuperset(told.holds) for at, told in listening if _is_recent(at))

    def all_hold(self, application: str, unresponsive_s: float) -> bool:
        """Whether every other process that has the port can send batches there; one that has told nothing for
        `unresponsive_s` does not count."""
        return all(
            application in told.holds
            for reported_at, told in self._others()
            if told.listens and time.time() - reported_at < unresponsive_s
        )

    def going(self) -> set[str]:
        """The applications that another process is taking out of Serve. It has read a log that did not want them, and
        waits until nobody sends batches there: so nobody may, though the log should want them again by now."""
        return {name for reported_at, told in self._others() if _is_recent(reported_at) for name in told.going}

    def news(self) -> dict[int, tuple[int, list[str], list[str]]]:
        """How many logs each other process has written, what it holds and what it is taking out, by pid."""
        return {told.pid: (told.written, told.holds, told.going) for _, told in self._others()}

    async def let_go(self, application: str, since_s: float, unresponsive_s: float) -> None:
        """Returns once no other process sends batches there any more, as each has told after `since_s`, in seconds
        since the epoch: what it told before this process said that the application goes, it may have taken over since.
        One that has told nothing for `unresponsive_s` is not waited for."""
        while any(  # noqa: ASYNC110 - files tell nobody
            (reported_at <= since_s or application in told.holds) and time.time() - reported_at < unresponsive_s
            for reported_at, told in self._others()
        ):
            await asyncio.sleep(POLL_INTERVAL_S)

    def _others(self) -> Iterator[tuple[float, PeerState]]:
        """What those that live told last, and when, in seconds since the epoch."""
        if self._folder is None:
            return
        for path in self._folder.glob("*.json"):
            if path == self._path(self._number):
                continue
            with suppress(FileNotFoundError):
                reported_at, told = path.stat().st_mtime, PeerState.from_json(path.read_text())
                if _lives(told.pid):
                    yield reported_at, told

    def _write(self, name: str, data: bytes) -> None:
        if self._folder is not None:
            path = self._path(self._number).with_suffix(f".{name}")
            new = path.with_suffix(".new")
            new.write_bytes(data)
            new.replace(path)

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{number}.json"


def heartbeat_of(folder: Path, number: int, pid: int) -> Path:
    """The empty file that the front process of this number and pid touches as long as it goes on."""
    return folder / f"{number}.{pid}.beat"


def _is_recent(reported_at: float) -> bool:
    return time.time() - reported_at < UNRESPONSIVE_AFTER_S


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's by now
        return False
    return True
