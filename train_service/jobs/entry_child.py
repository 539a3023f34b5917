"""Checks of a client's code or weights in a process that may die.

It checks a module with its function or model, a script, or files of weights. `ask_in_child` in `own_code.py` starts it.

    python -I -B entry_child.py < question.json > answer.json

There are two or three processes. The guard, which this file is started as, watches the user's process, in which the
module is imported. If the kernel grants namespaces, a third process between them is the first process of the
namespaces, whose end kills all other processes in them. The guard writes one JSON object, whose `problem` is empty or
says what is wrong. The guard needs only the standard library and `shared.process_limits`. The user's process imports
torch, too, for a model and for weights.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWPID = 1 << 17, 1 << 29
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
# The most idle time that one poll adds. A guard that was not run for longer than this says nothing about the module.
MAX_IDLE_STEP_S = 1.0
KILLED_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 64 * 1024
MAX_TEXT = 500
MAX_NAMES = 20
MODEL_ENTRY = "spec.model.entry"
# For users other than root, the child may start this many processes more than its user had before.
MORE_PROCESSES = 256
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    question = json.load(sys.stdin)
    sys.path[:] = question["path"]
    # Orphaned processes of the user's code become children of the guard, so it can kill them.
    _libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    isolated = question["namespaces"] and _enter_namespaces()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _begin(question, writing, isolated)
    os.close(writing)
    try:
        answer = _watch(pid, reading, question, isolated)
    finally:
        _end_all(pid)
    answer["isolated"] = isolated
    json.dump(answer, sys.stdout)


def _begin(question: dict[str, Any], writing: int, isolated: bool) -> NoReturn:
    """Run the user's process. With namespaces, this is their first process, and the user's process is its child."""
    from shared.process_limits import die_with_parent

    die_with_parent()
    if isolated:
        _mount_own_proc()
        pid = os.fork()
        if pid:
            os.close(writing)
            _reap_until(pid)
    os.setsid()
    _detach(writing)
    _limit(question["limits"])
    os.chdir(question["work"])
    answer = json.dumps(_answer(question)).encode()
    with contextlib.suppress(OSError):  # the module may have closed it; the guard reports that
        os.write(writing, answer[:MAX_ANSWER_BYTES])
    os._exit(0)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the user's process.

    It is `problem` and, for an entry that makes a model, the other results of `own_model_child`.
    """
    if "weights" in question:
        sys.path[:] = question["path"]
        # Of a model of the caller's own code: its module is imported first, which runs that code.
        if "module" in question and (problem := look_up(question)):
            return {"problem": problem, "field": MODEL_ENTRY}
        from train_service.jobs.weights_child import read_weights  # imports torch

        return {"problem": read_weights(question["weights"])}
    if problem := compiled(question) if question.get("script") else look_up(question):
        return {"problem": problem}
    if "model" not in question:
        return {"problem": ""}
    from train_service.jobs.own_model_child import inspect_model  # imports torch

    return inspect_model(question["model"], question["folder"])


def look_up(question: dict[str, Any]) -> str:
    """Return the problem of the entry, if any. `module` and `function` are looked up in `folder`."""
    folder, name, function = question["folder"], question["module"], question["function"]
    # The folder comes after everything installed, so no module of the bundle replaces one of ours or of Python.
    sys.path[:] = [*question["path"], folder]
    sys.argv = [""]
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        return _describe_error(error, folder)
    where = os.path.realpath(getattr(module, "__file__", None) or "")
    if not where.startswith(os.path.realpath(folder) + os.sep):
        return f"module {name!r} is Python's or an installed package's, which comes first: rename the bundle's"
    place = os.path.relpath(where, os.path.realpath(folder))
    found = getattr(module, function, None)
    if found is None:
        there = [one for one, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == name]
        listed = f"; it has {', '.join(there[:MAX_NAMES])}" if there else ""
        return f"{place} has no function {function!r}{listed}"
    if ("model" in question or "weights" in question) and inspect.isclass(found):
        return ""  # its call shows whether it takes the configuration
    if not callable(found):
        return f"{function!r} of {place} is of type {type(found).__name__}: name a function"
    code = getattr(found, "__code__", None)
    line = f"{place}:{code.co_firstlineno}" if code else place
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        return f"{line}: {function!r} is a coroutine or a generator, which a call does not run: use a plain function"
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:
        return f"{line}: {function!r} has no signature: {_one_line(error)}"
    for count in (0, 1):
        with contextlib.suppress(TypeError):
            signature.bind(*[{}] * count)
            return ""
    return f"{line}: {function}{signature} must take one argument, the configuration, or none"


