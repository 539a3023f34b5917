"""The attempt's side of a program's reports: the ranks' reports meet here and become checkpoints.

A rank uploads its files below the attempt's own folder, and then sends {report n, metrics, files}. Once all W ranks
have sent report n, the files are merged (of a path that several ranks reported the lowest rank's file counts) and the
manifest is written. Then the registry records the checkpoint under the attempt's number. It refuses a stale attempt,
whose files are deleted. Only then is every rank answered, and its `ray.train.report` returns.

    {job}/checkpoints/data/report-{n:08d}-a{attempt:05d}-{token}/r{rank:04d}/{path}

Reports are numbered from 1 over all attempts: an attempt continues after the checkpoint that it resumes from.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.checkpoint.format import (
    OTHER_FORMAT,
    ProgramContent,
    ProgramFile,
    verify_program_checkpoint,
    write_manifest,
)
from shared.checkpoint.registry import best
from shared.dataset_version import load_version
from shared.errors import DataLoss, Internal, InvalidArgument, MillraceError, error_from_record, shown
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore
from train_service.checkpoints.retention import retain
from train_service.domain.coverage_counts import check_drawn, check_shards, merge_drawn, merge_reports, shard_identity
from train_service.domain.spec import KEEP, REPLAY, Program, TrainingSpec
from train_service.records.event_log import CANCEL, GO_ON, REPORT_INTERVAL_S, STALE, EventKind
from train_service.records.metrics_log import MetricsLog
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import FAILING

logger = logging.getLogger(__name__)

NOT_BY_ALL = "REPORT_NOT_BY_ALL"
# Ranks that have not reported after this time are named.
MISSING_NAMED_AFTER_S = 60.0
# The attempt fails after this time, whatever the missing ranks do meanwhile.
MISSING_FOR_S = 600.0
# A rank that is asked to stop confirms within this time; its work is durable by then.
STOPS_TIMEOUT_S = 20.0
FOLDER_NAME = re.compile(r"report-(?P<report>\d{8})-a(?P<attempt>\d{5})-[0-9a-f]+")

Reply = Callable[[dict[str, Any]], None]
# Writes an event of the run; its payload fits the message of its kind.
ReportEvent = Callable[[EventKind, dict[str, Any]], None]


@dataclass
class ReportPart:
    """One rank's part of a report."""

    rank: int
    metrics: dict[str, float]
    epoch: int
    # None: without a checkpoint.
    files: list[ProgramFile] | None
    shards: dict[str, Any]
    indices: dict[str, Any]
    optimizer_steps: int

    @classmethod
    def from_body(cls, rank: int, body: Mapping[str, Any]) -> ReportPart:
        files = body.get("files")
        return cls(
            rank=rank,
            metrics=body.get("metrics", {}),
            epoch=int(body.get("epoch", -1)),
            files=None
            if files is None
            else [ProgramFile(path=path, rank=rank, size_bytes=size, sha256=digest) for path, size, digest in files],
            shards=body.get("shards", {}),
            indices=body.get("indices", {}),
            optimizer_steps=int(body.get("optimizer_steps", 0)),
        )


def merged_files(parts: Sequence[ReportPart]) -> tuple[list[ProgramFile], list[ProgramFile], list[str]]:
    """Return the files that count, those that do not, and the paths under which ranks had different bytes.

    Of a path that several ranks reported, the lowest rank's file counts. Raises `InvalidArgument` if one rank's file is
    a folder of another rank's: no folder can hold both.
    """
    kept: dict[str, ProgramFile] = {}
    dropped, conflicts = [], set[str]()
    for part in sorted(parts, key=lambda one: one.rank):
        for file in part.files or ():
            first = kept.setdefault(file.path, file)
            if first is not file:
                dropped.append(file)
                if first.sha256 != file.sha256:
                    conflicts.add(file.path)
    for file in kept.values():
        for parent in PurePosixPath(file.path).parents:
            if above := kept.get(str(parent)):
                raise InvalidArgument(
                    f"rank {above.rank} reported the file {shown(above.path)}, and rank {file.rank} "
                    f"{shown(file.path)} below it; rename one of them",
                    reason="FILE_IN_FILE",
                    metadata={"ranks": f"{above.rank},{file.rank}"},
                )
    return [kept[path] for path in sorted(kept)], dropped, sorted(conflicts)


