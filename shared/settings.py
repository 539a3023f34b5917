"""Settings of every service, read once from the environment in `__main__` and passed on from there.

MILLRACE_CLUSTER_MAX is the size to which the operator lets the cluster grow. Nothing is placed beyond it.

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
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.errors import FailedPrecondition, first_line, invalid_field

# --- Settings ---


class SettingsError(ValueError):
    """A setting is missing or malformed. The text names the variable and the remedy."""


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The object store of all durable data. It is sent to Ray's workers, so it has only plain values."""

    # file:///absolute/folder, or s3://bucket/prefix
    url: str
    # http(s)://host:port of the S3 server; empty: AWS's own
    s3_endpoint: str = ""
    s3_access_key: str = ""
    s3_secret_key: str = ""
    s3_region: str = "us-east-1"
    # The endpoint as seen by clients outside the stack; only presigned URLs name it.
    public_s3_endpoint: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme == "file":
            if parts.netloc or not Path(parts.path).is_absolute():
                raise SettingsError(f"MILLRACE_STORE={self.url!r}: use file:///absolute/folder")
        elif parts.scheme == "s3":
            if not parts.netloc:
                raise SettingsError(f"MILLRACE_STORE={self.url!r}: name the bucket, s3://bucket/prefix")
            if not (self.s3_access_key and self.s3_secret_key):
                raise SettingsError(
                    f"MILLRACE_STORE={self.url!r} needs MILLRACE_S3_ACCESS_KEY and MILLRACE_S3_SECRET_KEY"
                )
        else:
            raise SettingsError(f"MILLRACE_STORE={self.url!r}: use file:///folder or s3://bucket/prefix")
        _check_endpoint("MILLRACE_S3_ENDPOINT", self.s3_endpoint)
        _check_endpoint("MILLRACE_PUBLIC_S3_ENDPOINT", self.public_s3_endpoint)

    def __repr__(self) -> str:
        return f"StoreSettings(url={self.url!r}, s3_endpoint={self.s3_endpoint!r})"  # never the secret


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """The settings of a service process."""

    listen: str
    store: StoreSettings
    # host:port of the Ray head; empty: long work waits until a service is started with an address
    ray_address: str = ""
    log_level: str = "INFO"


def store_settings(environ: Mapping[str, str]) -> StoreSettings:
    """Read MILLRACE_STORE and MILLRACE_S3_*."""
    if not environ.get("MILLRACE_STORE"):
        raise SettingsError("MILLRACE_STORE is not set: use file:///absolute/folder or s3://bucket/prefix")
    return StoreSettings(
        url=environ["MILLRACE_STORE"].rstrip("/"),
        s3_endpoint=environ.get("MILLRACE_S3_ENDPOINT", "").rstrip("/"),
        s3_access_key=environ.get("MILLRACE_S3_ACCESS_KEY", ""),
        s3_secret_key=environ.get("MILLRACE_S3_SECRET_KEY", ""),
        s3_region=environ.get("MILLRACE_S3_REGION", "us-east-1"),
        public_s3_endpoint=environ.get("MILLRACE_PUBLIC_S3_ENDPOINT", "").rstrip("/"),
    )


def service_settings(environ: Mapping[str, str], default_listen: str) -> ServiceSettings:
    """Read the settings of every service. `default_listen` is host:port."""
    listen = environ.get("MILLRACE_LISTEN") or default_listen
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise SettingsError(f"MILLRACE_LISTEN={listen!r}: use host:port")
    log_level = environ.get("MILLRACE_LOG_LEVEL", "INFO").upper()
    if log_level not in logging.getLevelNamesMapping():
        raise SettingsError(f"MILLRACE_LOG_LEVEL={log_level!r}: use DEBUG, INFO, WARNING or ERROR")
    return ServiceSettings(
        listen=listen,
        store=store_settings(environ),
        ray_address=environ.get("RAY_ADDRESS", ""),
        log_level=log_level,
    )


def standby_attempt(environ: Mapping[str, str]) -> bool:
    """Read MILLRACE_STANDBY_ATTEMPT: whether an idle process waits for the next attempt, to save its start-up time."""
    return is_on(environ, "MILLRACE_STANDBY_ATTEMPT", default=True)


def warm_workers(environ: Mapping[str, str]) -> bool:
    """Read MILLRACE_WARM_WORKERS: whether idle worker processes wait for the next work.

    A worker for a run's next attempt takes about half a gigabyte, one for the next transform about 200 MiB.
    """
    return is_on(environ, "MILLRACE_WARM_WORKERS", default=True)


def is_on(environ: Mapping[str, str], variable: str, *, default: bool) -> bool:
    """Read a variable that is 0 or 1. Unset or empty means the default. Raises `SettingsError`."""
    text = environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise SettingsError(f"{variable}: {text!r}: use 0 or 1")
    return text == "1" if text else default


def _check_endpoint(variable: str, endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if endpoint and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path):
        raise SettingsError(f"{variable}={endpoint!r}: use http://host:port or https://host:port")


# --- Largest cluster ---

CLUSTER_MAX_VARIABLE = "MILLRACE_CLUSTER_MAX"


def largest_cluster(environ: Mapping[str, str]) -> dict[str, float] | None:
    """Read MILLRACE_CLUSTER_MAX, e.g. `CPU=512,GPU=64`; None if it is not set."""
    text = environ.get(CLUSTER_MAX_VARIABLE, "")
    if not text:
        return None
    try:
        pairs = [part.partition("=") for part in text.split(",")]
        most = {name.strip(): float(amount) for name, _, amount in pairs}
    except ValueError:
        most = {"": -1.0}
    # Ray's own names are CPU and GPU; another spelling would limit nothing.
    if not all(name and name not in ("cpu", "gpu") and amount >= 0 for name, amount in most.items()):
        raise SettingsError(
            f"{CLUSTER_MAX_VARIABLE}={text!r}: use names of Ray's resources and amounts, e.g. CPU=512,GPU=64"
        )
    return most


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
            f"{VARIABLE}={TRUSTED}: every client that reaches {listen} could run code on the cluster; demand a token "
            f"with MILLRACE_TOKEN_FILE, listen on 127.0.0.1, or set {VARIABLE}={OFF}"
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