def compiled(question: dict[str, Any]) -> str:
    """Return the problem of the script, if any.

    The file `script` in `folder` must exist, and Python must be able to compile it.
    """
    folder, script = question["folder"], question["script"]
    path = Path(folder, script)
    if not path.is_file():
        there = sorted(one.relative_to(folder).as_posix() for one in Path(folder).rglob("*.py"))
        listed = f"; it has {', '.join(there[:MAX_NAMES])}" if there else ""
        return f"the bundle has no file {script!r}{listed}"
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _describe_error(error, folder)
    return ""


def _describe_error(error: BaseException, folder: str) -> str:
    """Return an error with its place in the bundle.

    An example is `train.py:12: ModuleNotFoundError: …`, with the innermost line in the bundle.
    """
    inside = os.path.realpath(folder) + os.sep
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = os.path.realpath(frame.filename)
        if path.startswith(inside):
            place = f"{path.removeprefix(inside)}:{frame.lineno}"
    if isinstance(error, SyntaxError) and os.path.realpath(error.filename or "").startswith(inside):
        place = f"{os.path.realpath(error.filename or '').removeprefix(inside)}:{error.lineno}"
    text = f"{type(error).__name__}: {_one_line(error)}"
    return f"{place}: {text}" if place else text


def _one_line(error: BaseException) -> str:
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException as failed:
        text = f"its text cannot be had: {type(failed).__name__}"
    text = " ".join(text[: 2 * MAX_TEXT].split())
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _watch(pid: int, reading: int, question: dict[str, Any], isolated: bool) -> dict[str, Any]:
    """Watch the process `pid` until it ends.

    The watch also ends if all processes below this one together exceed a limit. `isolated` means that `pid` is the
    first process of namespaces, and the user's process is its child.
    """
    os.set_blocking(reading, False)
    began = time.monotonic()
    idle = IdleTime(began)
    # The user's process was there at the last poll.
    has_begun = False
    reapers = {os.getpid(), pid} if isolated else {os.getpid()}
    answer = b""
    while True:
        status = _reap(pid)
        answer = _read_on(reading, answer)
        if status is not None:
            # The kernel ends a process behind its limit of CPU time, perhaps before this watch sees the excess.
            over = _over(question, [], _cpu_s([]), 0.0) if status else ""
            return {"problem": over} if over else _answered(answer, status, isolated, *_named(question))
        now = time.monotonic()
        processes = _below(os.getpid())
        cpu_s = _cpu_s(processes)
        delays_ns, ready = _waits_for_cpu([one for one, _, _ in processes], reapers)
        idle.add(now, cpu_s, delays_ns, ready or not has_begun)
        idle.resume(time.monotonic())
        has_begun = has_begun or any(one != pid or not isolated for one, _, _ in processes)
        if over := _over(question, processes, cpu_s, idle.seconds):
            # It may have ended by itself since the processes were listed. Then its answer counts.
            status = _reap(pid)
            if status == 0:
                return _answered(_read_on(reading, answer), status, isolated, *_named(question))
            return {"problem": over}
        if now - began > question["limits"]["wall_s"]:
            return {"problem": f"{question['limits']['wall_s']:g} s have passed", "busy": True}
        time.sleep(POLL_S)


