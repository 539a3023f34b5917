"""Runs the stack: plans its parts, starts them in order, restarts dead ones, and stops them in the reverse order.

The plan is made before anything is started, with free ports on loopback. `start` and `stop` run this module as a
process of its own in the background, for `millrace up`, `down` and `demo`.

Orphaned grandchildren become children of the supervisor, which reaps them and ends them at the end. Otherwise they
would go to the machine's first process, which in many containers does not reap.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace_client.calls import DEFAULT_PORTS, SERVICES, open_channel
from millrace_client.stack.record import (
    FAMILY_TIMEOUT_S,
    KILL_INTERVAL_S,
    KILL_TIMEOUT_S,
    READY,
    STARTING,
    STOPPING,
    Process,
    Record,
    children,
    end,
    family,
    read_record,
    remove_record,
    wait_gone,
    write_record,
)
from shared.names import TOKEN_FILE_VARIABLE

# --- Plan ---

# A training job's workers and a served model fit side by side on a machine of two cores, because Ray's CPUs are only a
# count.
MIN_RAY_CPUS = 4
# Environment variables that only the services get.
OF_SERVICES = (TOKEN_FILE_VARIABLE, "MILLRACE_S3_ACCESS_KEY", "MILLRACE_S3_SECRET_KEY")
# The stack belongs to one user, on loopback, so that user's code may run on it by default. Other users of the machine
# can reach its loopback, too; MILLRACE_TOKEN_FILE keeps them out.
OWN_CODE = "trusted"
# How long a part may take to end itself.
RAY_GRACE_S = 15.0
SERVICE_GRACE_S = 20.0


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
        grace_s=RAY_GRACE_S,
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
            grace_s=SERVICE_GRACE_S,
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
# Linux by default gives only higher ports to connections, and to servers that ask for any port.
PORTS = range(26_000, 32_000)
# The first and the last port that Linux gives to them on this machine.
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
    """Return different ports that are free now, and stay so until Ray binds them, which takes it seconds.

    They are chosen at random, because several stacks may start at the same time, and by the system's random numbers,
    because a program may seed its own. A port that Linux gives to connections may be taken before Ray binds it, so
    those come last.
    """
    draw, split = random.SystemRandom(), max(_first_ephemeral() - PORTS.start, 0)
    candidates = (draw.sample(some, len(some)) for some in (PORTS[:split], PORTS[split:]))
    found = list(itertools.islice(filter(is_free, itertools.chain.from_iterable(candidates)), count))
    if len(found) < count:
        raise StartFailed(f"{len(found)} ports from {PORTS[0]} to {PORTS[-1]} are free, and a stack needs {count}")
    return found


def _first_ephemeral() -> int:
    """Return the first port that Linux gives to connections; one after `PORTS` if that is unknown."""
    try:
        return int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return PORTS.stop


def answers(address: str, *, timeout_s: float = 0.5) -> bool:
    """Return whether a server accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


# --- Supervisor ---

POLL_INTERVAL_S = 0.2
START_TIMEOUT_S = 180.0
# A service may lose the race against Ray's own start once or twice. More deaths during the start are a fault, and
# refused settings are a fault at once.
DEATHS_ALLOWED_AT_START = 3
SETTINGS_REFUSED = "exit status 2"


class StartFailed(Exception):
    """A part of the stack did not start. The text names its log."""


class AlreadyRunning(Exception):
    """Another supervisor holds this home."""


