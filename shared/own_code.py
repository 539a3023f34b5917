"""Settings for users' own code on the cluster.

MILLRACE_OWN_CODE is `off` (the default) or `trusted`. With `trusted`, anyone who may create a job controls the cluster:
the code runs with the rights of Ray's workers, and Ray is no boundary between jobs. A service that is reachable beyond
this machine must therefore demand a token.

MILLRACE_CUSTOM_TRANSFORMS lists the functions that `custom` transform steps may call. Every part that accepts a
client's transform checks it.

Installed packages add models, losses and training steps, found by name among entry points. They are looked up anew at
each call, in the process that needs them: a package must be installed where its code runs.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from shared.errors import FailedPrecondition, first_line, invalid_field
from shared.settings import SettingsError

# --- Own code ---

VARIABLE = "MILLRACE_OWN_CODE"
OFF, TRUSTED = "off", "trusted"


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """A service's policy for its callers' code."""

    is_trusted: bool = False

    def require_own_code(self, what: str = "") -> None:
        """Raise `FailedPrecondition` (OWN_CODE_OFF) unless callers' code may run.

        `what` begins the message with what needs it.
        """
        if not self.is_trusted:
            raise FailedPrecondition(
                f"{what}this service runs no code of its callers; start it with {VARIABLE}={TRUSTED} if all who may "
                "call it may also run code on its cluster",
                reason="OWN_CODE_OFF",
                metadata={"variable": VARIABLE, "value": TRUSTED},
            )


def own_code(environ: Mapping[str, str], listen: str, *, has_token: bool) -> OwnCode:
    """Read MILLRACE_OWN_CODE for a service that listens on `listen`, host:port.

    Raises `SettingsError` for an unknown value, and for `trusted` if the service is reachable beyond this machine and
    demands no token.
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
    """Return whether host:port is certainly this machine's own.

    A name other than localhost may mean any address.
    """
    host = listen.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- Functions of custom transforms ---

CUSTOM_TRANSFORMS_VARIABLE = "MILLRACE_CUSTOM_TRANSFORMS"
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def allowed_functions(environ: Mapping[str, str]) -> frozenset[str]:
    """Read the allowed functions, `module:function` each. None if the variable is unset.

    Raises `SettingsError`, naming the variable.
    """
    functions = [one.strip() for one in environ.get(CUSTOM_TRANSFORMS_VARIABLE, "").split(",") if one.strip()]
    for function in functions:
        if not _FUNCTION.fullmatch(function):
            raise SettingsError(f"{CUSTOM_TRANSFORMS_VARIABLE}: {function!r}: use module:function, separated by commas")
    return frozenset(functions)


def check_functions(transforms: Iterable[Mapping[str, Any]], allowed: Collection[str], where: str) -> None:
    """Refuse a checkpoint whose preprocessing calls a function that is not `allowed`.

    Otherwise anyone who can write a checkpoint could have any function called. `transforms` are a checkpoint's; `where`
    says whose environment allows. Raises `FailedPrecondition`, naming the first such function.
    """
    for transform in transforms:
        for step in transform.get("steps", []):
            function = step.get("custom", {}).get("function")
            if function and function not in allowed:
                raise FailedPrecondition(
                    f"the checkpoint's preprocessing calls {function}, which {CUSTOM_TRANSFORMS_VARIABLE} does not "
                    f"allow {where}; set it there",
                    reason="CUSTOM_FUNCTION_NOT_ALLOWED",
                    metadata={"function": function},
                )


# --- Installed packages ---

MODELS = "millrace.models"
LOSSES = "millrace.losses"
TRAINING_STEPS = "millrace.training_steps"


def installed_names(group: str) -> list[str]:
    """Return the sorted names in an entry-point group."""
    return sorted({point.name for point in entry_points(group=group)})


def load_installed(group: str, name: str, field: str, known: str) -> Any:
    """Return the object that a package registered as `name`.

    Raises `InvalidArgument` that names `field` if no package of this process has it, if two different ones do, or if
    its import fails. `known` lists the field's other allowed values.
    """
    points = {point.value: point for point in entry_points(group=group) if point.name == name}
    if not points:
        others = ", ".join(installed_names(group)) or "none here"
        choices = f"{known} or " if known else ""
        raise invalid_field(field, name, f"use {choices}one of the entry points {group} ({others})")
    if len(points) > 1:
        raise invalid_field(field, name, f"{group} has it more than once: {', '.join(sorted(points))}; remove one")
    (point,) = points.values()
    try:
        return point.load()
    except Exception as error:  # the package's own import may raise anything
        raise invalid_field(field, name, f"importing {point.value} failed: {first_line(error)}") from None