def _read_on(reading: int, answer: bytes) -> bytes:
    """Return the answer with what has come since."""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(reading, MAX_ANSWER_BYTES):
            answer = (answer + data)[:MAX_ANSWER_BYTES]
    return answer


class IdleTime:
    """The time in which the watched processes wait by themselves, for example in a sleep or for a lock.

    Time in which they run, wait for a CPU or wait for the disk says how busy the machine is, so it does not count.
    """

    def __init__(self, now: float) -> None:
        self.seconds = 0.0
        self._polled_at = now
        self._cpu_s = 0.0
        self._delays_ns: dict[str, int] = {}

    def add(self, now: float, cpu_s: float, delays_ns: dict[str, int], ready: bool) -> None:
        """Add what was idle since the last poll.

        `cpu_s` is the CPU time of all processes so far, `delays_ns` the time that each thread has waited for a CPU.
        `ready` means that a thread runs, or waits for a CPU or the disk, at this moment.
        """
        delayed_ns = sum(max(0, value - self._delays_ns.get(thread, 0)) for thread, value in delays_ns.items())
        busy_s = max(0.0, cpu_s - self._cpu_s) + delayed_ns / 1e9
        if not ready:
            self.seconds += min(MAX_IDLE_STEP_S, max(0.0, now - self._polled_at - busy_s))
        self._polled_at, self._cpu_s, self._delays_ns = now, cpu_s, delays_ns

    def resume(self, now: float) -> None:
        """Count on from `now`. The time since `add`, in which the processes were read, counts neither way."""
        self._polled_at = now


def _waits_for_cpu(processes: list[int], reapers: Collection[int]) -> tuple[dict[str, int], bool]:
    """Return each thread's waiting time for a CPU so far, in ns, and whether any thread is running or ready to run.

    A thread that waits for the disk counts as ready, because it would run on a machine that is less busy. So does a
    process that has ended and waits for one of our own processes, `reapers`, to reap it. The children that the user's
    code does not reap do not.
    """
    delays_ns: dict[str, int] = {}
    ready = False
    for pid in processes:
        with contextlib.suppress(OSError):  # it has ended
            for thread in Path("/proc", str(pid), "task").iterdir():
                stat = (thread / "stat").read_bytes()
                state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
                ready = ready or state in (b"R", b"D") or (state == b"Z" and int(parent) in reapers)
                # Kernels without scheduler statistics have no such file; the state has to do.
                delays_ns[thread.name] = int((thread / "schedstat").read_bytes().split()[1])
    return delays_ns, ready


def _named(question: dict[str, Any]) -> tuple[str, str]:
    """Return the subject of the check, and its treatment."""
    return ("the files", "read") if "weights" in question else ("its module", "imported")


def _answered(answer: bytes, status: int, isolated: bool, subject: str, done: str) -> dict[str, Any]:
    try:
        record = json.loads(answer)
        # `field` and `facts` belong to a model.
        kept = {key: record[key] for key in ("field", "facts") if key in record}
        return {"problem": str(record["problem"])[: 4 * MAX_TEXT], **kept}
    except (ValueError, TypeError, KeyError):
        how = _name_end(os.waitstatus_to_exitcode(status), isolated)
        return {"problem": f"{subject} ended the process that {done} {'it' if done == 'imported' else 'them'}, {how}"}


def _name_end(code: int, isolated: bool) -> str:
    """Return how a process ended. The first process of namespaces exits with 128 + the signal that ended its child."""
    number = -code if code < 0 else code - 128 if isolated else 0
    return f"by {signal.Signals(number).name}" if number in set(signal.Signals) else f"with exit status {code}"


