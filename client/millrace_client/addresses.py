"""Where the three services answer.

One list of precedence, for each service on its own; the first that names an address wins:

1. the argument (`connect(data="host:port")`, `--data-address host:port`)
2. the environment: MILLRACE_DATA_ADDRESS, MILLRACE_TRAIN_ADDRESS, MILLRACE_INFERENCE_ADDRESS
3. the stack that `millrace up` runs: `stack.json` in MILLRACE_HOME (default: `.millrace` in the working directory)
4. 127.0.0.1 with the default ports 50051, 50052, 50053
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from millrace_client.stack.record import read_record

SERVICES = ("data", "train", "inference")
DEFAULT_PORTS = {"data": 50051, "train": 50052, "inference": 50053}


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """host:port of each service, and for each what named it (`argument`, `environment`, `stack` or `default`)."""

    data: str
    train: str
    inference: str
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def of(self, service: str) -> str:
        return {"data": self.data, "train": self.train, "inference": self.inference}[service]


def millrace_home(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder in which `millrace up` keeps its state on this machine."""
    return Path(environ.get("MILLRACE_HOME") or ".millrace").absolute()


def variable(service: str) -> str:
    return f"MILLRACE_{service.upper()}_ADDRESS"


def resolve(
    *,
    data: str | None = None,
    train: str | None = None,
    inference: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Addresses:
    """Applies the precedence above. A stack whose supervisor is dead names nothing."""
    arguments = {"data": data, "train": train, "inference": inference}
    record = read_record(millrace_home(environ))
    running = record.addresses if record is not None and record.is_running() else {}
    found: dict[str, str] = {}
    origins: dict[str, str] = {}
    for service in SERVICES:
        candidates = {
            "argument": arguments[service],
            "environment": environ.get(variable(service)),
            "stack": running.get(service),
            "default": f"127.0.0.1:{DEFAULT_PORTS[service]}",
        }
        origin, address = next((origin, value) for origin, value in candidates.items() if value)
        found[service], origins[service] = address, origin
    return Addresses(**found, origins=origins)
