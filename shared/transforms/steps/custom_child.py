"""Determines, in a child process, which columns a custom function makes.

A service has to run an operator's function to answer a client. A function that hangs must not block a thread for ever,
and one that crashes must not end the service. Jobs run functions in workers, and do not need this.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import pyarrow as pa

from shared.errors import ResourceExhausted
from shared.transforms.schema import StepError

# Time to start Python and import the function's module, in addition to the function's own limit.
START_LIMIT_S = 20.0
CALL_LIMIT_S = 30.0
# Each child may take as much memory as the function's imports do.
MAX_CHILDREN = 4
MAX_ANSWER_BYTES = 16 * 1024 * 1024

# The child finds modules where this process does, including the operator's.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import answer; answer()"
_SCHEMA, _PROBLEM = b"S", b"P"

_wanted: ContextVar[bool] = ContextVar("custom schemas are learnt in child processes", default=False)
_children = threading.BoundedSemaphore(MAX_CHILDREN)


@contextmanager
def functions_in_children() -> Iterator[None]:
    """Use a child process inside to determine a custom function's columns. For processes that answer requests."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def is_wanted() -> bool:
    return _wanted.get()


def infer_schema(function: str, schema: pa.Schema, limit_s: float) -> pa.Schema:
    """Return what `function` (`module:function`) makes of no rows of these logical columns.

    The function may take `limit_s` or `CALL_LIMIT_S`, whichever is less, and `START_LIMIT_S` to start. Raises
    `StepError`, naming the function, if it fails, ends its process or does not end; `ResourceExhausted` if
    `MAX_CHILDREN` other children run for too long.
    """
    limit_s = min(limit_s, CALL_LIMIT_S)
    if not _children.acquire(timeout=START_LIMIT_S):
        raise ResourceExhausted(
            f"{MAX_CHILDREN} custom functions are being asked for their columns already; try again later",
            reason="TOO_MANY_CUSTOM_FUNCTIONS",
        )
    try:
        return _infer_schema(function, schema, limit_s)
    finally:
        _children.release()


def _infer_schema(function: str, schema: pa.Schema, limit_s: float) -> pa.Schema:
    deadline_s = START_LIMIT_S + limit_s
    # Files instead of pipes, because a process that the function leaves behind would keep a pipe open.
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answered:
        asked = {"function": function, "limit_s": limit_s, "deadline_s": deadline_s}
        question.write(json.dumps(asked).encode() + b"\n" + schema.serialize().to_pybytes())
        question.seek(0)
        command = [sys.executable, "-c", _START.format(module=__name__), json.dumps(sys.path)]
        with subprocess.Popen(command, stdin=question, stdout=answered, start_new_session=True) as child:
            try:
                status = child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                raise StepError(f"{function} was stopped: no answer for 0 rows within {deadline_s:g} s") from None
            finally:
                if child.returncode is None:
                    os.killpg(child.pid, signal.SIGKILL)
        answered.seek(0)
        kind, content = answered.read(1), answered.read(MAX_ANSWER_BYTES)
    if kind == _SCHEMA:
        return pa.ipc.read_schema(pa.py_buffer(content))
    if kind == _PROBLEM:
        problem = json.loads(content)
        raise StepError(problem["message"], problem["at"])
    raise StepError(f"{function} ended its process for 0 rows, {_ending(status)}")


def _ending(status: int) -> str:
    return f"with {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"


def answer() -> None:
    """Do the child's whole work: read the question from standard input, write the answer to standard output."""
    line, _, content = sys.stdin.buffer.read().partition(b"\n")
    question = json.loads(line)
    faulthandler.enable()
    # Ends this child even if its service is killed.
    faulthandler.dump_traceback_later(question["deadline_s"], exit=True)
    # The function's own prints are not part of the answer.
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        # Imported here, because that module imports this one.
        custom = importlib.import_module("shared.transforms.steps.custom")
        schema = pa.ipc.read_schema(pa.py_buffer(content))
        try:
            step = custom.Custom(question["function"], tuple(schema.names), question["limit_s"])
            out.write(_SCHEMA + step.made_of_none(schema).serialize().to_pybytes())
        except StepError as error:
            out.write(_PROBLEM + json.dumps({"message": str(error), "at": error.at}).encode())