@dataclass
class Start:
    """The attempt's start: after the report of `entry`, or at the very beginning."""

    entry: CheckpointEntry | None = None
    content: ProgramContent | None = None
    # Folders of checkpoints that were found damaged.
    damaged: set[str] = field(default_factory=set)
    # The newest report of other runs of the same script.
    reports_before: int = 0

    @property
    def report(self) -> int:
        return max(self.entry.step if self.entry else 0, self.reports_before)

    def as_answer(self) -> dict[str, Any]:
        content = self.content
        return {
            "report": self.report,
            "checkpoint": described(self.entry),
            # Without the rows that the shards returned: they take a range per epoch, and only the attempt needs them.
            "positions": {
                split: {key: value for key, value in shard.items() if key != "given"}
                for split, shard in (content.positions if content else {}).items()
            },
            "indices": {loader: {"done": one["done"]} for loader, one in (content.indices if content else {}).items()},
            "optimizer_steps": content.optimizer_steps if content else 0,
        }


def described(entry: CheckpointEntry | None) -> dict[str, Any] | None:
    """Return what a rank needs to read a checkpoint."""
    if entry is None:
        return None
    return {
        "name": entry.name,
        "folder": entry.folder,
        "manifest_sha256": entry.manifest_sha256,
        "report": entry.step,
    }


