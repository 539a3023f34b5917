"""The settings of the inference service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.logging_and_tracing import tracing_environ
from shared.settings import OwnCode, ServiceSettings, SettingsError, is_on, largest_cluster, service_settings

DEFAULT_LISTEN = "127.0.0.1:50053"
MAX_FRONTENDS = 64


@dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    service: ServiceSettings
    # host:port of the metrics for Prometheus; empty: none. Anyone who can reach it can read the models' names and load.
    # Several frontends use consecutive ports, beginning with this one.
    metrics_listen: str = ""
    # The number of processes that answer on the service's port.
    frontends: int = 1
    # Whether batches go to the replicas on this machine over their sockets, or all through Ray Serve's handle.
    replica_sockets: bool = False
    # The maximum resources of a cluster that grows; None: only the present nodes are known.
    cluster_max: Mapping[str, float] | None = None
    # How often the logs are compared with the state of Ray Serve, in seconds.
    reconcile_every_s: float = 2.0
    # Ray counts as lost, and this process ends, after its head's port has been closed for this many seconds.
    ray_gone_after_s: float = 5.0
    # Ray also counts as lost after it has listened without answering for this many seconds: a busy machine must not
    # look like a dead one.
    ray_unresponsive_after_s: float = 60.0
    # A version that is removed answers its pending requests first, and gives up after this many seconds without an
    # answer.
    drain_unresponsive_after_s: float = 60.0
    # How long a version without traffic stays, so that every serving process has read of its retirement, in seconds.
    retired_for_s: float = 6.0
    # How long the replicas of a rollout's version may take to start, and to be compared, in seconds.
    rollout_load_timeout_s: float = 600.0
    # OpenTelemetry's variables, which replicas get, too; empty if no spans are exported.
    tracing: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Whether replicas run users' own code.
    own_code: OwnCode = field(default_factory=OwnCode)


def settings_from(environ: Mapping[str, str]) -> InferenceSettings:
    """Read the settings from the environment; raise `SettingsError`."""
    service = service_settings(environ, DEFAULT_LISTEN)
    host, _, port = service.ray_address.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(f"RAY_ADDRESS={service.ray_address!r}: use host:port of a running Ray head")
    return InferenceSettings(
        service=service,
        metrics_listen=_metrics_listen(environ, _frontends(environ)),
        frontends=_frontends(environ),
        cluster_max=largest_cluster(environ),
        replica_sockets=is_on(environ, "MILLRACE_REPLICA_SOCKETS", default=True),
        tracing=tracing_environ(environ),
    )


def metrics_of(listen: str, frontend: int) -> str:
    """Return the metrics address of one frontend."""
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + frontend}" if listen else ""


def _frontends(environ: Mapping[str, str]) -> int:
    text = environ.get("MILLRACE_FRONTENDS") or "1"
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_FRONTENDS):
        raise SettingsError(f"MILLRACE_FRONTENDS={text!r}: use 1 to {MAX_FRONTENDS} processes")
    return int(text)


def _metrics_listen(environ: Mapping[str, str], frontends: int) -> str:
    listen = environ.get("MILLRACE_METRICS_LISTEN", "")
    host, _, port = listen.rpartition(":")
    whole_host = host and (":" in host) == (host.startswith("[") and host.endswith("]"))
    if listen and not (whole_host and port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise SettingsError(
            f"MILLRACE_METRICS_LISTEN={listen!r}: use host:port or [IPv6 address]:port, e.g. 127.0.0.1:9400 or "
            "[::1]:9400, or leave it out for no metrics"
        )
    if listen and int(port) + frontends - 1 > 65535:
        raise SettingsError(f"MILLRACE_METRICS_LISTEN={listen!r}: leave ports above it for {frontends} frontends")
    return listen
