"""A static bearer token that a server demands for every call but health checks.

The token comes from the file that MILLRACE_TOKEN_FILE names. Callers send it as the header `authorization: Bearer
TOKEN`. gRPC asks generic handlers in the order in which they were added. `TokenCheck` is added first, so it sees the
method and the headers of each call before any other handler is chosen, and ends a call without the token. The server
then reads none of the call's messages and does not count the call for its limits, and a method that does not exist
looks like one that does.

See docs/decisions/0022-tokens.md, also for what a token does not protect.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
import time
from collections.abc import Iterable, Mapping
from typing import Any

import grpc
from grpc import aio

from shared.errors import Unauthenticated
from shared.grpc_errors import details_and_status
from shared.grpc_server.interceptor import Handler, request_id_of
from shared.settings import SettingsError
from shared.wire import AUTHORIZATION, MAX_TOKEN_CHARACTERS, REQUEST_ID, STATUS, TOKEN_FILE_VARIABLE

logger = logging.getLogger(__name__)

SCHEME = "Bearer"
# `openssl rand -hex 32` writes 64.
MIN_CHARACTERS = 16
# Orchestrators call the health service without a token.
EXEMPT = "/grpc.health.v1.Health/"
LOG_EVERY_S = 5.0

Context = aio.ServicerContext[Any, Any]


class BearerToken:
    """A server's token. It is never logged, and its `repr` does not show it."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        # The headers for the server's calls to its own port.
        self.metadata = ((AUTHORIZATION, f"{SCHEME} {token}"),)

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether a call with these headers carries the token.

        The time depends only on the length of a wrong token, not on how much of it is right.
        """
        for key, value in metadata:
            if key == AUTHORIZATION and isinstance(value, str):
                scheme, _, token = value.partition(" ")
                if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token):
                    return True
        return False


def bearer_token(environ: Mapping[str, str]) -> BearerToken | None:
    """Read the file that MILLRACE_TOKEN_FILE names; None if the variable is unset or empty.

    The file holds one token of 16 to 1024 visible ASCII characters; surrounding white space is ignored. Raises
    `SettingsError` for any other file, and for one that other users of the machine may read.
    """
    path = environ.get(TOKEN_FILE_VARIABLE, "")
    if not path:
        return None
    token = _read(path)
    if not token:
        raise _refusal(path, "is empty", "write a token into it, e.g. openssl rand -hex 32")
    if len(token) < MIN_CHARACTERS:
        problem = f"holds a token of {len(token)} characters, which can be guessed"
        raise _refusal(path, problem, f"use at least {MIN_CHARACTERS}, e.g. openssl rand -hex 32")
    if not all("!" <= character <= "~" for character in token):
        raise _refusal(path, "holds more than one token of visible ASCII characters", "write one token, on one line")
    return BearerToken(token)


def _read(path: str) -> str:
    # The checks use the descriptor, because the name may refer to another file later. A named pipe would block without
    # O_NONBLOCK.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise _refusal(path, "is no regular file", "name a file that holds the token")
            if mode & 0o077:
                problem = f"may be read or changed by other users (mode {stat.S_IMODE(mode):04o})"
                raise _refusal(path, problem, f"run chmod 600 {path}")
            content = os.read(descriptor, 4 * MAX_TOKEN_CHARACTERS)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}", "name a file that this user can read") from error
    token = content.decode("ascii", errors="replace").strip()
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise _refusal(path, f"holds more than {MAX_TOKEN_CHARACTERS} characters", "write one token, on one line")
    return token


def _refusal(path: str, problem: str, remedy: str) -> SettingsError:
    return SettingsError(f"{TOKEN_FILE_VARIABLE}={path!r}: the file {problem}; {remedy}")


class TokenCheck(grpc.GenericRpcHandler):
    """Refuses calls that do not carry the token.

    Other calls go on to the handlers that were added after it. A refused call ends with UNAUTHENTICATED and
    `ErrorInfo`: TOKEN_REQUIRED if the header is missing, TOKEN_INVALID if it holds another token or another scheme.
    """

    def __init__(self, token: BearerToken) -> None:
        self._token = token
        self._refused = 0
        self._logged_s = -LOG_EVERY_S
        send = f"send the header {AUTHORIZATION}: {SCHEME} TOKEN, with the token that the service was started with"
        self._required = self._refusing(f"this service demands a token; {send}", "TOKEN_REQUIRED")
        self._invalid = self._refusing(f"the call's token is not that of this service; {send}", "TOKEN_INVALID")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        metadata = handler_call_details.invocation_metadata or ()
        if self._token.is_in(metadata) or handler_call_details.method.startswith(EXEMPT):
            return None
        return self._invalid if any(key == AUTHORIZATION for key, _ in metadata) else self._required

    def _refusing(self, message: str, reason: str) -> Handler:
        # Computed once, so that refusing a call costs hardly any work.
        details, status = details_and_status(
            Unauthenticated(message, reason=reason, metadata={"header": AUTHORIZATION, "scheme": SCHEME})
        )

        async def refuse(_: Any, context: Context) -> None:
            request_id = request_id_of(dict(context.invocation_metadata() or ()).get(REQUEST_ID))
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details(details)
            context.set_trailing_metadata(((REQUEST_ID, request_id), (STATUS, status)))
            self._log_refusal(context.peer())

        # On the wire every call is a stream. A stream handler reads no message until it asks for one.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log_refusal(self, peer: str) -> None:
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            logger.warning(
                "%d calls were refused: they brought no valid token; the last came from %s", self._refused, peer
            )
            self._refused, self._logged_s = 0, now_s