def hold_home(home: Path) -> IO[str]:
    """Lock `home` for this process' life. The system releases the lock however the process ends."""
    home.mkdir(parents=True, exist_ok=True)
    lock = (home / "stack.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise AlreadyRunning(f"a stack is already running in {home}") from None
    return lock


class Supervisor:
    """One stack, from its first process to its last.

    `say` is called with a line per event. With `owns_process` all children of this process belong to the stack, and so
    do their orphans.
    """

    def __init__(self, plan: StackPlan, say: Callable[[str], None], *, owns_process: bool = False) -> None:
        self._owns_process = owns_process
        self._plan = plan
        self._say = say
        self._stop = threading.Event()
        self._children = [Child(part) for part in plan.parts]
        supervisor = Process.from_pid(os.getpid())
        assert supervisor is not None
        self._record = Record(
            state=STARTING,
            supervisor=supervisor,
            addresses=plan.addresses,
            store=plan.store,
            ray_address=plan.ray_address,
            dashboard=plan.dashboard,
            import_roots=plan.import_roots,
            ray_folder=plan.ray_folder,
        )

    def stop(self) -> None:
        """Ask `run` to end. Safe in signal handlers and other threads."""
        self._stop.set()

    def run(self) -> None:
        """Run until `stop`. Raises `StartFailed`; nothing is left running then, either."""
        for folder in ("logs", "import"):
            (self._plan.home / folder).mkdir(parents=True, exist_ok=True)
        _set_old_logs_aside(self._children)
        self._save(self._record)
        if self._owns_process:
            adopt_orphans()
        try:
            self._start()
            if not self._stop.is_set():
                self._save(self._record.with_state(READY))
                self._say("ready")
            while not self._stop.wait(POLL_INTERVAL_S):
                self._poll()
                if self._owns_process:
                    reap_orphans({process.pid for process in self._record.parts.values()})
        finally:
            self._end()

    def _start(self) -> None:
        """Start Ray, then, as soon as its port answers, the services together."""
        until = time.monotonic() + START_TIMEOUT_S
        ray, *services = self._children
        for group in ([ray], services):
            for child in group:
                self._start_child(child)
            while not all(child.answering for child in group):
                self._poll()
                for child in group:
                    self._check_start(child, until)
                if self._stop.wait(POLL_INTERVAL_S):
                    return

    def _check_start(self, child: Child, until: float) -> None:
        if child.failures >= DEATHS_ALLOWED_AT_START or child.last_exit == SETTINGS_REFUSED:
            raise StartFailed(f"{child.part.name} ended with {child.last_exit}; its log: {child.part.log}")
        if not child.answering and time.monotonic() > until:
            raise StartFailed(
                f"{child.part.name} does not answer at {child.part.address} after {START_TIMEOUT_S:g} s; "
                f"its log: {child.part.log}"
            )

    def _poll(self) -> None:
        """Check once for dead parts, restarts that are due, and parts that answer now."""
        for child in self._children:
            if child.has_died():
                self._say(f"{child.part.name} ended with {child.last_exit}; starting it again")
            elif child.failures and child.is_due():
                self._start_child(child)
            elif child.begins_to_answer():
                self._save(self._record.with_answering(child.part.name))
                self._say(f"{child.part.name} answers at {child.part.address}")

    def _start_child(self, child: Child) -> None:
        process = child.start()
        self._save(self._record.with_started(child.part.name, process))
        self._say(f"{child.part.name} started, pid {process.pid}")

    def _end(self) -> None:
        self._save(self._record.with_state(STOPPING))
        # All parts together, because what keeps one from dying, such as a lost disk, often keeps all.
        kill_left_s = KILL_TIMEOUT_S
        for child in reversed(self._children):
            began = time.monotonic()
            if child.stop(kill_timeout_s=max(kill_left_s, KILL_INTERVAL_S)):
                self._say(f"{child.part.name} stopped")
            else:
                self._say(f"{child.part.name} had to be killed")
                kill_left_s -= time.monotonic() - began - child.part.grace_s - FAMILY_TIMEOUT_S
        if self._owns_process:
            end_orphans(self._say)
        shutil.rmtree(self._plan.ray_folder, ignore_errors=True)
        remove_record(self._plan.home)

    def _save(self, record: Record) -> None:
        self._record = record
        write_record(self._plan.home, record)


def _set_old_logs_aside(children: list[Child]) -> None:
    """Keep the logs of the previous stack."""
    for child in children:
        if child.part.log.exists():
            child.part.log.replace(child.part.log.with_suffix(".log.1"))


def say_with_time(line: str) -> None:
    """Print a line with its time, for the supervisor's own log."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stdout, flush=True)


# --- Orphans ---

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process from now on."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(spared: Set[int] = frozenset()) -> None:
    """Reap exited children, except the `spared` pids, whose exit status is needed elsewhere."""
    for child in children(os.getpid()):
        if child.pid not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def end_orphans(say: Callable[[str], None]) -> None:
    """Kill and reap every remaining child, after all parts have stopped.

    None is alive afterwards, except those within a call to the kernel that no signal ends. `say` names them.
    """
    until = time.monotonic() + KILL_TIMEOUT_S
    while left := {child for child in children(os.getpid()) if child.is_alive()}:
        if time.monotonic() >= until:
            pids = ", ".join(str(pid) for pid in sorted(child.pid for child in left))
            say(
                f"SIGKILL did not end these processes within {KILL_TIMEOUT_S:g} s: pids {pids}. They wait for a "
                "disk or another device, and are left running"
            )
            break
        for one in left:
            one.send(signal.SIGKILL)
        wait_gone(left, 5.0)
    reap_orphans()


# --- One part at run time ---

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
# How long the exit status of a child that has ended is waited for.
REAP_TIMEOUT_S = 5.0
# A child that lived this long before it died restarts with the first pause again.
STEADY_AFTER_S = 60.0


class Child:
    """Runs at most one process of its part at a time, as the leader of its own session."""

    def __init__(self, part: PlannedProcess) -> None:
        self.part = part
        self.failures = 0
        self.answering = False
        self.last_exit = ""
        self._popen: subprocess.Popen[bytes] | None = None
        self._process: Process | None = None
        self._started_at = 0.0
        self._start_again_at = 0.0

    def start(self) -> Process:
        """Start the process; its output is appended to its log."""
        self.part.log.parent.mkdir(parents=True, exist_ok=True)
        with self.part.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self.part.command,
                env=dict(self.part.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process = Process.from_pid(self._popen.pid)
        assert self._process is not None, "an unreaped child is always in /proc"
        self._started_at = time.monotonic()
        self.answering = False
        return self._process

    def has_died(self) -> bool:
        """Return True once for each death, after ending leftovers and scheduling the next start."""
        if self._popen is None or self._popen.poll() is None:
            return False
        code = self._popen.returncode
        self.last_exit = f"signal {-code}" if code < 0 else f"exit status {code}"
        self._end_family()
        if time.monotonic() - self._started_at > STEADY_AFTER_S:
            self.failures = 0
        pause_s = min(FIRST_PAUSE_S * 2**self.failures, LONGEST_PAUSE_S)
        self.failures += 1
        self._start_again_at = time.monotonic() + pause_s
        return True

    def is_due(self) -> bool:
        """Return whether it is not running and its pause has passed."""
        return self._popen is None and time.monotonic() >= self._start_again_at

    def begins_to_answer(self) -> bool:
        """Return True once for each start, when its address answers."""
        if self.answering or self._popen is None:
            return False
        self.answering = answers(self.part.address) and (self.part.name == "ray" or _serves(self.part.address))
        return self.answering

    def stop(self, *, kill_timeout_s: float = KILL_TIMEOUT_S) -> bool:
        """End the process and everything it started. Return whether it ended by itself."""
        if self._popen is None:
            return True
        return self._end_family(kill_timeout_s)

    def _end_family(self, kill_timeout_s: float = KILL_TIMEOUT_S) -> bool:
        assert self._popen is not None
        assert self._process is not None
        graceful = end(self._process, grace_s=self.part.grace_s, kill_timeout_s=kill_timeout_s)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is one that no signal ends
            self._popen.wait(REAP_TIMEOUT_S)
        self._popen, self._process, self.answering = None, None, False
        return graceful


def _serves(address: str) -> bool:
    with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


# --- Start and stop ---

LAUNCH_POLL_INTERVAL_S = 0.1
# All parts in turn, each with its own grace period, even if none can be killed; then the orphans, and a margin.
STOP_TIMEOUT_S = (
    RAY_GRACE_S
    + len(SERVICES) * SERVICE_GRACE_S
    + (1 + len(SERVICES)) * (FAMILY_TIMEOUT_S + 2 * KILL_INTERVAL_S + REAP_TIMEOUT_S)
    + KILL_TIMEOUT_S
    + (KILL_TIMEOUT_S + KILL_INTERVAL_S)
    + 15.0
)


@dataclass(frozen=True)
class Stack:
    """A stack that this process started."""

    record: Record
    process: subprocess.Popen[str]

    def keep(self) -> None:
        """Cut the lifeline, so that the stack continues when this process ends."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write("keep")
                self.process.stdin.close()


def running_record(home: Path) -> Record | None:
    """Return the record of the stack that runs in `home`, or None."""
    record = read_record(home)
    return record if record is not None and record.is_running() else None


def start(
    home: Path,
    options: StackOptions,
    *,
    lifeline: bool = False,
    on_progress: Callable[[Record], object] | None = None,
) -> Stack:
    """Start a stack in its own session and wait until all of it answers. Raises `StartFailed`.

    With `lifeline` the stack ends with this process, unless `Stack.keep` is called. Leftovers of a killed supervisor
    are ended first.
    """
    if running_record(home) is None:
        stop(home)
    (home / "logs").mkdir(parents=True, exist_ok=True)
    log = home / "logs" / "supervisor.log"
    arguments = {
        "home": str(home),
        "store": options.store,
        "import_roots": [str(root) for root in options.import_roots],
        "ray_cpus": options.ray_cpus,
        "lifeline": lifeline,
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", "millrace_client.stack.supervisor", json.dumps(arguments)),
            stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
    try:
        while process.poll() is None:
            record = read_record(home)
            if record is not None and record.supervisor.pid == process.pid:
                if on_progress is not None:
                    on_progress(record)
                if record.state == READY:
                    return Stack(record, process)
            time.sleep(LAUNCH_POLL_INTERVAL_S)
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    raise StartFailed(_reason(log))


def stop(home: Path) -> bool:
    """End the stack in `home` and everything that it started. None of its processes is alive afterwards.

    Return whether there was anything to end. A stack whose supervisor was killed is ended part by part.
    """
    record = read_record(home)
    if record is None:
        return False
    members = family([record.supervisor, *record.parts.values()])
    if record.supervisor.is_alive():
        record.supervisor.send(signal.SIGTERM)
        if wait_gone([record.supervisor], STOP_TIMEOUT_S):
            record.supervisor.send(signal.SIGKILL)
            wait_gone([record.supervisor], 5.0)
        record = read_record(home) or record
    for part in reversed(list(record.parts.values())):
        end(part, grace_s=10.0)
    for left in wait_gone(members, 5.0):
        left.send(signal.SIGKILL)
    shutil.rmtree(record.ray_folder, ignore_errors=True)
    remove_record(home)
    return bool(members)


def _reason(log: Path) -> str:
    """Return the supervisor's last message, and the end of the log that it names."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["the supervisor said nothing"]
    message = lines[-1].partition("error: ")[2] or lines[-1]
    _, named, path = message.rpartition("its log: ")
    part_log = Path(path)
    if named and part_log.is_file():
        tail = part_log.read_text(errors="replace").strip().splitlines()[-5:]
        message += "".join(f"\n  | {line[:200]}" for line in tail)
    return message


# --- The process ---

KEEP = "keep"


def main() -> int:
    """Run the stack that the options in the only argument, JSON, describe, until a signal or the lifeline ends it.

    With `lifeline`, standard input is a pipe from the parent. If it closes without the word `keep`, the parent has
    died, and the stack ends with it.
    """
    arguments = json.loads(sys.argv[1])
    home = Path(arguments["home"])
    options = StackOptions(
        store=arguments["store"],
        import_roots=tuple(Path(root) for root in arguments["import_roots"]),
        ray_cpus=arguments["ray_cpus"],
    )
    try:
        with hold_home(home):
            supervisor = Supervisor(make_plan(home, options), say_with_time, owns_process=True)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: supervisor.stop())
            # The terminal that started it may close.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            if arguments["lifeline"]:
                threading.Thread(target=_watch_lifeline, args=(supervisor,), daemon=True).start()
            supervisor.run()
    except (StartFailed, AlreadyRunning) as error:
        say_with_time(f"error: {error}")
        return 1
    return 0


def _watch_lifeline(supervisor: Supervisor) -> None:
    # os.read is used because a thread must not hold the lock of sys.stdin when the interpreter ends.
    said = b""
    while more := os.read(0, 64):
        said += more
    if said != KEEP.encode():
        supervisor.stop()


if __name__ == "__main__":
    sys.exit(main())
