"""A rank's side of a program's reports: what it reported is read once, uploaded, told to the attempt, and acknowledged.

Reports of a rank go one after the other through one thread, whatever their mode, so the attempt gets them in order.
`report` returns once the attempt has committed (SYNC, NO_UPLOAD), or once the bytes are in the spool (ASYNC). Of those
in the spool one is delivered and at most one waits: the next asynchronous report begins once there is room for it.

The first stop and the first error end a rank's reports for good: from then on `report` and `finish` raise it again. So
a training function that catches it cannot end as if all that it reported were durable.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.errors import InvalidArgument, error_from_record, shown
from shared.storage import key_problem
from train_service.records.reporting import GO_ON
from train_service.store_retry import retry_on_outage, store_call, waiting_for

logger = logging.getLogger(__name__)

SYNC, ASYNC, NO_UPLOAD = "SYNC", "ASYNC", "NO_UPLOAD"
MAX_METRICS_BYTES = 64 * 1024
MAX_FILES = 10_000
# All that one report says of its files, as JSON.
MAX_REPORT_BYTES = 16 * 1024 * 1024
PIECE_BYTES = 4 * 1024 * 1024
# Files of a report that are uploaded at the same time.
UPLOADS = 4
# Asynchronous reports that may wait, the one that is being delivered included, when another begins.
MAX_WAITING = 1
# A float holds every whole number up to it.
MAX_EXACT = 2**53


class ProgramStopped(BaseException):
    """The run should end here: the report was committed, and another attempt goes on behind it, or nobody does.

    No `Exception`: a program that catches those goes on to its end all the same."""

    def __init__(self, reason: int) -> None:
        super().__init__(f"the run ends at this report (reason {reason})")
        self.reason = reason


class Uploads(Protocol):
    """What a rank's reports need of the store."""

    def put_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]]) -> None: ...


class Line(Protocol):
    """The connection to the attempt."""

    def ask(self, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]: ...

    def tick(self) -> None: ...


@dataclass(frozen=True)
class Begin:
    """Where the attempt begins, as its coordinator answers to `begin`."""

    report: int
    token: str
    # See `coordinator.described`; None where the program starts from the beginning.
    checkpoint: dict[str, Any] | None
    positions: dict[str, Any]
    optimizer_steps: int

    @classmethod
    def ask(cls, line: Line) -> Begin:
        answer = checked(line.ask({"kind": "begin"}))
        return cls(
            answer["report"], answer["token"], answer["checkpoint"], answer["positions"], answer["optimizer_steps"]
        )


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The attempt's answer. Raises the error that it may be."""
    if "error" in answer:
        raise error_from_record(answer["error"])
    return answer


