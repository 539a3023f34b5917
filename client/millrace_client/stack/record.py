"""`stack.json`: what the supervisor tells the world about the stack that it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from millrace_client.stack.processes import Process

STARTING, READY, STOPPING = "starting", "ready", "stopping"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The state of one stack. `parts` are the leaders of the sessions of Ray and the services."""

    state: str
    supervisor: Process
    # host:port by service name
    addresses: Mapping[str, str]
    store: str
    ray_address: str
    dashboard: str
    import_roots: tuple[str, ...]
    # a folder of Ray's own, with a short path, removed at the end
    ray_folder: str
    parts: Mapping[str, Process] = field(default_factory=dict)
    # parts that have answered since they were last started
    answering: tuple[str, ...] = ()

    def is_running(self) -> bool:
        return self.supervisor.is_alive()

    def with_started(self, name: str, process: Process) -> Record:
        left = tuple(one for one in self.answering if one != name)
        return replace(self, parts={**self.parts, name: process}, answering=left)

    def with_answering(self, name: str) -> Record:
        return replace(self, answering=(*self.answering, name))

    def with_state(self, state: str) -> Record:
        return replace(self, state=state)


def path(home: Path) -> Path:
    return home / "stack.json"


def read_record(home: Path) -> Record | None:
    """The record in `home`, or None where there is none that can be read. It may be stale: ask `is_running`."""
    try:
        values: dict[str, Any] = json.loads(path(home).read_text())
        return Record(
            **{
                **values,
                "supervisor": Process(**values["supervisor"]),
                "parts": {name: Process(**process) for name, process in values["parts"].items()},
                "import_roots": tuple(values["import_roots"]),
                "answering": tuple(values["answering"]),
            }
        )
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def write_record(home: Path, record: Record) -> None:
    """Replaces the record in one step, so that nobody reads half of one."""
    fresh = home / f"stack.json.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(record), indent=2) + "\n")
    fresh.replace(path(home))


def remove_record(home: Path) -> None:
    path(home).unlink(missing_ok=True)
