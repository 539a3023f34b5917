"""A kind of job that does as its spec says, and leaves traces in the store of who did it.

    `python -m tests.support.toy_jobs reconcile`   its reconciler
    `python -m tests.support.toy_jobs serve`       the supervisor of one, as a service is

Both write their pid into the folder TOY_PIDS. With TOY_SPARES a prepared actor waits for the next attempt; each writes
its pid into the folder of that name.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.jobs import AttemptContext
from shared.jobs.reconciler import JobKind, run_reconciler
from shared.logging_and_tracing import configure_logging
from shared.process_supervisor import supervise
from shared.settings import service_settings
from shared.storage import ObjectStore

KIND = "toy"
ENTRY = "tests.support.toy_jobs:run"
# The name of a function that prepares an actor goes on with the folder that the actor writes its pid into: an actor has
# nothing of the environment of the process that starts it.
PREPARE_IN = "prepare in "

_prepared = False


def prepared_by(folder: str) -> str:
    """The name of the function that prepares an actor and writes its pid into `folder`."""
    return f"{__package__}.toy_jobs:{PREPARE_IN}{folder}"


def __getattr__(name: str) -> Callable[[], None]:
    if not name.startswith(PREPARE_IN):
        raise AttributeError(name)

    def prepare() -> None:
        global _prepared
        _prepared = True
        (Path(name.removeprefix(PREPARE_IN)) / str(os.getpid())).touch()

    return prepare


def run(context: AttemptContext) -> dict[str, Any]:
    """The entry function: leaves a trace, then waits to be let through."""
    if context.job.spec.get("kill_itself"):
        os._exit(1)
    trace = f"{context.folder}/began/{context.attempt}-{os.getpid()}-{uuid.uuid4().hex}"
    context.store.put(trace, b"")
    while context.job.spec.get("waits") and not context.store.exists(f"{context.folder}/go"):
        context.raise_if_stopped()
        time.sleep(0.02)
    return {"attempt": context.attempt, "pid": os.getpid(), "prepared": _prepared}


def let_go(store: ObjectStore, folder: str) -> None:
    store.put(f"{folder}/go", b"")


def beginnings(store: ObjectStore, folder: str) -> list[tuple[int, int]]:
    """(attempt, pid of its actor), one each time that the entry function was called."""
    traces = sorted(info.key.rsplit("/", 1)[-1] for info in store.list(f"{folder}/began"))
    return [(int(trace.split("-")[0]), int(trace.split("-")[1])) for trace in traces]


def main(role: str) -> None:
    (Path(os.environ["TOY_PIDS"]) / f"{role}-{os.getpid()}").touch()
    configure_logging(role, "INFO")
    if role == "serve":
        asyncio.run(supervise("tests.support.toy_jobs", asyncio.Event()))
    else:
        spares = os.environ.get("TOY_SPARES")
        kind = JobKind(name=KIND, entry=ENTRY, prepare=prepared_by(spares) if spares else "")
        run_reconciler(service_settings(os.environ, "127.0.0.1:0"), kind)


if __name__ == "__main__":
    # The supervisor gives its child no arguments.
    main(sys.argv[1] if len(sys.argv) > 1 else "reconcile")