class RankReports:
    """One rank's reports in one attempt. Threads that report at the same time take turns."""

    def __init__(
        self,
        store: Uploads,
        line: Line,
        rank: int,
        data_folder: str,
        attempt: int,
        begin: Begin,
        spool: Path,
        *,
        take_shards: Callable[[], dict[str, Any]] = dict,
        optimizer_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        """`data_folder` is the registry's; `spool` a folder of this rank's own, where copies wait for their upload.
        `take_shards` gives what the shards of the dataset gave since the last report."""
        self._store = store
        self._line = line
        self._rank = rank
        self._data_folder = data_folder
        self._attempt = attempt
        self._token = begin.token
        self._spool = spool
        self._take_shards = take_shards
        self._optimizer_steps = optimizer_steps
        self._number = begin.report
        # Held for a whole report: its number, its rows and its place in the queue belong together.
        self._reporting = threading.Lock()
        self._ended: BaseException | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="program-reports")
        self._thread = self._pool.submit(threading.current_thread).result()
        self._waiting: list[Future[dict[str, Any]]] = []
        self._noted: set[str] = set()
        # Of the newest checkpoint that the attempt has acknowledged, or that it began from.
        self.checkpoint = begin.checkpoint

    @property
    def number(self) -> int:
        """Of the newest report that was begun. One whose metrics, folder or files are refused has no number."""
        return self._number

    @property
    def ended(self) -> BaseException | None:
        """The stop or the error that ended the reports, whether or not the training function has caught it."""
        return self._ended

    def report(
        self,
        metrics: Mapping[str, Any],
        folder: Path | None,
        *,
        mode: str = SYNC,
        delete: bool = False,
        upload: Callable[[], Path] | None = None,
    ) -> None:
        """Reports `metrics`, and the files in `folder` as a checkpoint; `delete` takes the folder away once it is
        committed. `upload` is called, where it is given, to say which folder counts instead.

        Raises `ProgramStopped`, `InvalidArgument` for what cannot be reported, and what the attempt ended for; once it
        has raised, the same at every call."""
        with self._turn():
            # A copy of each report that is under way takes room on the node's disk.
            self._collect(most=MAX_WAITING if mode == ASYNC else len(self._waiting))
            self._line.tick()
            numbers, epoch = self._numbers(metrics)
            number = self._number + 1
            if folder is not None and upload is None:
                files_of(folder, self._prefix(number))
                if mode == ASYNC:
                    folder, delete = self._into_spool(folder, number, move=delete), True
            body = {
                "kind": "report",
                "report": number,
                "metrics": numbers,
                "epoch": epoch,
                # What a shard gave is taken from it for good, so only once nothing can be refused here any more.
                "shards": self._take_shards(),
                "optimizer_steps": self._optimizer_steps(),
            }
            self._number = number
            self._waiting.append(self._pool.submit(self._deliver, body, folder, upload, delete))
            if mode != ASYNC:
                self._collect(most=0)
            self._line.tick()

    def finish(self) -> None:
        """Returns once all that was reported is committed. Raises as `report` does."""
        with self._turn():
            self._collect(most=0)

    def close(self) -> None:
        """Ends the thread; what was not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Around a report or the end of all: one at a time, and none after a stop or an error."""
        with waiting_for(self._thread):
            self._reporting.acquire()
        try:
            if self._ended is not None:
                raise self._ended
            try:
                yield
            except (Exception, ProgramStopped) as error:
                self._ended = error
                raise
        finally:
            self._reporting.release()

    def _collect(self, *, most: int) -> None:
        """Takes what the attempt has answered, and waits while more than `most` reports are not answered."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0].done()):
            with waiting_for(self._thread):
                answer = self._waiting.pop(0).result()
            if answer.get("checkpoint") is not None:
                self.checkpoint = answer["checkpoint"]
            if answer["stop"] != GO_ON:
                raise ProgramStopped(answer["stop"])

    def _deliver(
        self, body: dict[str, Any], folder: Path | None, upload: Callable[[], Path] | None, delete: bool
    ) -> dict[str, Any]:
        """In the thread of the reports: uploads the files, reports them, and waits for the answer."""
        if upload is not None:
            folder = upload()
        if folder is not None:
            body["files"] = self._upload(body["report"], folder)
            size = len(json.dumps(body))
            if size > MAX_REPORT_BYTES:
                raise InvalidArgument(
                    f"report {body['report']} names {len(body['files'])} files in {size} bytes, and at most "
                    f"{MAX_REPORT_BYTES} bytes are allowed; put them into fewer files, or use shorter paths"
                )
        answer = checked(self._line.ask(body))
        if folder is not None and delete:
            shutil.rmtree(folder, ignore_errors=True)
        return answer

    def _upload(self, number: int, folder: Path) -> list[tuple[str, int, str]]:
        prefix = self._prefix(number)

        def upload(path: str) -> tuple[str, int, str]:
            piecewise = _Pieces(folder / path, self._line.tick)
            retry_on_outage(lambda: self._store.put_pieces(f"{prefix}/{path}", piecewise), "a checkpoint")
            return path, piecewise.size_bytes, piecewise.sha256

        paths = files_of(folder, prefix)
        # Each file takes a few round trips to the store, of maybe 25 ms each.
        with store_call(), ThreadPoolExecutor(UPLOADS, thread_name_prefix="program-uploads") as uploads:
            return list(uploads.map(upload, paths))

    def _prefix(self, number: int) -> str:
        """Of the keys of this rank's files in a report."""
        return f"{self._data_folder}/report-{number:08d}-a{self._attempt:05d}-{self._token}/r{self._rank:04d}"

    def _into_spool(self, folder: Path, number: int, *, move: bool) -> Path:
        """A copy that nobody changes: a program may take the folder away, or write into it, once `report` returns."""
        kept = self._spool / f"waiting-{number:08d}"
        if move:
            shutil.move(folder, kept)
        else:
            shutil.copytree(folder, kept)
        return kept

    def _numbers(self, metrics: Mapping[str, Any]) -> tuple[dict[str, float], int]:
        """The numbers among the metrics, and the epoch, -1 where none is named. Raises `InvalidArgument`."""
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            number = as_number(str(name), value)
            if number is None:
                self._note(f"the metric {str(name)!r} is {type(value).__name__}, no number: it is left out")
            elif not math.isfinite(number):
                self._note(f"the metric {str(name)!r} is {number}: it is left out of reports where it is")
            else:
                numbers[str(name)] = number
        if (size := len(json.dumps(numbers))) > MAX_METRICS_BYTES:
            raise InvalidArgument(
                f"the metrics of a report take {size} bytes, and at most {MAX_METRICS_BYTES} are allowed; report fewer"
            )
        epoch = metrics.get("epoch")
        return numbers, epoch if isinstance(epoch, int) and abs(epoch) < 2**31 else -1

    def _note(self, text: str) -> None:
        """Once, by rank 0, whose metrics count."""
        if self._rank == 0 and text not in self._noted:
            self._noted.add(text)
            self._line.ask({"kind": "warning", "text": text})


