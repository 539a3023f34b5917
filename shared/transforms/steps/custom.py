"""Calls an operator's function with record batches, and finds out which columns it makes.

Jobs run functions in workers. A service has to run one to answer a client: a function that hangs must not block a
thread for ever, and one that crashes must not end the service. So a service finds the columns in a child process.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self

import pyarrow as pa

from millrace.common.v1 import transform_pb2
from shared.dataset_version.manifest import is_tensor, logical_field, refuse_beyond_milliseconds
from shared.errors import InvalidArgument, ResourceExhausted, first_line, shown
from shared.transforms.batch import (
    Batch,
    Names,
    Schema,
    Step,
    StepError,
    StepKeys,
    arrow_schema,
    batch_of,
    known,
    schema_of,
    table_of,
)
from shared.transforms.steps.columns import named

# --- Columns, found in a child process ---

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


# --- The step ---

DEFAULT_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 3600.0

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Custom(Step):
    """Calls the function `module:function`.

    Its result for no rows shows which columns it makes, so it is called once in this way for each set of input types,
    before any data. `timeout_s` (0: 60) is enforced only in a process's main thread, where a signal can interrupt the
    function. Other threads wait for it to end, and refuse its result if it took too long. Within
    `functions_in_children` a separate process determines the columns, and is stopped if it does not end.
    """

    op: ClassVar[str] = "custom"
    function: str
    columns: tuple[str, ...]
    timeout_s: float = 0.0

    @classmethod
    def from_message(cls, message: transform_pb2.Custom, column: str) -> Self:
        if not _NAME.fullmatch(message.function):
            raise StepError(f"{shown(message.function)}: write it as module:function", "custom.function")
        if not 0 <= message.timeout_s <= MAX_TIMEOUT_S:
            raise StepError(f"{message.timeout_s}: use 0 to {MAX_TIMEOUT_S:g} seconds", "custom.timeout_s")
        return cls(message.function, named(message.columns, "custom.columns"), message.timeout_s)

    def to_proto(self) -> transform_pb2.TransformStep:
        message = transform_pb2.Custom(function=self.function, columns=self.columns, timeout_s=self.timeout_s)
        return transform_pb2.TransformStep(custom=message)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.columns

    def output(self, schema: Schema) -> Schema:
        return _replaced(schema, self.columns, self._new_columns(schema))

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        schema = pa.schema([(name, _arrow_type(batch[name])) for name in self.columns])
        rows = pa.RecordBatch.from_arrays(
            [one.combine_chunks() for one in table_of(batch, schema).columns], schema=schema
        )
        made, wanted = self._call(rows), self._announced(schema)
        if (made.schema.names, made.schema.types) != (wanted.names, wanted.types):
            raise StepError(f"{self.function} makes {_described(made)} of these rows and {_described(wanted)} of none")
        for field, column in zip(wanted, made.columns, strict=True):
            if not field.nullable and column.null_count:
                remedy = "declare it nullable, or fill them"
                raise StepError(
                    f"{self.function} has nulls in {field.name!r}, and declares it as a column without; {remedy}"
                )
        return _replaced(batch, self.columns, batch_of(made))

    def sources(self, needed: Names, schema: Schema) -> Names:
        made = frozenset(self._new_columns(schema))
        return (needed - made) | frozenset(self.columns) if needed & made else needed

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        return self if needed & frozenset(self._new_columns(schema)) else None

    def _new_columns(self, given: Schema) -> Schema:
        known(given, self.columns, "custom.columns")
        try:
            schema = arrow_schema({name: given[name] for name in self.columns})
        except ValueError as error:
            raise StepError(str(error), "custom.columns") from None
        return schema_of(self._announced(schema))

    def _announced(self, schema: pa.Schema) -> pa.Schema:
        return _infer_schema_in_child(self, schema) if is_wanted() else _infer_schema_here(self, schema)

    def made_of_none(self, schema: pa.Schema) -> pa.Schema:
        """Call the function in this process with no rows of these columns. Raises `StepError`."""
        columns = [pa.array([], field.type) for field in schema]
        return self._call(pa.RecordBatch.from_arrays(columns, schema=schema)).schema

    def _call(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the function's result, of logical columns.

        Raises `StepError`, naming the function and the problem.
        """
        function = _resolved(self.function)
        limit_s = self.timeout_s or DEFAULT_TIMEOUT_S
        started = time.monotonic()
        try:
            with _interrupted_after(limit_s):
                made = function(rows)
        except _TimeIsUp:
            raise StepError(f"{self.function} took longer than {limit_s:g} s for {len(rows)} rows") from None
        except MemoryError:
            raise
        except Exception as error:  # the operator's code can raise anything; it is reported under the step's name
            raise StepError(f"{self.function} raised {type(error).__name__}: {first_line(error)}") from error
        if time.monotonic() - started > limit_s:
            raise StepError(f"{self.function} took longer than {limit_s:g} s for {len(rows)} rows")
        if not isinstance(made, pa.RecordBatch):
            raise StepError(f"{self.function} returned a {type(made).__name__}, not a pyarrow.RecordBatch")
        if len(made) != len(rows):
            raise StepError(f"{self.function} returned {len(made)} rows for {len(rows)}; return as many as it is given")
        return self._logical(made)

    def _logical(self, record_batch: pa.RecordBatch) -> pa.RecordBatch:
        if not record_batch.num_columns:
            raise StepError(f"{self.function} returned no column")
        if len(set(record_batch.schema.names)) < record_batch.num_columns:
            raise StepError(f"{self.function} returned two columns of one name: {', '.join(record_batch.schema.names)}")
        fields, columns = [], []
        try:
            for field, column in zip(record_batch.schema, record_batch.columns, strict=True):
                kept = logical_field(field)
                if is_tensor(kept.type) and not is_tensor(field.type):
                    column = pa.ExtensionArray.from_storage(kept.type, column.cast(kept.type.storage_type))
                elif kept.type != field.type:
                    column = column.cast(kept.type)
                refuse_beyond_milliseconds(column)
                fields.append(pa.field(field.name, kept.type, kept.nullable))
                columns.append(column)
            record = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
            record.validate()
            batch_of(record)  # refuses tensors with nulls
        except (pa.ArrowException, InvalidArgument) as error:
            raise StepError(f"{self.function} returned what a version cannot keep: {first_line(error)}") from None
        return record


