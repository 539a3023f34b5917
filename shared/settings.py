"""Settings of every service, read once from the environment in `__main__` and passed on from there.

MILLRACE_CLUSTER_MAX is the size to which the operator lets the cluster grow. Nothing is placed beyond it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

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
