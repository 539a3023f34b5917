"""Addresses of the three services, and the token sent with every call.

Each service's address is looked up separately. The first of these that names an address wins:

1. the argument (`connect(data="host:port")`, `--data-address host:port`)
2. the environment: MILLRACE_DATA_ADDRESS, MILLRACE_TRAIN_ADDRESS, MILLRACE_INFERENCE_ADDRESS
3. the stack that `millrace up` runs: `stack.json` in MILLRACE_HOME (default: `.millrace` in the working directory)
4. 127.0.0.1 with the default ports 50051, 50052, 50053

The token is sent as the header `authorization: Bearer TOKEN`. It comes from `connect(token=…)`, else from the file that
MILLRACE_TOKEN_FILE names, the same variable and file that a service uses. No variable holds the token itself, because
every child process would inherit it.

Channels have no TLS yet. The token travels in clear text, so anyone who can read the traffic can use it. On shared
networks, send it through a tunnel.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from millrace_client.errors import TOKEN_REMEDY, Unauthenticated
from millrace_client.stack.record import read_record
from shared.wire import AUTHORIZATION, MAX_TOKEN_CHARACTERS, TOKEN_FILE_VARIABLE

# --- Addresses ---

SERVICES = ("data", "train", "inference")
DEFAULT_PORTS = {"data": 50051, "train": 50052, "inference": 50053}


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """The host:port of each service.

    `origins` names the source of each: `argument`, `environment`, `stack` or `default`.
    """

    data: str
    train: str
    inference: str
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def address_of(self, service: str) -> str:
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
    """Find each service's address by the precedence above.

    A stack whose supervisor is dead counts as absent.
    """
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


# --- Token ---

Headers = tuple[tuple[str, str], ...]


def authorization(token: str | None = None, environ: Mapping[str, str] = os.environ) -> Headers:
    """Return the headers that carry the token.

    There are none if neither the argument nor the environment names a token. An empty argument sends none, whatever the
    environment says.

    Raises `Unauthenticated` (TOKEN_UNUSABLE) if the token or its file is malformed, or if other users of this machine
    may read the file.
    """
    if token is None:
        path = environ.get(TOKEN_FILE_VARIABLE, "")
        if not path:
            return ()
        named, token = f"{TOKEN_FILE_VARIABLE}={path!r}: the file", _read(path)
        if not token.strip():
            raise _unusable(f"{named} is empty", "write the service's token into it")
    else:
        named = "token: the argument"
    token = token.strip()
    if len(token) > MAX_TOKEN_CHARACTERS or not all("!" <= character <= "~" for character in token):
        problem = f"holds something else than one token of at most {MAX_TOKEN_CHARACTERS} visible ASCII characters"
        raise _unusable(f"{named} {problem}", TOKEN_REMEDY)
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and mode & 0o077:
                problem = f"may be read or changed by other users (mode {stat.S_IMODE(mode):04o})"
                raise _unusable(f"{TOKEN_FILE_VARIABLE}={path!r}: the file {problem}", f"run chmod 600 {path}")
            return file.read(4 * MAX_TOKEN_CHARACTERS).decode("ascii", errors="replace")
    except OSError as error:
        problem = f"{TOKEN_FILE_VARIABLE}={path!r}: the file cannot be read: {error.strerror}"
        raise _unusable(problem, "name a file that this user can read") from error


def _unusable(problem: str, remedy: str) -> Unauthenticated:
    return Unauthenticated(problem, reason="TOKEN_UNUSABLE", metadata={"variable": TOKEN_FILE_VARIABLE}, remedy=remedy)
