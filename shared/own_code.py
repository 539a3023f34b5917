"""Whether code that callers bring may run on the cluster: MILLRACE_OWN_CODE, `off` (the default) or `trusted`.

Where it is `trusted`, whoever may create a job owns the cluster: the code runs with the rights of Ray's workers, and
Ray is no boundary between jobs. So a service that others than this machine's users reach must know its callers by a
token.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import FailedPrecondition
from shared.settings import SettingsError

VARIABLE = "MILLRACE_OWN_CODE"
OFF, TRUSTED = "off", "trusted"


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """Of a service: whether it takes code of its callers and has it run."""

    is_trusted: bool = False

    def require_own_code(self, what: str = "") -> None:
        """Raises `FailedPrecondition` (OWN_CODE_OFF) where callers' code is not to run. `what` says first what needs
        it."""
        if not self.is_trusted:
            raise FailedPrecondition(
                f"{what}this service runs no code of its callers; start it with {VARIABLE}={TRUSTED} if all who may "
                "call it may also run code on its cluster",
                reason="OWN_CODE_OFF",
                metadata={"variable": VARIABLE, "value": TRUSTED},
            )


def own_code(environ: Mapping[str, str], listen: str, *, has_token: bool) -> OwnCode:
    """Reads MILLRACE_OWN_CODE for a service that listens on `listen`, host:port.

    Raises `SettingsError` for an unknown value, and for `trusted` where others than this machine's users reach the
    service and it demands no token.
    """
    text = environ.get(VARIABLE) or OFF
    if text not in (OFF, TRUSTED):
        raise SettingsError(f"{VARIABLE}={text!r}: use {OFF} or {TRUSTED}")
    if text == TRUSTED and not has_token and not _is_loopback(listen):
        raise SettingsError(
            f"{VARIABLE}={TRUSTED}: whoever reaches {listen} could run code on the cluster; demand a token with "
            f"MILLRACE_TOKEN_FILE, listen on 127.0.0.1, or set {VARIABLE}={OFF}"
        )
    return OwnCode(is_trusted=text == TRUSTED)


def _is_loopback(listen: str) -> bool:
    """Whether host:port is certainly this machine's own; a name other than localhost may mean any address."""
    host = listen.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
