"""The processes that the GPU check starts, waits for and kills: runs of `train_service.torchrun_main`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from google.protobuf import json_format

from benchmarks.gpu_runs import Size, accelerated, spec_of
from shared.checkpoint import CheckpointEntry, CheckpointRegistry, load_checkpoint
from shared.checkpoint.format import OPTIMIZER, WEIGHTS
from shared.storage import ObjectStore
from train_service.convert_specs import spec_to_proto
from train_service.domain.spec import BFLOAT16, TF32, TrainingSpec
from train_service.jobs.run_records import RunRecords
from train_service.records.event_log import Event, EventKind, EventLog

POLL_INTERVAL_S = 0.01


# Processes that have not been waited for.
_running: set[subprocess.Popen[bytes]] = set()


def end_processes() -> None:
    """Kill the processes that an interrupted check left running."""
    for process in tuple(_running):
        process.kill()


class CheckFailed(Exception):
    """A failed check. The text is the observation."""


@dataclass(frozen=True)
class Place:
    """The environment of one check's processes."""

    store: ObjectStore
    folder: Path
    # Whether the GPU is hidden from them.
    on_cpu: bool

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.on_cpu else {}
        paths = {"PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
        return {**os.environ, **paths, "MILLRACE_STORE": self.store.settings.url, **hidden, **more}

    @contextmanager
    def running(self, name: str, arguments: list[str], **more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a Python process, and kill it at the end if necessary.

        Its output is in the folder's `name`.log.
        """
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], env=self.environment(more), stdout=log, stderr=log, start_new_session=True
            )
        _running.add(process)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            _running.discard(process)

    def run(self, name: str, arguments: list[str], timeout_s: float, **more: str) -> None:
        with self.running(name, arguments, **more) as process:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise CheckFailed(f"{name} was not over after {timeout_s:g} s: {self.last_lines(name)}") from None
        if code:
            raise CheckFailed(f"{name} ended with {code}: {self.last_lines(name)}")

    def last_lines(self, name: str, count: int = 12) -> str:
        return "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-count:])

    def command(self, job: str, spec: TrainingSpec) -> list[str]:
        file = self.folder / f"{job}.json"
        file.write_text(json_format.MessageToJson(spec_to_proto(spec)))
        return ["-m", "train_service.torchrun_main", str(file), "--job", job]


def resumed_variants(size: Size) -> dict[str, TrainingSpec]:
    spec = spec_of(size)
    half = accelerated(replace(spec, precision=BFLOAT16), channels_last=True)
    return {"fp32": spec, "tf32": replace(spec, precision=TF32), "bf16": half}


def killed_and_resumed(place: Place, variant: str, spec: TrainingSpec, timeout_s: float, **more: str) -> dict[str, int]:
    """Run one undisturbed run, and one that is killed after a checkpoint and resumed. Return the steps.

    Raises `CheckFailed` unless both end with the same weights and the same optimizer state, bit for bit.
    """
    whole, broken = whole_job(variant), killed_job(variant)
    place.run(whole, place.command(whole, spec), timeout_s, **more)
    killed_at = _killed(place, broken, spec, timeout_s, more)
    place.run(broken, place.command(broken, spec), timeout_s, **more)
    resumed_at = int(_starts(place.store, broken)[-1].payload["step"])
    last = _final(place.store, whole).step
    if not 0 < resumed_at < last:
        raise CheckFailed(f"{variant}: the second attempt began at step {resumed_at} of {last}")
    for file in (WEIGHTS, OPTIMIZER):
        first, second = (_bytes(place.store, _final(place.store, job), file) for job in (whole, broken))
        if first != second:
            raise CheckFailed(f"{variant}: {file} is not the same, bit for bit, after a kill at step {killed_at}")
    return {"steps": last, "killed_at": killed_at, "resumed_at": resumed_at}


def whole_job(variant: str) -> str:
    return f"{variant}-whole"


def killed_job(variant: str) -> str:
    return f"{variant}-killed"


def _killed(place: Place, job: str, spec: TrainingSpec, timeout_s: float, more: Mapping[str, str]) -> int:
    registry = CheckpointRegistry(place.store, f"trainingJobs/{job}")
    deadline = time.monotonic() + timeout_s
    with place.running(job, place.command(job, spec), **more) as process:
        while not (entries := registry.entries()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CheckFailed(f"{job} made no checkpoint: {place.last_lines(job)}")
            time.sleep(POLL_INTERVAL_S)
        process.send_signal(signal.SIGKILL)
    if any(one.final for one in registry.entries()):
        raise CheckFailed(f"{job} was over before it was killed; give it more steps")
    return max(one.step for one in entries)


def seconds_to_first_step(store: ObjectStore, job: str) -> float:
    """Return the time from the start of the job's last attempt to its first step, which includes compiling."""
    begun = _starts(store, job)[-1]
    points, _ = RunRecords(store).metrics(f"trainingJobs/{job}", 0, 10_000, "")
    return min(point.time for point in points if point.attempt == begun.attempt) - begun.time


def _starts(store: ObjectStore, job: str) -> list[Event]:
    events = EventLog(store, f"trainingJobs/{job}").after(0)
    return [one for one in events if one.kind is EventKind.ATTEMPT_STARTED]


def _final(store: ObjectStore, job: str) -> CheckpointEntry:
    return next(one for one in CheckpointRegistry(store, f"trainingJobs/{job}").entries() if one.final)


def _bytes(store: ObjectStore, entry: CheckpointEntry, file: str) -> bytes:
    return bytes(load_checkpoint(store, entry.folder, entry.manifest_sha256).read(file))