def as_number(name: str, value: Any) -> float | None:
    """None for what is no number. Raises `ValueError` for a tensor, as Ray does."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        raise ValueError(
            f"the metric {name!r} is a torch tensor, no number; use `.item()`, or save it in the checkpoint"
        )
    if type(value) is int and abs(value) <= MAX_EXACT:
        return value  # a script finds in its result what it reported
    if isinstance(value, (int, float)):
        return float(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and value.dtype.kind in "biuf":
        return float(value)
    return None


def files_of(folder: Path, prefix: str) -> list[str]:
    """The paths of all files below `folder`, sorted, each to be an object below `prefix`. Raises `InvalidArgument` for
    what is no plain file, and for names that a store cannot hold."""
    if not folder.is_dir():
        raise InvalidArgument(f"the checkpoint's folder {folder} does not exist; report before it is taken away")
    found = []
    for parent, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = Path(parent, name)
            mode = path.lstat().st_mode
            relative = path.relative_to(folder).as_posix()
            if stat.S_ISLNK(mode) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
                raise InvalidArgument(f"{shown(relative)} in the checkpoint is {kind}; put a copy of the file there")
            if stat.S_ISREG(mode):
                if problem := key_problem(f"{prefix}/{relative}"):
                    raise InvalidArgument(
                        f"the file {shown(relative)} in the checkpoint cannot be stored: its path {problem}; rename it",
                        reason="FILE_NAME",
                    )
                found.append(relative)
    if len(found) > MAX_FILES:
        raise InvalidArgument(f"the checkpoint has {len(found)} files, and at most {MAX_FILES} are allowed; pack them")
    return sorted(found)


class _Pieces:
    """A file's bytes in pieces, digested as they are read; of the last time that they were read to the end."""

    def __init__(self, path: Path, advanced: Callable[[], None]) -> None:
        self._path = path
        self._advanced = advanced
        self.sha256, self.size_bytes = "", 0

    def __call__(self) -> Iterator[bytes]:
        digest, size = hashlib.sha256(), 0
        with self._path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                size += len(piece)
                self._advanced()
                yield piece
        self.sha256, self.size_bytes = digest.hexdigest(), size
