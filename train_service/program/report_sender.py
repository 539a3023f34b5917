"""A rank's side of a program's reports: each is read once, uploaded, sent to the attempt, and acknowledged.

One thread sends a rank's reports one after another, whatever their mode, so the attempt receives them in order.
`report` returns once the attempt has committed (SYNC, NO_UPLOAD), or once the bytes are in the spool (ASYNC). Of the
reports in the spool one is delivered and at most one waits: the next asynchronous report begins once there is room.

The first stop or error ends a rank's reports: from then on `report` and `finish` raise it again. So a training function
that catches it cannot end as if all its reports were durable.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shared.errors import InvalidArgument, error_from_record, shown
from shared.storage import key_problem
from train_service.records.event_log import GO_ON
from train_service.store_retry import retry_on_outage, store_call, waiting_for

logger = logging.getLogger(__name__)

SYNC, ASYNC, NO_UPLOAD = "SYNC", "ASYNC", "NO_UPLOAD"
MAX_METRICS_BYTES = 64 * 1024
MAX_FILES = 10_000
# Limit on a report's list of files, as JSON.
MAX_REPORT_BYTES = 16 * 1024 * 1024
PIECE_BYTES = 4 * 1024 * 1024
# Files of a report that are uploaded at the same time.
UPLOADS = 4
# Asynchronous reports that may be pending, the one being delivered included, when another begins.
MAX_WAITING = 1
# A float represents every integer up to it exactly.
MAX_EXACT = 2**53


class ProgramStopped(BaseException):
    """The run ends here: the report was committed, and another attempt may continue after it.

    It is not an `Exception`, because a program that catches those would continue to its end.
    """

    def __init__(self, reason: int) -> None:
        super().__init__(f"the run ends at this report (reason {reason})")
        self.reason = reason


class Uploads(Protocol):
    """The store's method that a rank's reports use."""

    def put_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]]) -> None: ...


class Line(Protocol):
    """The connection to the attempt."""

    def ask(self, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]: ...

    def note_progress(self) -> None: ...


@dataclass(frozen=True)
class Begin:
    """The attempt's start, as its coordinator answers to `begin`."""

    report: int
    token: str
    # See `coordinator.described`; None: the program starts from the beginning.
    checkpoint: dict[str, Any] | None
    positions: dict[str, Any]
    optimizer_steps: int
    # The number of passes that were done, by loader of the program's own data.
    indices: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def ask(cls, line: Line) -> Begin:
        answer = checked(line.ask({"kind": "begin"}))
        return cls(
            answer["report"],
            answer["token"],
            answer["checkpoint"],
            answer["positions"],
            answer["optimizer_steps"],
            answer["indices"],
        )


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the attempt's answer. Raises the error that it holds, if any."""
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
        take_indices: Callable[[], dict[str, Any]] = dict,
        optimizer_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        """Prepare the reports.

        `data_folder` is the registry's; `spool` is a folder of this rank, where copies wait for their upload.
        `take_shards` returns what the dataset's shards returned since the last report, `take_indices` what the
        program's own loaders did.
        """
        self._store = store
        self._line = line
        self._rank = rank
        self._data_folder = data_folder
        self._attempt = attempt
        self._token = begin.token
        self._spool = spool
        self._take_shards = take_shards
        self._take_indices = take_indices
        self._optimizer_steps = optimizer_steps
        self._number = begin.report
        # Held for a whole report, because its number, its rows and its place in the queue belong together.
        self._reporting = threading.Lock()
        self._ended: BaseException | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="program-reports")
        self._thread = self._pool.submit(threading.current_thread).result()
        self._waiting: list[Future[dict[str, Any]]] = []
        self._noted: set[str] = set()
        # The newest checkpoint that the attempt has acknowledged, or began from.
        self.checkpoint = begin.checkpoint

    @property
    def number(self) -> int:
        """The number of the newest report. A report whose metrics, folder or files are refused has no number."""
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
        """Report `metrics`, and the files in `folder` as a checkpoint.

        `delete` deletes the folder once it is committed. `upload`, if given, is called and returns the folder to use
        instead.

        Raises `ProgramStopped`, `InvalidArgument` for invalid reports, and the error that ended the attempt. After the
        first error every call raises the same one.
        """
        with self._turn():
            # The copy of each pending report takes room on the node's disk.
            self._collect(most=MAX_WAITING if mode == ASYNC else len(self._waiting))
            self._line.note_progress()
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
                # Rows taken from a shard cannot be returned, so take them only once nothing here can refuse the report.
                "shards": self._take_shards(),
                "indices": self._take_indices(),
                "optimizer_steps": self._optimizer_steps(),
            }
            self._number = number
            self._waiting.append(self._pool.submit(self._deliver, body, folder, upload, delete))
            if mode != ASYNC:
                self._collect(most=0)
            self._line.note_progress()

    def finish(self) -> None:
        """Return once all reports are committed. Raises as `report` does."""
        with self._turn():
            self._collect(most=0)

    def close(self) -> None:
        """End the thread. Reports that were not begun are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Serialize reports and `finish`, and raise again after a stop or an error."""
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
        """Take the attempt's answers, and wait while more than `most` reports are unanswered."""
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
        """Upload the files, send the report, and wait for the answer. Runs in the thread of the reports."""
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
            piecewise = _Pieces(folder / path, self._line.note_progress)
            retry_on_outage(lambda: self._store.put_pieces(f"{prefix}/{path}", piecewise), "a checkpoint")
            return path, piecewise.size_bytes, piecewise.sha256

        paths = files_of(folder, prefix)
        # Each file takes a few round trips to the store, of maybe 25 ms each.
        with store_call(), ThreadPoolExecutor(UPLOADS, thread_name_prefix="program-uploads") as uploads:
            return list(uploads.map(upload, paths))

    def _prefix(self, number: int) -> str:
        """Return the key prefix of this rank's files in a report."""
        return f"{self._data_folder}/report-{number:08d}-a{self._attempt:05d}-{self._token}/r{self._rank:04d}"

    def _into_spool(self, folder: Path, number: int, *, move: bool) -> Path:
        """Make a private copy: a program may delete or change the folder once `report` returns."""
        kept = self._spool / f"waiting-{number:08d}"
        if move:
            shutil.move(folder, kept)
        else:
            shutil.copytree(folder, kept)
        return kept

    def _numbers(self, metrics: Mapping[str, Any]) -> tuple[dict[str, float], int]:
        """Return the numbers among the metrics, and the epoch, -1 if none is given. Raises `InvalidArgument`."""
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
        """Warn once, on rank 0 only, whose metrics count."""
        if self._rank == 0 and text not in self._noted:
            self._noted.add(text)
            self._line.ask({"kind": "warning", "text": text})


def as_number(name: str, value: Any) -> float | None:
    """Return the value as a number, None if it is not one. Raises `ValueError` for a tensor, as Ray does."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        raise ValueError(
            f"the metric {name!r} is a torch tensor, no number; use `.item()`, or save it in the checkpoint"
        )
    if type(value) is int and abs(value) <= MAX_EXACT:
        return value  # a script finds in its result the value that it reported
    if isinstance(value, (int, float)):
        return float(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and value.dtype.kind in "biuf":
        return float(value)
    return None


def files_of(folder: Path, prefix: str) -> list[str]:
    """Return the sorted paths of all files below `folder`, each to be stored below `prefix`.

    Raises `InvalidArgument` for anything but plain files, and for names that a store cannot hold.
    """
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
    """A file's bytes in pieces, with size and digest of the last complete read."""

    def __init__(self, path: Path, note_progress: Callable[[], None]) -> None:
        self._path = path
        self._note_progress = note_progress
        self.sha256, self.size_bytes = "", 0

    def __call__(self) -> Iterator[bytes]:
        digest, size = hashlib.sha256(), 0
        with self._path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                size += len(piece)
                self._note_progress()
                yield piece
        self.sha256, self.size_bytes = digest.hexdigest(), size
