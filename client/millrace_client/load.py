"""Load for a served model: requests that are made beforehand, sent in a closed or an open loop, and what came of them.

It speaks the Open Inference Protocol, so it measures any server of it. It asks about rows made up to fit a model's
metadata, or about rows of a file. N = rows.

A closed loop keeps a number of calls in flight: it shows what a server can do, and slows down with it. An open loop
sends at its own times, whatever comes back, as the world does: only it shows what happens above that.
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
from millrace_client.errors import DETAILS_KEY, REQUEST_ID_KEY
from millrace_client.inference import infer_request
from millrace_client.rows.typed import BadInput, Tensor, dtype_of, typed

# --- Sending ---

METHOD = "/inference.GRPCInferenceService/ModelInfer"
# Beyond a call's own deadline, for gRPC to say that it has passed.
END_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long, and what: `requests` are sent in turn, each with `deadline_s`; what is due within the first `warm_up_s`
    is sent, and not counted."""

    address: str
    requests: Sequence[bytes]
    rows_per_request: int = 1
    seconds: float = 10.0
    warm_up_s: float = 1.0
    deadline_s: float = 5.0
    metadata: Sequence[tuple[str, str]] = ()
    # For a connection; a server that is there takes milliseconds.
    ready_timeout_s: float = 10.0


def closed_loop(plan: Plan, in_flight: int) -> Measured:
    """Keeps so many calls in flight: each answer brings the next request. Raises `TimeoutError` for calls that do not
    end."""
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
            send_next()
        calls.wait(ended, in_flight, plan.warm_up_s + plan.seconds)
        return calls.measured()


def open_loop(plan: Plan, rate: float, seed: int = 0) -> Measured:
    """Sends `rate` calls a second on average, at times of a Poisson process that is fixed beforehand. A client that
    falls behind sends at once what is due, and `Measured` says by how much: deadlines count from when calls were due,
    and an answer that comes later is `LATE`. Raises `TimeoutError` like `closed_loop`.
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
    """Times within `seconds`, in order, of a Poisson process of `rate` a second."""
    noise = np.random.default_rng(seed)
    # The number of arrivals is Poisson, and they are then uniform.
    return np.sort(noise.uniform(0.0, seconds, noise.poisson(rate * seconds)))


class _Calls:
    """Calls over one channel. Callbacks, all in one thread of gRPC, cost a client less than threads or asyncio do."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # No retries: what fails is counted as it is.
        self._channel = grpc.insecure_channel(
            plan.address, options=[*channel_options(plan.address), ("grpc.enable_retries", 0)]
        )
        # The bytes as they are: a load generator that parses answers measures itself.
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
            raise TimeoutError(f"nobody answers at {self._plan.address}") from None
        # A collection stops the client for a fifth of a second, and what it sends then comes all at once.
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
        """Calls, and calls `then` when the call has ended. It is given up after the plan's time, or at `deadline_s`."""
        request = next(self._requests)
        sent_s = time.perf_counter()
        timeout_s = min(self._plan.deadline_s, deadline_s - sent_s)
        if timeout_s <= 0:  # it has no time left, and the server never hears of it
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
        counted = [one for one in self._outcomes if one.due_s >= first_s]
        return Measured(self._plan.seconds, self._plan.rows_per_request, counted)

    def _ended(self, due_s: float, sent_s: float, deadline_s: float, then: Callable[[], None], call: Any) -> None:
        ended_s = time.perf_counter()
        code = call.code()
        timed_out = code is grpc.StatusCode.DEADLINE_EXCEEDED and not _told(call)
        too_late = code is grpc.StatusCode.OK and ended_s > deadline_s
        status = LATE if timed_out or too_late else code.name
        self._outcomes.append(Outcome(status, due_s, sent_s, ended_s))
        then()


def _told(call: Any) -> bool:
    """Whether the server said it: gRPC ends a call by its own timer without a word from there."""
    return any(key in (DETAILS_KEY, REQUEST_ID_KEY) for key, _ in call.trailing_metadata() or ())


# --- Figures ---

OK = "OK"
# The server had neither answered nor refused by its deadline: the client's own timer ended it, or the answer was later.
LATE = "LATE"
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


class Outcome(NamedTuple):
    """One call. `status` is gRPC's, or `LATE`. `due_s`: when it was to be sent; all on one monotonic clock."""

    status: str
    due_s: float
    sent_s: float
    ended_s: float


@dataclass(frozen=True)
class Measured:
    """The calls that were due within `seconds`, after the warm-up, each followed to its end."""

    seconds: float
    rows_per_request: int
    outcomes: Sequence[Outcome]

    def of(self, *statuses: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.status in statuses]

    @property
    def answered_per_s(self) -> float:
        """Answers, not refusals nor errors, a second."""
        return len(self.of(OK)) / self.seconds

    @property
    def statuses(self) -> dict[str, int]:
        """Calls by status, the most frequent first."""
        return dict(Counter(one.status for one in self.outcomes).most_common())

    def share(self, *statuses: str) -> float:
        """Of all calls; 0 where there was none."""
        return len(self.of(*statuses)) / len(self.outcomes) if self.outcomes else 0.0

    def latency_ms(self, *statuses: str) -> dict[str, float]:
        """Percentiles of the time from when a call was due to its end, of calls with these statuses; empty where there
        is none. A client that falls behind makes them longer, not fewer."""
        return _percentiles([one.ended_s - one.due_s for one in self.of(*statuses)])

    def behind_ms(self) -> dict[str, float]:
        """Percentiles of how much later than due the client itself sent."""
        return _percentiles([one.sent_s - one.due_s for one in self.outcomes])

    def as_dict(self) -> dict[str, Any]:
        """All figures, as JSON-able values."""
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

# Made-up integers are 0 and 1 but for bytes, which are most often pixels: any category that a model knows has a 0.
MADE_UP_BELOW = {"UINT8": 256}
TEXT = b"0"


def made_up_rows(metadata: pb.ModelMetadataResponse, count: int, seed: int = 0) -> Rows:
    """`count` rows of noise for each input: floats of a standard normal distribution, bytes of all values, other
    integers 0 and 1, strings "0".

    Raises `BadInput` for an input of which none can be made: its rows have no fixed shape, or numpy has no such type.
    """
    noise = np.random.default_rng(seed)
    return {tensor.name: _made_up(tensor, count, noise) for tensor in metadata.inputs}


def rows_of_file(metadata: pb.ModelMetadataResponse, path: Path) -> Rows:
    """The rows of a file: `.npy` for a model of one input, `.npz` with an array for each, or a `.parquet` with a column
    for each; others are left out. Bytes that end in zeros come from a `.parquet`: numpy's own strings drop those.

    Raises `BadInput` for another kind of file, an input that it does not have, and rows that are not equally many.
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
    """The rows cut into requests of `rows_per_request`, what is left over dropped, each ready for the wire; `outputs`
    are asked for, or all where none is named. Raises `BadInput` where there are too few rows for one."""
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

    from millrace_client.rows.columns import Place, values_of_column
    from millrace_client.rows.request_builder import INT96_UNIT

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