class ReportCoordinator:
    """Coordinator of the ranks' reports.

    Use it as a context around the workers' run. One thread handles all messages of the ranks, in the order of arrival.
    """

    def __init__(
        self,
        store: ObjectStore,
        job_name: str,
        attempt: int,
        spec: TrainingSpec,
        world_size: int,
        *,
        report_event: ReportEvent,
        stop_reason: Callable[[], int] = lambda: GO_ON,
        named_after_s: float = MISSING_NAMED_AFTER_S,
        missing_for_s: float = MISSING_FOR_S,
        fit: int = 0,
        reports_before: int = 0,
        began_before: bool = False,
    ) -> None:
        """Prepare the coordination of a run.

        `report_event` writes events; `stop_reason` returns the requested stop of the run, see `reporting`. For a
        script, `fit` is the number of its run, which resumes only from its own checkpoints, and `reports_before` the
        number of the newest report of any other run. `began_before`: an earlier attempt began this run.
        """
        assert spec.program is not None
        self._store = store
        self._job_name = job_name
        self._attempt = attempt
        self._spec = spec
        self._program: Program = spec.program
        self._world_size = world_size
        self._report_event = report_event
        self._stop_reason = stop_reason
        self._named_after_s = named_after_s
        self._missing_for_s = missing_for_s
        self._fit = fit
        self._reports_before = reports_before
        self._began_before = began_before
        self._registry = CheckpointRegistry(store, job_name)
        self.token = uuid.uuid4().hex[:8]
        self._said: queue.Queue[tuple[int, dict[str, Any], Reply] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._start: Start | None = None
        self._metrics: MetricsLog | None = None
        self._newest: CheckpointEntry | None = None
        # The pending report: its number, the parts that have arrived, and the reply to each.
        self._number = 0
        self._parts: dict[int, ReportPart] = {}
        self._replies: dict[int, Reply] = {}
        self._met_at = 0.0
        self._named = False
        # Rank 0's latest reported metrics.
        self._last_metrics: dict[str, float] = {}
        # Positions of the shards at the last report, and the answer to that report.
        self._positions: dict[str, Any] = {}
        # The indices that the program's own loaders had given at the last report.
        self._indices: dict[str, Any] = {}
        self._acknowledged: dict[str, Any] = {}
        # Identities of the dataset version's shards, by split; None until a rank reports a shard.
        self._identities: dict[str, dict[str, Any]] | None = None
        self._returned: set[int] = set()
        self._stopped: set[int] = set()
        self._stop_reported_at: float | None = None
        self._reported_stop = GO_ON
        self._warned_paths: set[str] = set()
        self._progress_at = 0.0
        # The newest report, if it came too soon after one whose progress was recorded.
        self._unrecorded: tuple[int, ReportPart] | None = None
        # Guards the state that other threads read.
        self._lock = threading.Lock()
        # All ranks have reported, and wait for the attempt.
        self.is_committing = False
        # The error that ended the run, if it was found here.
        self.cause: MillraceError | None = None

    def __enter__(self) -> ReportCoordinator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._said.put(None)
        self._thread.join()
        if self._metrics is not None:
            self._metrics.__exit__()

    def handle(self, rank: int, body: dict[str, Any], reply: Reply) -> None:
        """Queue a rank's message. Any thread may call it."""
        self._said.put((rank, body, reply))

    @property
    def due(self) -> int:
        """The number of the pending or next report."""
        with self._lock:
            return self._number

    @property
    def all_returned(self) -> bool:
        """Whether the function has returned on every rank, and all its reports are durable.

        That is: no stop was answered to a report, and nothing failed.
        """
        with self._lock:
            returned = len(self._returned) == self._world_size
            return returned and self.cause is None and self._reported_stop == GO_ON

    @property
    def reported(self) -> int:
        """The number of reports that this attempt has acknowledged."""
        with self._lock:
            return self._number - 1 - self._start.report if self._start else 0

    @property
    def newest(self) -> CheckpointEntry | None:
        """The newest checkpoint. Valid once the run has ended."""
        return self._newest

    @property
    def last_report(self) -> tuple[int, dict[str, float]]:
        """The number of the newest report, and its metrics. Valid once the run has ended."""
        return self._number - 1, self._last_metrics

    @property
    def missing(self) -> list[int]:
        """The ranks that are late for a report by more than the time to name them. Empty before."""
        with self._lock:
            return self._absent() if self._named else []

    def overdue(self, now: float | None = None) -> list[int]:
        """Return the ranks that were asked to stop in an answer and have not stopped in time."""
        with self._lock:
            if self._stop_reported_at is None or (now or time.monotonic()) - self._stop_reported_at < STOPS_TIMEOUT_S:
                return []
            return sorted(set(range(self._world_size)) - self._stopped - self._returned)

    def result(self) -> dict[str, Any]:
        """Return the newest checkpoint, which is verified, and the best that is not known to be damaged.

        Both are empty for a program that reported none.
        """
        entries = retry_on_outage(self._registry.entries, "the checkpoints")
        damaged = self._start.damaged if self._start else set()
        chosen = best([entry for entry in entries if entry.folder not in damaged], self._spec.checkpoints.ranking)
        newest = self._newest
        return {"checkpoint": newest.name if newest else "", "best_checkpoint": chosen.name if chosen else ""}

    def finish(self) -> None:
        """Mark the newest checkpoint as final, once all ranks have returned. Warn if there is none."""
        if self._unrecorded is not None:
            self._record_progress(*self._unrecorded)
        if self._newest is not None:
            name = self._newest.name
            retry_on_outage(lambda: self._registry.finish(name, self._attempt), "the final checkpoint")
        else:
            text = "the program ended without a checkpoint: nothing of it can be resumed, loaded or served"
            self._report_event(EventKind.WARNING, {"text": text})

    def _run(self) -> None:
        try:
            self._begin()
        except Exception as error:
            self._fail(_as_ours(error))
        while True:
            try:
                item = self._said.get(timeout=1.0)
            except queue.Empty:
                self._check_missing()
                continue
            if item is None:
                return
            rank, body, reply = item
            try:
                self._handle(rank, body, reply)
            except StaleAttempt:
                self._note_stop(STALE)
                self._answer_all({"committed": self._number, "stop": STALE})
            except Exception as error:
                logger.exception("a report cannot be handled")
                with self._lock:
                    self._replies.setdefault(rank, reply)
                self._fail(_as_ours(error))

    def _begin(self) -> None:
        """Open the registry for the attempt and choose the newest checkpoint whose every digest matches."""
        start = Start()

        def choose() -> None:
            all_there_are = self._registry.fence(self._attempt, self._spec.checkpoints.ranking)
            entries = [one for one in all_there_are if one.fit == self._fit]
            start.reports_before = max((one.step for one in all_there_are if one.fit != self._fit), default=0)
            start.reports_before = max(start.reports_before, self._reports_before)
            for entry in sorted(entries, key=lambda one: one.step, reverse=True):
                if entry.folder in start.damaged:
                    continue
                try:
                    start.content = verify_program_checkpoint(self._store, entry.folder, entry.manifest_sha256)
                except DataLoss as error:
                    self._warn(f"{entry.name} is damaged and skipped: {error.message}")
                    if error.specific_reason != OTHER_FORMAT:
                        start.damaged.add(entry.folder)
                    continue
                start.entry = entry
                return
            if entries:
                self._warn("no checkpoint is whole: the program starts from the beginning")
            elif self._began_before:
                self._warn(
                    "the program starts over: no checkpoint was reported before the attempt was lost; report one with "
                    "ray.train.report(..., checkpoint=...), so that the next attempt goes on from there"
                )

        retry_on_outage(choose, "the newest checkpoint")
        retry_on_outage(self._delete_leftovers, "what earlier attempts left")
        self._metrics = MetricsLog(self._store, self._job_name, self._attempt, start.report)
        self._metrics.__enter__()
        self._newest = start.entry
        self._positions = dict(start.content.positions) if start.content else {}
        self._indices = dict(start.content.indices) if start.content else {}
        self._number = start.report + 1
        self._start = start
        self._warn_of_replay()
        started = {
            "num_workers": self._world_size,
            "step": start.report,
            "checkpoint": start.entry.name if start.entry else "",
        }
        self._report_event(EventKind.ATTEMPT_STARTED, started)

    def _warn_of_replay(self) -> None:
        """Warn if the program resumes within an epoch.

        It reads that epoch again unless it loads its shard's position.
        """
        if self._program.data_resume != REPLAY:
            return
        for split, shard in sorted(self._positions.items()):
            cut = [place for place in shard["places"] if place and (place[1] or place[2])]
            if cut:
                epoch = min(place[0] for place in cut)
                self._warn(
                    f"the checkpoint was taken within epoch {epoch} of split {split!r}: its rows are given again from "
                    "the epoch's beginning, and count as repeated, unless the program loads the state_dict of its "
                    "shard; program.data_resume CONTINUE gives the rows that are left"
                )

    def _delete_leftovers(self) -> None:
        """Delete files that earlier attempts uploaded but did not commit."""
        state = self._registry.read()
        named = {checkpoint.folder for checkpoint in state.checkpoints} | {one.entry.folder for one in state.retiring}
        for name in self._store.folders(self._registry.data_folder):
            folder, match = f"{self._registry.data_folder}/{name}", FOLDER_NAME.fullmatch(name)
            if match and int(match["attempt"]) < self._attempt and folder not in named:
                self._store.delete_folder(folder)
                self._store.delete_unfinished(folder, time.time())

    def _handle(self, rank: int, body: dict[str, Any], reply: Reply) -> None:
        kind = body["kind"]
        if self._start is None or (self.cause is not None and kind == "report"):
            cause = self.cause or Internal("the attempt could not begin", reason="DID_NOT_START")
            reply({"error": cause.as_record()})
        elif kind == "begin":
            reply({**self._start.as_answer(), "token": self.token})
        elif kind == "report":
            self._take(rank, body, reply)
        elif kind == "newest":
            reply({"checkpoint": described(self._newest)})
        elif kind == "warning":
            self._warn(str(body["text"]))
            reply({})
        elif kind == FAILING:
            # The rank's process ends next, maybe before Ray learns why.
            error = error_from_record(body["error"])
            if self.cause is None or _adds_line(error, self.cause):
                self.cause = error
            reply({})
        elif kind == "stopped":
            with self._lock:
                self._stopped.add(rank)
            reply({})
        elif kind == "returned":
            with self._lock:
                self._returned.add(rank)
            reply({})
            self._check_returned()
        else:
            raise Internal(f"a rank says {kind!r}, which nobody knows", reason="UNKNOWN_REQUEST")

    def _take(self, rank: int, body: dict[str, Any], reply: Reply) -> None:
        number = int(body["report"])
        if number == self._acknowledged.get("committed"):
            reply(self._acknowledged)  # a repeated request: the answer was lost
            return
        if number != self._number:
            raise Internal(
                f"rank {rank} reports number {number}, and number {self._number} is due", reason="REPORT_LOST"
            )
        part = ReportPart.from_body(rank, body)
        if part.shards:
            self._check_shards(part)
        check_drawn(rank, part.indices, self._indices)
        with self._lock:
            if not self._parts:
                self._met_at, self._named = time.monotonic(), False
            self._parts[rank] = part
            self._replies[rank] = reply
            complete = len(self._parts) == self._world_size
        if not complete:
            self._check_returned()
            return
        self.is_committing = True
        try:
            self._commit()
        finally:
            self.is_committing = False

    def _check_shards(self, part: ReportPart) -> None:
        """Raise `InvalidArgument` for positions that no rank of this run can have."""
        if self._identities is None:
            self._identities = retry_on_outage(self._find_identities, "the dataset version")
        keeps = self._program.remainder == KEEP
        shards, size = part.shards, self._world_size
        check_shards(part.rank, shards, self._identities, size, self._positions, keeps_remainder=keeps)

    def _find_identities(self) -> dict[str, dict[str, Any]]:
        """Return the identities of the shards, by split."""
        if not self._spec.dataset_version:
            return {}
        version = load_version(self._store, self._spec.dataset_version)
        return {
            split.name: shard_identity(version.name, version.manifest_sha256, split.name, split.row_count, self._spec)
            for split in version.manifest.splits
        }

    def _commit(self) -> None:
        number, parts = self._number, [self._parts[rank] for rank in sorted(self._parts)]
        first = parts[0]
        carried = any(part.files is not None for part in parts)
        try:
            files = merged_files(parts)
        except InvalidArgument:
            self._take_away(number)
            raise
        if any(one.indices for one in parts):
            self._indices = merge_drawn(self._indices, [one.indices for one in parts])
        if any(one.shards for one in parts):
            self._positions = merge_reports([[one.shards for one in parts]], self._world_size, self._positions)
        assert self._metrics is not None
        self._metrics.add(number, first.epoch, {**first.metrics, "optimizer_steps": float(first.optimizer_steps)})
        self._last_metrics = first.metrics
        self._report_progress(number, first)
        if carried:
            try:
                self._commit_checkpoint(number, first, *files)
            except StaleAttempt:
                # If the retention after the commit finds a later attempt, that attempt uses these files.
                if self._newest is None or self._newest.step != number:
                    self._take_away(number)
                raise
        request = self._stop_reason()
        # A stop waits for a checkpoint, because work since the last one would be lost. A cancelled run needs none.
        stop = request if carried or request >= CANCEL else GO_ON
        self._acknowledged = {
            "committed": number,
            "stop": stop,
            "checkpoint": described(self._newest) if carried else None,
        }
        with self._lock:
            self._number = number + 1
        if stop != GO_ON:
            self._note_stop(stop)
        self._answer_all(self._acknowledged)

    def folder(self, number: int) -> str:
        """Return the folder of the files of this attempt's report."""
        return f"{self._registry.data_folder}/{self.folder_name(number)}"

    def folder_name(self, number: int) -> str:
        return f"report-{number:08d}-a{self._attempt:05d}-{self.token}"

    def _take_away(self, number: int) -> None:
        """Delete the files of a report that is not committed."""
        folder = self.folder(number)
        retry_on_outage(lambda: self._store.delete_folder(folder), "files that are not committed")

    def _commit_checkpoint(
        self, number: int, first: ReportPart, files: list[ProgramFile], dropped: list[ProgramFile], conflicts: list[str]
    ) -> None:
        folder = self.folder(number)
        unknown = [path for path in conflicts if path not in self._warned_paths]
        if unknown:
            self._warned_paths.update(unknown)
            self._warn(
                f"report {number}: ranks reported different bytes as {', '.join(unknown[:5])}"
                f"{' and others' if len(unknown) > 5 else ''}; those of the lowest rank count"
            )
        assert self._start is not None
        assert self._metrics is not None
        metrics, parent = self._metrics, self._newest
        positions, indices = self._positions, self._indices

        def write() -> tuple[str, int]:
            # The metrics of the checkpoint's steps are durable before it is, because no later attempt repeats these
            # steps.
            metrics.write()
            self._store.delete_all(f"{folder}/{file.object}" for file in dropped)
            content = ProgramContent(
                training_job=self._job_name,
                code_bundle=self._program.code_bundle,
                entry=self._program.entry,
                report=number,
                epoch=first.epoch,
                seed=self._spec.seed,
                world_size=self._world_size,
                optimizer_steps=first.optimizer_steps,
                metrics=first.metrics,
                files=files,
                dataset_version=self._spec.dataset_version,
                positions=positions,
                indices=indices,
                parent=parent.name if parent else "",
                parent_manifest_sha256=parent.manifest_sha256 if parent else "",
                fit=self._fit,
            )
            return write_manifest(self._store, folder, content)

        digest, size_bytes = retry_on_outage(write, "a checkpoint")
        entry = CheckpointEntry(
            name=f"{self._job_name}/checkpoints/report-{number:08d}",
            folder=folder,
            manifest_sha256=digest,
            step=number,
            epoch=first.epoch,
            attempt=self._attempt,
            size_bytes=size_bytes,
            create_time=time.time(),
            metrics=first.metrics,
            code_bundle=self._program.code_bundle,
            fit=self._fit,
        )
        retry_on_outage(lambda: self._registry.commit(entry), "a checkpoint")
        self._newest = entry
        self._report_event(EventKind.CHECKPOINT_COMMITTED, entry.as_state())
        if self._spec.checkpoints.keep_newest:
            damaged = self._start.damaged
            retry_on_outage(
                lambda: retain(self._store, self._registry, self._spec.checkpoints, self._attempt, damaged, self._fit),
                "old checkpoints",
            )

    def _report_progress(self, number: int, part: ReportPart) -> None:
        now = time.monotonic()
        if now - self._progress_at < REPORT_INTERVAL_S:
            self._unrecorded = number, part
            return
        self._progress_at = now
        self._record_progress(number, part)

    def _record_progress(self, number: int, part: ReportPart) -> None:
        self._unrecorded = None
        others = dict(part.metrics)
        main: dict[str, Any] = {name: others.pop(name) for name in ("loss", "accuracy") if name in others}
        self._report_event(EventKind.PROGRESS, {"step": number, "epoch": part.epoch, **main, "metrics": others})

    def _absent(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank not in self._parts] if self._parts else []

    def _check_returned(self) -> None:
        """Fail the run if a rank waits in a report for a rank that has returned: it would wait forever."""
        with self._lock:
            gone = [rank for rank in self._absent() if rank in self._returned]
        if gone:
            self._fail(
                Internal(
                    f"{self._sentence(gone)}: they have returned from the training function, while others wait in "
                    f"report {self._number}. Every rank must call ray.train.report equally often",
                    reason=NOT_BY_ALL,
                    metadata={"ranks": ",".join(map(str, gone))},
                )
            )

    def _check_missing(self) -> None:
        with self._lock:
            absent, waited_s = self._absent(), time.monotonic() - self._met_at
            newly = bool(absent) and not self._named and waited_s >= self._named_after_s
            self._named = self._named or newly
        if newly:
            self._warn(f"{self._sentence(absent)} for {waited_s:.0f} s; report {self._number} waits for them")
        if absent and waited_s >= self._missing_for_s:
            self._fail(
                Internal(
                    f"{self._sentence(absent)} within {self._missing_for_s:.0f} s. Every rank must call "
                    "ray.train.report equally often",
                    reason=NOT_BY_ALL,
                    metadata={"ranks": ",".join(map(str, absent))},
                )
            )

    def _sentence(self, absent: Sequence[int]) -> str:
        """Return Ray's sentence, with the missing ranks."""
        return (
            f"ray.train.report has not been called by all {self._world_size} workers in the group; "
            f"missing are the ranks {list(absent)}"
        )

    def _note_stop(self, reason: int) -> None:
        with self._lock:
            self._stop_reported_at, self._reported_stop = self._stop_reported_at or time.monotonic(), reason

    def _fail(self, error: MillraceError) -> None:
        self.cause = self.cause or error
        logger.warning("the program's run ends: %s", error.message)
        self._answer_all({"error": error.as_record()})

    def _answer_all(self, answer: dict[str, Any]) -> None:
        with self._lock:
            replies = list(self._replies.values())
            self._parts, self._replies, self._named = {}, {}, False
        for reply in replies:
            reply(answer)

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._report_event(EventKind.WARNING, {"text": text})


def _adds_line(error: MillraceError, cause: MillraceError) -> bool:
    """Return whether `error` is `cause` with the program's line added."""
    same = error.specific_reason == cause.specific_reason and error.message.startswith(cause.message)
    return same and bool(error.metadata.get("line")) and not cause.metadata.get("line")


def _as_ours(error: Exception) -> MillraceError:
    if isinstance(error, MillraceError):
        return error
    return Internal(f"the report cannot be committed: {type(error).__name__}", reason="REPORT_NOT_COMMITTED")
