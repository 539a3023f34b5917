"""Generates load for a served model: prepares requests, sends them in a closed or open loop, and measures.

It uses the Open Inference Protocol, so it measures any such server. Its rows are generated from a model's metadata or
read from a file. N = rows.

A closed loop keeps a number of calls in flight: it shows a server's capacity, and slows down with the server. An open
loop sends at its own times, whatever the answers, like real traffic. Only an open loop shows the behaviour above
capacity.
"""

from __future__ import annotations

import gc
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt

from inference import grpc_service_pb2 as pb
from millrace_client.calls import channel_options
from millrace_client.inference import infer_request
from millrace_client.rows import BadInput, Tensor, dtype_of, typed
from shared.names import REQUEST_ID, STATUS

# --- Sending ---

METHOD = "/inference.GRPCInferenceService/ModelInfer"
# Beyond a call's own deadline, for gRPC to say that it has passed.
END_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The requests to send and the times to keep.

    `requests` are sent in turn, each with `deadline_s`. Requests due within the first `warm_up_s` are sent but not
    counted.
    """

    address: str
    requests: Sequence[bytes]
    rows_per_request: int = 1
    seconds: float = 10.0
    warm_up_s: float = 1.0
    deadline_s: float = 5.0
    metadata: Sequence[tuple[str, str]] = ()
    # The time limit for a connection; a running server takes milliseconds.
    ready_timeout_s: float = 10.0


def closed_loop(plan: Plan, in_flight: int) -> Measured:
    """Keep `in_flight` calls in flight: each answer triggers the next request.

    Raises `TimeoutError` for calls that do not end.
    """
    with _Calls(plan) as calls:
        end_s = calls.begin_s + plan.warm_up_s + plan.seconds
        ended = threading.Semaphore(0)

        def send_next() -> None:
            now_s = time.perf_counter()
            if now_s < end_s:
                calls.send(now_s, send_next)
            else:
                ended.release()

        for _ in range(in_flight):
            # Whatever the time is: a client that is held up before its first call measures something all the same.
            calls.send(time.perf_counter(), send_next)
        calls.wait(ended, in_flight, plan.warm_up_s + plan.seconds)
        return calls.measured()


def open_loop(plan: Plan, rate: float, seed: int = 0) -> Measured:
    """Send `rate` calls a second on average, at the precomputed times of a Poisson process.

    A client that falls behind sends due requests at once, and `Measured` reports the delay. Deadlines count from when
    calls were due, and a later answer is `LATE`. Raises `TimeoutError` like `closed_loop`.
    """
    with _Calls(plan) as calls:
        ended = threading.Semaphore(0)
        sent = 0
        for due_s in calls.begin_s + arrivals(rate, plan.warm_up_s + plan.seconds, seed):
            pause_s = due_s - time.perf_counter()
            if pause_s > 0:
                time.sleep(pause_s)
            calls.send(float(due_s), ended.release, due_s + plan.deadline_s)
            sent += 1
        calls.wait(ended, sent, 0.0)
        return calls.measured()


def arrivals(rate: float, seconds: float, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the sorted times within `seconds` of a Poisson process of `rate` a second."""
    noise = np.random.default_rng(seed)
    # The number of arrivals is Poisson, and given the number they are uniform.
    return np.sort(noise.uniform(0.0, seconds, noise.poisson(rate * seconds)))


