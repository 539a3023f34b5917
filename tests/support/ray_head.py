"""A Ray head of the test's own, started by itself on free loopback ports, with its own folder and session.

`python -m tests.support.ray_head FOLDER` is its guard: it ends the head of that folder once its own input ends, which
the kernel sees to when whoever started the head is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from millrace_client.stack.supervisor import RAY_HEAD_ENVIRONMENT
from tests.support.ports import free_ports

HOST = "127.0.0.1"
START_TIMEOUT_S = 240.0
STARTS = 3  # Ray gives itself 30 s, too little where several suites share two cores
STOP_TIMEOUT_S = 120.0
LOGS = ("ray_process_exit.log", "gcs_server.out", "raylet.out", "raylet.err")
STARTED = "This command will now block"
# For data services: workers that wait for another transform cost two processors five seconds after each.
NONE_WARM = {"MILLRACE_WARM_WORKERS": "0"}
# Ray starts a worker for each CPU as the first driver joins, before it knows what environment tasks will want: of 81
# processes of two test files, 14 never did anything.
NONE_IN_ADVANCE = {"RAY_prestart_worker_first_driver": "0"}
# A head's statistics of usage are sent nowhere, yet without this Ray Data starts a process that gathers them.
NO_USAGE_STATS = {"RAY_USAGE_STATS_ENABLED": "0"}
# A head takes the token that some `ray.init()` of this user may have left in ~/.ray; who joins by address does not.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
# `ray start`, but for its refusal to join another node where Ray is kept on loopback: see tests/conftest.py.
JOIN_ON_LOOPBACK = """
from ray._private import ray_constants
from ray.scripts import scripts

class Constants:
    ENABLE_RAY_CLUSTER = True
    def __getattr__(self, name):
        return getattr(ray_constants, name)

scripts.ray_constants = Constants()
scripts.main()
"""


@dataclass(frozen=True)
class RayNode:
    """`pid` is that of `ray start`; all that it started is in its session."""

    pid: int
    folder: Path

    def processes(self, title: str = "") -> list[int]:
        """The pids of this head's processes whose title begins with `title`, e.g. `ray::ServeReplica`."""
        return [pid for pid in _session(self.pid) if _title(pid).startswith(title)]

    def kill(self) -> None:
        """SIGKILLs the head and every worker, as when the machine goes."""
        until = time.monotonic() + STOP_TIMEOUT_S
        # Again until none is left: a dying raylet may have one more worker under way.
        while (pids := _session(self.pid)) and time.monotonic() < until:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
            time.sleep(0.05)


@dataclass(frozen=True)
class RayHead(RayNode):
    address: str
    dashboard: str

    def said(self) -> str:
        """What of it lives, and the end of what it last said, for a test that waited for it in vain."""
        titles = "\n".join(_title(pid)[:100] for pid in self.processes())
        ends = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in self._logs()]
        return "\n".join([f"Ray head {self.pid}, its processes:", titles, *ends])

    def _logs(self) -> list[Path]:
        logs = self.folder / "session_latest" / "logs"
        return [log for name in LOGS if (log := logs / name).exists()]

    def node_ids(self) -> dict[str, str]:
        """Of the live nodes, by the name that they were started with; the head is `head`."""
        listed = _run_ray(
            "import json, ray; ray.init(address='{}', log_to_driver=False); "
            "print(json.dumps([[n['Labels'].get('name', 'head'), n['NodeID']] for n in ray.nodes() if n['Alive']]))",
            self.address,
        )
        return dict(json.loads(next(line for line in listed.splitlines() if line.startswith("["))))

    def drain(self, name: str, deadline_s: int = 300) -> None:
        """Say that the node of that name will be taken away, as a cloud does with one of its spot machines."""
        node_id = self.node_ids()[name]
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={self.address}"]
        command += [f"--node-id={node_id}", "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=taken away"]
        subprocess.run([*command, f"--deadline-remaining-seconds={deadline_s}"], check=True, capture_output=True)