class _TimeIsUp(BaseException):
    """The function's time is up. Not an `Exception`, so that the function does not catch it."""


@lru_cache(maxsize=256)
def _infer_schema_here(step: Custom, schema: pa.Schema) -> pa.Schema:
    return step.made_of_none(schema)


@lru_cache(maxsize=256)
def _infer_schema_in_child(step: Custom, schema: pa.Schema) -> pa.Schema:
    return infer_schema(step.function, schema, step.timeout_s or DEFAULT_TIMEOUT_S)


@lru_cache(maxsize=256)
def _resolved(name: str) -> Callable[[pa.RecordBatch], Any]:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the module, which may raise anything
        raise StepError(f"{name} cannot be imported: {first_line(error)}", "custom.function") from error
    if not callable(function):
        raise StepError(f"{name} is no function", "custom.function")
    found: Callable[[pa.RecordBatch], Any] = function
    return found


@contextmanager
def _interrupted_after(limit_s: float) -> Iterator[None]:
    """Raise `_TimeIsUp` inside after `limit_s`, in the main thread only.

    Another caller's timer continues afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _TimeIsUp

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    others_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if others_s:
            left_s = others_s - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3), interval_s)


def _replaced(columns: dict[str, Any], names: tuple[str, ...], made: dict[str, Any]) -> dict[str, Any]:
    """Insert the made columns at the position of the first column that they replace."""
    replaced = frozenset(names)
    first = next(name for name in columns if name in replaced)
    out: dict[str, Any] = {}
    for name, column in columns.items():
        if name == first:
            out.update(made)
        if name not in replaced:
            if name in made:
                raise StepError(f"the function makes a column {name!r}, which there is already", "custom.columns")
            out[name] = column
    return out


def _arrow_type(column: Any) -> pa.DataType:
    if isinstance(column, pa.Array):
        return column.type
    return pa.fixed_shape_tensor(pa.from_numpy_dtype(column.dtype), list(column.shape[1:]))


def _described(made: pa.RecordBatch | pa.Schema) -> str:
    schema = made if isinstance(made, pa.Schema) else made.schema
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
