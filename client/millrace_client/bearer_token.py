"""The token that a client sends with every call: the header `authorization: Bearer TOKEN`.

It comes from `connect(token=…)`, else from the file that MILLRACE_TOKEN_FILE names, the same variable and file as a
service has. There is no variable for the token itself: every child process would inherit it.

Channels have no TLS yet, so the token travels in clear, and a listener on the way can use it. On networks that
others share, send it through a tunnel.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from millrace_client.errors import TOKEN_REMEDY, Unauthenticated

VARIABLE = "MILLRACE_TOKEN_FILE"
HEADER = "authorization"
# All headers of a call have 8 KiB together; a service takes no longer token either.
MAX_CHARACTERS = 1024

Headers = tuple[tuple[str, str], ...]


def authorization(token: str | None = None, environ: Mapping[str, str] = os.environ) -> Headers:
    """The headers that bring the token; none where neither the argument nor the environment names one. An empty
    argument sends none, whatever the environment says.

    Raises `Unauthenticated` (TOKEN_UNUSABLE) where what is named cannot be sent: the token or its file is malformed, or
    other users of this machine may read the file.
    """
    if token is None:
        path = environ.get(VARIABLE, "")
        if not path:
            return ()
        named, token = f"{VARIABLE}={path!r}: the file", _read(path)
        if not token.strip():
            raise _unusable(f"{named} is empty", "write the service's token into it")
    else:
        named = "token: the argument"
    token = token.strip()
    if len(token) > MAX_CHARACTERS or not all("!" <= character <= "~" for character in token):
        problem = f"holds something else than one token of at most {MAX_CHARACTERS} visible ASCII characters"
        raise _unusable(f"{named} {problem}", TOKEN_REMEDY)
    return ((HEADER, f"Bearer {token}"),) if token else ()


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and mode & 0o077:
                problem = f"may be read or changed by other users (mode {stat.S_IMODE(mode):04o})"
                raise _unusable(f"{VARIABLE}={path!r}: the file {problem}", f"run chmod 600 {path}")
            return file.read(4 * MAX_CHARACTERS).decode("ascii", errors="replace")
    except OSError as error:
        problem = f"{VARIABLE}={path!r}: the file cannot be read: {error.strerror}"
        raise _unusable(problem, "name a file that this user can read") from error


def _unusable(problem: str, remedy: str) -> Unauthenticated:
    return Unauthenticated(problem, reason="TOKEN_UNUSABLE", metadata={"variable": VARIABLE}, remedy=remedy)