@contextmanager
def ray_node(head: RayHead, name: str, *, num_cpus: int = 1, num_gpus: int = 0) -> Iterator[RayNode]:
    """Run a further node of the head's cluster, with a session of its own; killable by itself."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        node = _start_node(folder, head, name, num_cpus, num_gpus)
        try:
            yield node
        finally:
            node.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_head(
    *,
    num_cpus: int = 4,
    num_gpus: int = 0,
    port: int | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
    dashboard: bool = True,
    labels: str = "",
) -> Iterator[RayHead]:
    """Run a head with these logical CPUs and GPUs; on `port`, where another one lived before. Its workers have
    `environ` besides ours. Ray Train's cleaner and Ray Serve ask the dashboard; a head without it starts sooner.
    `labels` are those of its node, `name=value`."""
    # Not below pytest's folder: Ray's unix sockets lie in here, and their paths may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    with _guarded(folder) as guard:
        options: dict[str, int | str] = {
            "num-cpus": num_cpus,
            "num-gpus": num_gpus,
            "include-dashboard": str(dashboard).lower(),
            **({"labels": labels} if labels else {}),
        }
        head = _started(folder, options, port, environ)
        try:
            yield head
        finally:
            head.kill()
            guard.kill()  # not needed any more; where the line above was interrupted, it is


@contextmanager
def _guarded(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that ends the head of the folder once this one has died or left the body; killed, it does not.

    A second Ctrl-C may come while the clean-up of the first one is under way, and SIGKILL leaves no time for any.
    """
    guard = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        yield guard
    finally:
        guard.stdin.close()
        guard.wait(2 * STOP_TIMEOUT_S)
        shutil.rmtree(folder, ignore_errors=True)


def _end_all_of(folder: Path) -> None:
    """End the sessions of those that were started with the folder, and take it away."""
    option = f"--temp-dir={folder}"
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    for leader in [pid for pid in pids if option in _title(pid).split() and os.getsid(pid) == pid]:
        RayNode(leader, folder).kill()
    shutil.rmtree(folder, ignore_errors=True)


def _started(folder: Path, resources: Mapping[str, int | str], port: int | None, environ: Mapping[str, str]) -> RayHead:
    for _ in range(STARTS - 1):
        with suppress(RuntimeError):
            return _start(folder, resources, port, environ)
    return _start(folder, resources, port, environ)


def _start(folder: Path, resources: Mapping[str, int | str], port: int | None, environ: Mapping[str, str]) -> RayHead:
    free, dashboard_port, agent_port, client_port = free_ports(4)
    port = port or free
    options = {
        "node-ip-address": HOST,
        "port": port,
        **resources,
        "temp-dir": folder,
        "dashboard-host": HOST,
        "dashboard-port": dashboard_port,
        "dashboard-agent-listen-port": agent_port,
        "ray-client-server-port": client_port,
    }
    # Nothing adds nodes to these clusters, so the autoscaler's monitor would be one process more without work.
    program, flags = ["-m", "ray.scripts.scripts"], ["--head", "--include-log-monitor=false", "--no-monitor"]
    pid = _ray_start(folder, program, flags, options, environ)
    return RayHead(pid, folder, f"{HOST}:{port}", f"http://{HOST}:{dashboard_port}")


def _start_node(folder: Path, head: RayHead, name: str, num_cpus: int, num_gpus: int) -> RayNode:
    (agent_port,) = free_ports(1)
    options = {
        "address": head.address,
        "node-ip-address": HOST,
        "num-cpus": num_cpus,
        "num-gpus": num_gpus,
        "labels": f"name={name}",
        "dashboard-agent-listen-port": agent_port,
    }
    for _ in range(STARTS - 1):
        with suppress(RuntimeError):
            return RayNode(_ray_start(folder, ["-c", JOIN_ON_LOOPBACK], [], options, {}), folder)
    return RayNode(_ray_start(folder, ["-c", JOIN_ON_LOOPBACK], [], options, {}), folder)


def _ray_start(
    folder: Path, program: list[str], flags: list[str], options: Mapping[str, object], environ: Mapping[str, str]
) -> int:
    """The pid of a `ray start` that has come up."""
    command = [sys.executable, *program, "start", "--block", "--disable-usage-stats", *flags]
    log = folder / "start.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env={**os.environ, **RAY_HEAD_ENVIRONMENT, **NO_TOKEN, **NONE_IN_ADVANCE, **NO_USAGE_STATS, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until = time.monotonic() + START_TIMEOUT_S
    try:
        while STARTED not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Ray did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.1)
    except BaseException:  # pytest's own timeout, too, must leave no head behind
        RayNode(process.pid, folder).kill()
        raise
    return process.pid


def _run_ray(program: str, address: str) -> str:
    """What a driver of the cluster prints; a process of its own, since Ray connects once a process."""
    command = [sys.executable, "-c", program.format(address)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=START_TIMEOUT_S).stdout


def _session(leader: int) -> list[int]:
    """The live processes of a session; Ray's workers have process groups of their own, but no sessions."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            # pid (name) state ppid pgrp session …; a name may hold spaces and brackets
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


if __name__ == "__main__":
    sys.stdin.read()
    _end_all_of(Path(sys.argv[1]))