def _over(question: dict[str, Any], processes: list[tuple[int, int, float]], cpu_s: float, idle_s: float) -> str:
    limits, (subject, done) = question["limits"], _named(question)
    stage = f"when {'it is' if done == 'imported' else 'they are'} {done}"
    if "model" in question:
        stage = "until its model is made and tried"
    takes, waits = ("takes", "waits") if done == "imported" else ("take", "wait")
    memory = sum(rss for _, rss, _ in processes)
    if len(processes) > limits["processes"]:
        return f"its module starts more than {limits['processes']} processes"
    if memory > limits["memory_bytes"]:
        return f"{subject} {takes} more than {limits['memory_bytes'] >> 20} MiB of memory {stage}"
    if cpu_s > limits["cpu_s"]:
        return f"{subject} {takes} more than {limits['cpu_s']:g} s of CPU time {stage}"
    if idle_s > limits["idle_s"]:
        return f"{subject} {waits} for more than {limits['idle_s']:g} s {stage}, without computing"
    return ""


def _cpu_s(processes: list[tuple[int, int, float]]) -> float:
    """Return the CPU time of these processes and of all that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(cpu for _, _, cpu in processes)


def _below(root: int) -> list[tuple[int, int, float]]:
    """Return all processes below `root`. Each is (pid, resident bytes, CPU seconds including ended children)."""
    children: dict[int, list[int]] = {}
    facts: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:  # it has ended
            continue
        # The process name, in brackets, may hold any bytes. The fields after it begin with the state, number 3.
        fields = stat[stat.rindex(b")") + 2 :].split()
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        facts[int(entry.name)] = (int(fields[21]) * PAGE_BYTES, sum(map(int, fields[11:15])) / TICKS_PER_S)
    found, ahead = [], list(children.get(root, []))
    while ahead:
        pid = ahead.pop()
        found.append((pid, *facts[pid]))
        ahead += children.get(pid, [])
    return found


def _reap(pid: int) -> int | None:
    """Reap ended children. Return the status of `pid` once it has ended."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, code = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            status = code if ended == pid else status
    return status


def _reap_until(pid: int) -> NoReturn:
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            # This first process cannot die by a signal of its own, so 128 + the signal's number stands for it.
            os._exit(code if code >= 0 else 128 - code)


def _end_all(pid: int) -> None:
    """Kill every process below this one, including orphans."""
    until = time.monotonic() + KILLED_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # kills all processes of its group at one moment
    while time.monotonic() < until:
        _reap(pid)
        below = _below(os.getpid())
        if not below:
            return
        for one, _, _ in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


def _limit(limits: dict[str, Any]) -> None:
    from shared.process_limits import set_limits

    cpu_s = int(limits["cpu_s"]) + 1
    bounds = [
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ]
    if os.getuid() != 0:  # root has no such limit
        bounds.append((resource.RLIMIT_NPROC, _threads_of_user() + MORE_PROCESSES))
    set_limits(bounds)


def _threads_of_user() -> int:
    count, user = 0, os.getuid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == user:
                    count += len(list((entry / "task").iterdir()))
    return count


def _detach(keep: int) -> None:
    """Close all open files except `keep`. Standard input, output and error become /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for entry in list(Path("/proc/self/fd").iterdir()):
        number = int(entry.name)
        if number > 2 and number != keep:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(number)


def _enter_namespaces() -> bool:
    """Enter new namespaces if the kernel grants them, and return whether it did.

    They separate processes, network and IPC.
    """
    from shared.process_limits import CLONE_NEWIPC, CLONE_NEWNET, enter_namespaces

    return enter_namespaces(CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC)


def _mount_own_proc() -> None:
    """Mount a private `/proc` that shows no process outside.

    Some containers forbid the mount. Outside processes are then visible, but out of reach of signals. The mounts belong
    to this process alone, so the guard's `/proc` still shows all processes.
    """
    libc = _libc()
    if libc.unshare(CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0:
        libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)


def _libc() -> Any:
    from shared.process_limits import libc

    return libc()


if __name__ == "__main__":
    main()
