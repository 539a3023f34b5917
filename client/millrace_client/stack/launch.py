"""Starts the stack in the background, and stops it, for `millrace up`, `down` and `demo`."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace_client.stack.plan import StackOptions
from millrace_client.stack.record import READY, Record, end, family, read_record, remove_record, wait_gone
from millrace_client.stack.supervisor import StartFailed

LAUNCH_POLL_INTERVAL_S = 0.1
# All parts in turn, each with its own grace period, and a margin.
STOP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Stack:
    """A stack that this process started."""

    record: Record
    process: subprocess.Popen[str]

    def keep(self) -> None:
        """Cut the lifeline, so that the stack continues when this process ends."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write("keep")
                self.process.stdin.close()


def running_record(home: Path) -> Record | None:
    """Return the record of the stack that runs in `home`, or None."""
    record = read_record(home)
    return record if record is not None and record.is_running() else None


def start(
    home: Path,
    options: StackOptions,
    *,
    lifeline: bool = False,
    on_progress: Callable[[Record], object] | None = None,
) -> Stack:
    """Start a stack in its own session and wait until all of it answers. Raises `StartFailed`.

    With `lifeline` the stack ends with this process, unless `Stack.keep` is called. Leftovers of a killed supervisor
    are ended first.
    """
    if running_record(home) is None:
        stop(home)
    (home / "logs").mkdir(parents=True, exist_ok=True)
    log = home / "logs" / "supervisor.log"
    arguments = {
        "home": str(home),
        "store": options.store,
        "import_roots": [str(root) for root in options.import_roots],
        "ray_cpus": options.ray_cpus,
        "lifeline": lifeline,
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", "millrace_client.stack", json.dumps(arguments)),
            stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
    try:
        while process.poll() is None:
            record = read_record(home)
            if record is not None and record.supervisor.pid == process.pid:
                if on_progress is not None:
                    on_progress(record)
                if record.state == READY:
                    return Stack(record, process)
            time.sleep(LAUNCH_POLL_INTERVAL_S)
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    raise StartFailed(_reason(log))


def stop(home: Path) -> bool:
    """End the stack in `home` and everything that it started. None of its processes is alive afterwards.

    Returns whether there was anything to end. A stack whose supervisor was killed is ended part by part.
    """
    record = read_record(home)
    if record is None:
        return False
    members = family([record.supervisor, *record.parts.values()])
    if record.supervisor.is_alive():
        record.supervisor.send(signal.SIGTERM)
        if wait_gone([record.supervisor], STOP_TIMEOUT_S):
            record.supervisor.send(signal.SIGKILL)
            wait_gone([record.supervisor], 5.0)
        record = read_record(home) or record
    for part in reversed(list(record.parts.values())):
        end(part, grace_s=10.0)
    for left in wait_gone(members, 5.0):
        left.send(signal.SIGKILL)
    shutil.rmtree(record.ray_folder, ignore_errors=True)
    remove_record(home)
    return bool(members)


def _reason(log: Path) -> str:
    """Return the supervisor's last message, and the end of the log that it names."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["the supervisor said nothing"]
    message = lines[-1].partition("error: ")[2] or lines[-1]
    _, named, path = message.rpartition("its log: ")
    part_log = Path(path)
    if named and part_log.is_file():
        tail = part_log.read_text(errors="replace").strip().splitlines()[-5:]
        message += "".join(f"\n  | {line[:200]}" for line in tail)
    return message
