"""Reading the logs of an attempt, and following them while they grow."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.errors import NotFound
from shared.jobs import JobRecord, Jobs
from shared.storage import ObjectInfo, ObjectStore
from train_service.records.logs import STACKS_CHUNK

# A message of a stream holds about so much.
TEXT_BYTES = 256 * 1024
TEXTS_AT_ONCE = 64

_KEY = re.compile(r".*/r(-?\d+)/(\d+)\.txt")


@dataclass(frozen=True)
class LogText:
    """Whole lines of one rank, each with its end."""

    attempt: int
    rank: int
    text: str


class LogReader:
    """Reads on where it stopped. Not shared between threads."""

    def __init__(
        self, store: ObjectStore, jobs: Jobs, job: str, attempt: int, rank: int | None, follow: bool = False
    ) -> None:
        """`attempt` 0: the next one that begins. With `follow` the stacks of a rank, its last chunk whatever comes
        before, are kept back until `over`."""
        self._store = store
        self._jobs = jobs
        self._job = job
        self._attempt = attempt
        self._rank = rank
        self._stacks_too = not follow
        # Bytes of each chunk.
        self._read: dict[str, int] = {}
        self._closed: set[str] = set()

    def over(self) -> bool:
        """Whether the attempt has ended. Ask before `read`: what it brings after the answer yes is the last."""
        job = self._jobs.get(self._job, self._job)
        if not self._attempt and _has_attempt(job):
            self._attempt = job.attempt
        over = job.state.final or (self._attempt > 0 and job.attempt != self._attempt)
        self._stacks_too = self._stacks_too or over
        return over

    def read(self) -> list[LogText]:
        """What is new since the last call, rank by rank; some MiB at most."""
        if not self._attempt:
            return []
        found: list[tuple[int, int, ObjectInfo]] = []
        stacks: list[tuple[int, int, ObjectInfo]] = []
        for info in self._store.list(f"{self._job}/logs/a{self._attempt:05d}"):
            matched = _KEY.fullmatch(info.key)
            if matched and self._rank in (None, int(matched[1])):
                # Stacks are not a later chunk of the rank's own: what it writes may still grow.
                of = stacks if info.key.endswith(f"/{STACKS_CHUNK}") else found
                of.append((int(matched[1]), int(matched[2]), info))
        newest = {rank: number for rank, number, _ in sorted(found, key=lambda one: one[:2])}
        if self._stacks_too:
            found += stacks
        texts: list[LogText] = []
        for rank, number, info in sorted(found, key=lambda one: one[:2]):
            if len(texts) >= TEXTS_AT_ONCE:
                break
            texts += [LogText(self._attempt, rank, text) for text in self._new_of(info, number < newest.get(rank, 0))]
        return texts

    def _new_of(self, info: ObjectInfo, closed: bool) -> list[str]:
        """A chunk is `closed` once there is a later one. How long it is then, an older listing does not know."""
        begin = self._read.get(info.key, 0)
        if info.key in self._closed or (not closed and info.size_bytes <= begin):
            return []
        if closed:
            self._closed.add(info.key)
            data = self._store.get(info.key)[begin:]
        else:
            data = self._store.get_range(info.key, begin, info.size_bytes - begin)
        self._read[info.key] = begin + len(data)
        return _pieces(data)


def find_logs(store: ObjectStore, jobs: Jobs, name: str, attempt: int, rank: int | None, follow: bool) -> LogReader:
    """Raises `NotFound` where there are no logs; with `follow`, only where none will come."""
    job = jobs.get(name, name)
    chosen = attempt or (job.attempt if _has_attempt(job) else 0)
    if follow and not job.state.final and chosen in (0, job.attempt):
        return LogReader(store, jobs, name, chosen, rank, follow)
    if not LogReader(store, jobs, name, chosen, rank).read():
        whose = "" if rank is None else f" of rank {rank}"
        raise NotFound(
            f"{name} has no logs{whose} of attempt {chosen}; it is at attempt {job.attempt}, {job.state}",
            reason="NO_LOGS",
            metadata={"resource": name, "attempt": str(chosen)},
        )
    return LogReader(store, jobs, name, chosen, rank)


def _has_attempt(job: JobRecord) -> bool:
    return job.attempts_made > 0


def _pieces(data: bytes) -> list[str]:
    """Whole lines again, of about `TEXT_BYTES` each; a single line may be longer."""
    pieces, begin = [], 0
    while begin < len(data):
        end = data.rfind(b"\n", begin, begin + TEXT_BYTES) + 1
        if end <= begin:
            end = data.find(b"\n", begin) + 1 or len(data)
        pieces.append(data[begin:end].decode("utf-8", "replace"))
        begin = end
    return pieces