class _Calls:
    """Calls over one channel. Callbacks in one thread of gRPC cost less than threads or asyncio."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # No retries, so that every failure is counted.
        self._channel = grpc.insecure_channel(
            plan.address, options=[*channel_options(plan.address), ("grpc.enable_retries", 0)]
        )
        # Raw bytes, because a load generator that parses answers measures itself.
        self._infer: Any = self._channel.unary_unary(METHOD)
        self._requests = itertools.cycle(plan.requests)
        self._outcomes: list[Outcome] = []
        self.begin_s = 0.0
        self._collects = False

    def __enter__(self) -> _Calls:
        try:
            grpc.channel_ready_future(self._channel).result(timeout=self._plan.ready_timeout_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise TimeoutError(f"no service answers at {self._plan.address}") from None
        # A garbage collection would stop the client for a fifth of a second, and then send a burst.
        gc.collect()
        self._collects = gc.isenabled()
        gc.disable()
        self.begin_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()
        self._channel.close()

    def send(self, due_s: float, then: Callable[[], None], deadline_s: float = math.inf) -> None:
        """Send a call, and call `then` when it has ended. It ends at the plan's deadline or at `deadline_s`."""
        request = next(self._requests)
        sent_s = time.perf_counter()
        timeout_s = min(self._plan.deadline_s, deadline_s - sent_s)
        if timeout_s <= 0:  # no time is left, so the call is not sent
            self._outcomes.append(Outcome(LATE, due_s, sent_s, sent_s))
            then()
            return
        call = self._infer.future(request, timeout=timeout_s, metadata=self._plan.metadata)
        call.add_done_callback(partial(self._ended, due_s, sent_s, deadline_s, then))

    def wait(self, ended: threading.Semaphore, count: int, timeout_s: float) -> None:
        until_s = time.perf_counter() + timeout_s + self._plan.deadline_s + END_TIMEOUT_S
        for number in range(count):
            if not ended.acquire(timeout=max(until_s - time.perf_counter(), 0.0)):
                raise TimeoutError(
                    f"{count - number} of {count} calls do not end, {END_TIMEOUT_S:.0f} s after their time"
                )

    def measured(self) -> Measured:
        first_s = self.begin_s + self._plan.warm_up_s
        counted = [outcome for outcome in self._outcomes if outcome.due_s >= first_s]
        return Measured(self._plan.seconds, self._plan.rows_per_request, counted)

    def _ended(self, due_s: float, sent_s: float, deadline_s: float, then: Callable[[], None], call: Any) -> None:
        ended_s = time.perf_counter()
        code = call.code()
        timed_out = code is grpc.StatusCode.DEADLINE_EXCEEDED and not _sent_by_server(call)
        too_late = code is grpc.StatusCode.OK and ended_s > deadline_s
        status = LATE if timed_out or too_late else code.name
        self._outcomes.append(Outcome(status, due_s, sent_s, ended_s))
        then()


def _sent_by_server(call: Any) -> bool:
    """Return whether the server sent the status. gRPC ends a call by its own timer without the server's headers."""
    return any(key in (STATUS, REQUEST_ID) for key, _ in call.trailing_metadata() or ())


# --- Figures ---

OK = "OK"
# The server neither answered nor refused by the deadline: the client's own timer ended the call, or the answer came
# later.
LATE = "LATE"
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


class Outcome(NamedTuple):
    """One call. `status` is gRPC's, or `LATE`. `due_s` is its planned time; all times are on one monotonic clock."""

    status: str
    due_s: float
    sent_s: float
    ended_s: float


@dataclass(frozen=True)
class Measured:
    """The calls that were due within `seconds` after the warm-up, each followed to its end."""

    seconds: float
    rows_per_request: int
    outcomes: Sequence[Outcome]

    def with_status(self, *statuses: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status in statuses]

    @property
    def answered_per_s(self) -> float:
        """Answers per second, without refusals and errors."""
        return len(self.with_status(OK)) / self.seconds

    @property
    def statuses(self) -> dict[str, int]:
        """The number of calls by status, the most frequent first."""
        return dict(Counter(outcome.status for outcome in self.outcomes).most_common())

    def share(self, *statuses: str) -> float:
        """Return the share of all calls; 0 without calls."""
        return len(self.with_status(*statuses)) / len(self.outcomes) if self.outcomes else 0.0

    def latency_ms(self, *statuses: str) -> dict[str, float]:
        """Return percentiles of the time from a call's due time to its end; empty without such calls.

        A client that falls behind makes the times longer, not fewer.
        """
        return _percentiles([one.ended_s - one.due_s for one in self.with_status(*statuses)])

    def behind_ms(self) -> dict[str, float]:
        """Return percentiles of the client's own delay in sending."""
        return _percentiles([outcome.sent_s - outcome.due_s for outcome in self.outcomes])

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "seconds": round(self.seconds, 3),
            "calls": len(self.outcomes),
            "answered_per_s": round(self.answered_per_s, 2),
            "rows_per_s": round(self.answered_per_s * self.rows_per_request, 2),
            "statuses": self.statuses,
            "latency_ms": {status: self.latency_ms(status) for status in self.statuses},
            "client_behind_ms": self.behind_ms(),
        }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values_ms = np.sort(np.asarray(seconds)) * 1000
    found = np.percentile(values_ms, PERCENTILES)
    named = {f"p{which:g}": round(float(value), 3) for which, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "max": round(float(values_ms[-1]), 3)}


# --- Rows and requests ---

Rows = dict[str, npt.NDArray[Any]]

