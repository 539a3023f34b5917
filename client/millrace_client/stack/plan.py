"""Plans the stack before anything is started, with free ports on loopback."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from millrace_client.addresses import DEFAULT_PORTS, SERVICES
from shared.wire import TOKEN_FILE_VARIABLE

# --- Plan ---

# A training job's workers and a served model fit side by side on a machine of two cores, because Ray's CPUs are only a
# count.
MIN_RAY_CPUS = 4
# Environment variables that only the services get.
OF_SERVICES = (TOKEN_FILE_VARIABLE, "MILLRACE_S3_ACCESS_KEY", "MILLRACE_S3_SECRET_KEY")
# The stack belongs to one user, on loopback, so that user's code may run on it by default. Other users of the machine
# can reach its loopback, too; MILLRACE_TOKEN_FILE keeps them out.
OWN_CODE = "trusted"


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """The options of `millrace up`."""

    # file:///… or s3://…; empty: MILLRACE_STORE, else a folder under the home
    store: str = ""
    # folders that imports may read; the home's `import` is always one
    import_roots: tuple[Path, ...] = ()
    # the CPUs that Ray counts; 0: the machine's cores, at least 4
    ray_cpus: int = 0


@dataclass(frozen=True, kw_only=True)
class PlannedProcess:
    """One child of the supervisor.

    It is ready when `address` answers: a service by its health, Ray by its port.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    address: str
    log: Path
    # from SIGTERM to SIGKILL
    grace_s: float


@dataclass(frozen=True, kw_only=True)
class StackPlan:
    """The parts in the order in which they start. They stop in the reverse order."""

    home: Path
    parts: tuple[PlannedProcess, ...]
    addresses: Mapping[str, str]
    store: str
    ray_address: str
    dashboard: str
    ray_folder: str
    import_roots: tuple[str, ...]


def make_plan(home: Path, options: StackOptions, environ: Mapping[str, str] = os.environ) -> StackPlan:
    """Choose ports and folders. The services get their default ports if these are free."""
    store = options.store or environ.get("MILLRACE_STORE") or (home / "store").as_uri()
    given_roots = environ.get("MILLRACE_IMPORT_ROOTS", "").split(os.pathsep)
    roots = [home / "import", *options.import_roots, *(Path(root) for root in given_roots if root)]
    import_roots = tuple(dict.fromkeys(str(root.resolve()) for root in roots))
    gcs, client, dashboard, agent, *spare = free_ports(4 + len(SERVICES))
    ports = {
        service: DEFAULT_PORTS[service] if is_free(DEFAULT_PORTS[service]) else spare[index]
        for index, service in enumerate(SERVICES)
    }
    ray_folder = tempfile.mkdtemp(prefix="millrace-ray-")
    ray_address = f"{HOST}:{gcs}"
    token = Path(ray_folder) / "auth-token"
    write_token(token)
    shared = {**environ, **RAY_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(token), "RAY_ADDRESS": ray_address}
    ray = PlannedProcess(
        name="ray",
        command=ray_command(gcs, client, dashboard, agent, ray_folder, options.ray_cpus),
        # Ray's workers inherit this environment. They call no service, and a service passes the store's keys to a job
        # that needs them.
        environment={name: value for name, value in shared.items() if name not in OF_SERVICES} | RAY_HEAD_ENVIRONMENT,
        address=ray_address,
        log=home / "logs" / "ray.log",
        grace_s=15.0,
    )
    services = tuple(
        PlannedProcess(
            name=service,
            # -P keeps modules in the working directory from being imported.
            command=(sys.executable, "-P", "-m", f"{service}_service"),
            environment={
                **shared,
                "MILLRACE_STORE": store,
                "MILLRACE_LISTEN": f"{HOST}:{ports[service]}",
                "MILLRACE_IMPORT_ROOTS": os.pathsep.join(import_roots),
                "MILLRACE_OWN_CODE": environ.get("MILLRACE_OWN_CODE") or OWN_CODE,
            },
            address=f"{HOST}:{ports[service]}",
            log=home / "logs" / f"{service}.log",
            grace_s=20.0,
        )
        for service in SERVICES
    )
    return StackPlan(
        home=home,
        parts=(ray, *services),
        addresses={part.name: part.address for part in services},
        store=store,
        ray_address=ray_address,
        dashboard=f"http://{HOST}:{dashboard}",
        ray_folder=ray_folder,
        import_roots=import_roots,
    )


RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Other users of this machine can reach its loopback, too, and access to Ray means running code.
    "RAY_AUTH_MODE": "token",
    # Ray replaces 127.0.0.1 by the machine's outer address and then listens on all interfaces, where any caller can run
    # code. Without its support for clusters it stays on loopback; the variable's name is historical.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # The services' output goes into logs, not to terminals.
    "RAY_COLOR_PREFIX": "0",
    "PYTHONUNBUFFERED": "1",
}
RAY_HEAD_ENVIRONMENT = {
    # Any free port, so that several stacks fit on one machine.
    "AUTOSCALER_METRIC_PORT": "0",
    "DASHBOARD_METRIC_PORT": "0",
    # No metrics are scraped here, and collecting them costs a small machine a noticeable share of a core.
    "RAY_enable_metrics_collection": "0",
    # End at once on SIGTERM, because the services that would be drained have stopped before.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


def write_token(path: Path) -> None:
    """Write a new secret that only this user can read."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def ray_command(gcs: int, client: int, dashboard: int, agent: int, folder: str, cpus: int) -> tuple[str, ...]:
    """Return the command of a Ray head in the foreground.

    Its dashboard stays on, because Ray Train asks it for the state of placement groups.
    """
    return (
        sys.executable,
        "-P",
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        f"--node-ip-address={HOST}",
        f"--port={gcs}",
        f"--ray-client-server-port={client}",
        f"--dashboard-host={HOST}",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--num-cpus={cpus or max(os.cpu_count() or 1, MIN_RAY_CPUS)}",
        f"--temp-dir={folder}",
        "--disable-usage-stats",
        "--include-log-monitor=false",
        "--log-color=false",
    )


# --- Free ports ---

HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    with socket.socket() as one:
        # Bind as servers do: a port whose last connections linger in TIME_WAIT is free.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now, and probably still are when bound soon."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def answers(address: str, *, timeout_s: float = 0.5) -> bool:
    """Return whether a server accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False