# Generated integers are 0 and 1, except bytes, which usually are pixels: every category set has a 0.
MADE_UP_BELOW = {"UINT8": 256}
TEXT = b"0"


def made_up_rows(metadata: pb.ModelMetadataResponse, count: int, seed: int = 0) -> Rows:
    """Generate `count` rows for each input.

    Floats are standard normal, bytes have all values, other integers are 0 and 1, strings are "0". Raises `BadInput`
    for an input whose rows have no fixed shape, or whose type numpy lacks.
    """
    noise = np.random.default_rng(seed)
    return {tensor.name: _made_up(tensor, count, noise) for tensor in metadata.inputs}


def rows_of_file(metadata: pb.ModelMetadataResponse, path: Path) -> Rows:
    """Read a file's rows.

    A `.npy` is for a model of one input; a `.npz` has an array and a `.parquet` a column for each input, and others are
    ignored. Bytes that end in zeros need a `.parquet`, because numpy's own strings drop those. Raises `BadInput` for
    another kind of file, a missing input, and unequal numbers of rows.
    """
    names = [tensor.name for tensor in metadata.inputs]
    found = _columns(path, metadata.inputs) if path.suffix == ".parquet" else _arrays(path, metadata.inputs)
    missing = [name for name in names if name not in found]
    if missing:
        raise BadInput(f"{path} has no {', '.join(missing)}; the model's inputs are {', '.join(names)}")
    rows = {name: found[name] for name in names}
    counts = {name: len(values) for name, values in rows.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise BadInput(f"{path} has rows of each input: {counts}; give as many of each, and at least one")
    return rows


def requests_of(
    model: str, rows: Rows, rows_per_request: int = 1, *, version: str = "", outputs: Sequence[str] = ()
) -> list[bytes]:
    """Cut the rows into serialized requests of `rows_per_request`; a rest is dropped.

    `outputs` are the requested outputs; none means all. Raises `BadInput` if there are too few rows for one request.
    """
    count = len(next(iter(rows.values())))
    if count < rows_per_request:
        raise BadInput(f"{count} rows do not fill a request of {rows_per_request}; give more rows, or ask for fewer")
    made = []
    for start in range(0, count - rows_per_request + 1, rows_per_request):
        part = {name: values[start : start + rows_per_request] for name, values in rows.items()}
        request = infer_request(model, part, version=version, outputs=dict.fromkeys(outputs, 0))
        made.append(request.SerializeToString())
    return made


def _made_up(tensor: Tensor, count: int, noise: np.random.Generator) -> npt.NDArray[Any]:
    shape = (count, *tensor.shape[1:])
    if any(size < 0 for size in shape):
        raise BadInput(f"input {tensor.name!r} has rows of no fixed shape, {list(tensor.shape)}; give rows in a file")
    if tensor.datatype == "BYTES":
        return np.full(shape, TEXT, object)
    dtype = dtype_of(tensor)
    if dtype.kind == "f":
        return noise.standard_normal(shape).astype(dtype)
    return noise.integers(0, MADE_UP_BELOW.get(tensor.datatype, 2), shape).astype(dtype)


def _arrays(path: Path, inputs: Sequence[Tensor]) -> Rows:
    names = [tensor.name for tensor in inputs]
    if path.suffix == ".npy":
        if len(names) != 1:
            raise BadInput(f"{path} holds one array, and the model has the inputs {', '.join(names)}; use .npz")
        return {names[0]: typed(inputs[0], np.load(path, allow_pickle=False))}
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {tensor.name: typed(tensor, arrays[tensor.name]) for tensor in inputs if tensor.name in arrays}
    raise BadInput(f"{path} is no .npy, .npz or .parquet")


def _columns(path: Path, inputs: Sequence[Tensor]) -> Rows:
    import pyarrow.parquet as pq

    from millrace_client.request_builder import INT96_UNIT
    from millrace_client.rows import Place, values_of_column

    with pq.ParquetFile(path, coerce_int96_timestamp_unit=INT96_UNIT) as file:
        given = [tensor for tensor in inputs if tensor.name in file.schema_arrow.names]
        table = file.read(columns=[tensor.name for tensor in given])
    found = {}
    for tensor in given:
        column = table.column(tensor.name)
        if column.null_count:
            raise BadInput(f"column {tensor.name!r} of {path} has nulls; leave rows with nulls out")
        found[tensor.name], _ = values_of_column(tensor, column, Place(str(path)))
    return found
