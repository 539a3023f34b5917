"""The load generator on a real gRPC server: what it sends, when, and what it says came of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from inference import grpc_service_pb2 as pb
from inference import grpc_service_pb2_grpc as pb_grpc
from millrace_client import load
from millrace_client.load import (
    LATE,
    OK,
    Measured,
    Outcome,
    Plan,
    arrivals,
    closed_loop,
    made_up_rows,
    open_loop,
    requests_of,
    rows_of_file,
)
from millrace_client.rows import BadInput
from tests.support.grpc_answers import abort, error_info, serving, status
from tests.support.waiting import wait_until

IMAGE = pb.ModelMetadataResponse.TensorMetadata(name="image", datatype="UINT8", shape=[-1, 2, 3])
AGE = pb.ModelMetadataResponse.TensorMetadata(name="age", datatype="FP32", shape=[-1])
COUNT = pb.ModelMetadataResponse.TensorMetadata(name="count", datatype="INT64", shape=[-1])
TOWN = pb.ModelMetadataResponse.TensorMetadata(name="town", datatype="BYTES", shape=[-1])

Answer = Callable[[int, grpc.ServicerContext], pb.ModelInferResponse]


def metadata(*inputs: Any) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(name="m", inputs=inputs)


class Server(pb_grpc.GRPCInferenceServiceServicer):
    """Answers each call as `answer` does, which is given its number; keeps what it was asked."""

    def __init__(self, answer: Answer | None = None) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._now = 0
        self.asked: list[pb.ModelInferRequest] = []
        self.arrived_s: list[float] = []
        self.max_at_once = 0

    def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: grpc.ServicerContext
    ) -> pb.ModelInferResponse:
        with self._lock:
            number = len(self.asked)
            self.asked.append(request)
            self.arrived_s.append(time.perf_counter())
            self._now += 1
            self.max_at_once = max(self.max_at_once, self._now)
        try:
            return self._answer(number, context) if self._answer else pb.ModelInferResponse(model_name="m")
        finally:
            with self._lock:
                self._now -= 1

    def register(self, server: grpc.Server) -> None:
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(self, server)


def plan(address: str, **fields: Any) -> Plan:
    requests = requests_of("m", made_up_rows(metadata(IMAGE), 4))
    return Plan(**{"address": address, "requests": requests, "seconds": 0.3, "warm_up_s": 0.0, **fields})


def refuse(code: grpc.StatusCode) -> Answer:
    return lambda _, context: abort(context, status(code, "no", error_info("NO")))


def test_a_closed_loop_keeps_so_many_calls_in_flight_and_no_more() -> None:
    three = threading.Barrier(3)

    def together(number: int, _: grpc.ServicerContext) -> pb.ModelInferResponse:
        if number < 3:
            three.wait(timeout=60)  # breaks where there are never three
        return pb.ModelInferResponse()

    server = Server(together)
    with serving(server.register) as address:
        measured = closed_loop(plan(address, deadline_s=60.0), in_flight=3)
    assert server.max_at_once == 3
    assert measured.statuses.keys() == {OK}
    assert measured.answered_per_s == pytest.approx(len(measured.with_status(OK)) / 0.3)


def test_a_loop_keeps_its_calls_in_flight_however_late_it_begins() -> None:
    server = Server()
    with serving(server.register) as address:
        measured = closed_loop(plan(address, seconds=1e-9, deadline_s=60.0), in_flight=2)
    assert len(measured.outcomes) == len(server.asked) == 2


@pytest.fixture
def eighth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """By the load's clock each answer takes that long, whatever the machine does meanwhile."""
    now_s = [0.0]
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def answer(_: int, __: grpc.ServicerContext) -> pb.ModelInferResponse:
        now_s[0] += 0.125
        return pb.ModelInferResponse()

    return answer


def test_each_call_sends_the_next_request(eighth_of_a_second: Answer) -> None:
    server = Server(eighth_of_a_second)
    with serving(server.register) as address:
        closed_loop(plan(address, seconds=1.0, deadline_s=60.0), in_flight=1)
    sent = [request.raw_input_contents[0] for request in server.asked]
    assert len(set(sent[:4])) == 4
    assert sent == sent[:4] * 2


def test_the_warm_up_is_sent_and_not_counted(eighth_of_a_second: Answer) -> None:
    server = Server(eighth_of_a_second)
    with serving(server.register) as address:
        measured = closed_loop(plan(address, seconds=1.0, warm_up_s=0.5, deadline_s=60.0), in_flight=1)
    assert (len(measured.outcomes), len(server.asked)) == (8, 12)
    assert measured.seconds == 1.0


def test_an_open_loop_sends_at_its_own_times_whatever_comes_back() -> None:
    wanted = arrivals(100.0, 0.3, seed=5)
    all_came = threading.Barrier(len(wanted))

    def hold(_: int, __: grpc.ServicerContext) -> pb.ModelInferResponse:
        all_came.wait(timeout=60)
        return pb.ModelInferResponse()

    server = Server(hold)
    with serving(server.register, at_once=len(wanted)) as address:
        measured = open_loop(plan(address, deadline_s=100.0), rate=100.0, seed=5)
    assert measured.statuses == {OK: len(wanted)}
    assert all(one.sent_s >= one.due_s for one in measured.outcomes)
    due_s = sorted(one.due_s for one in measured.outcomes)
    assert np.diff(due_s) == pytest.approx(np.diff(wanted), abs=1e-6)
    # All were sent before the first was answered.
    assert max(one.sent_s for one in measured.outcomes) < min(one.ended_s for one in measured.outcomes)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = arrivals(1000.0, 50.0, seed=1)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(50_000, rel=0.02)
    assert gaps.min() >= 0
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert times.max() < 50.0


def test_latency_counts_from_when_a_call_was_due() -> None:
    measured = Measured(1.0, 1, [Outcome(OK, due_s=1.0, sent_s=1.5, ended_s=2.0)])
    assert measured.latency_ms(OK)["p50"] == pytest.approx(1000.0)
    assert measured.behind_ms()["p50"] == pytest.approx(500.0)


def test_a_call_that_this_client_gave_up_is_late_and_one_that_was_refused_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the load's clock its time is over once both have happened."""
    both, found, skipped_s = {LATE, "DEADLINE_EXCEEDED"}, set[str](), [0.0]
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + skipped_s[0]))

    def note(status: str, *times_s: float) -> Outcome:
        found.add(status)
        skipped_s[0] = 300.0 if found >= both else 0.0
        return Outcome(status, *times_s)

    monkeypatch.setattr(load, "Outcome", note)

    def answer(number: int, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        if number % 2:
            return refuse(grpc.StatusCode.DEADLINE_EXCEEDED)(number, context)
        wait_until(lambda: not context.is_active(), "the client to give the call up")
        return pb.ModelInferResponse()

    with serving(Server(answer).register) as address:
        measured = closed_loop(plan(address, seconds=300.0, deadline_s=0.5), in_flight=1)
    assert set(measured.statuses) == both
    assert measured.latency_ms(LATE)["p50"] >= 500.0
    assert measured.latency_ms("DEADLINE_EXCEEDED")["p50"] < 500.0


def test_in_an_open_loop_the_deadline_counts_from_when_a_call_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are due at once, and by a clock of the test's own a client takes 200 s to send each."""
    now_s, left_s, ended = [0.0], list[float](), list[Outcome]()
    monkeypatch.setattr(load, "arrivals", lambda *_: np.zeros(3))
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def note(*fields: Any) -> Outcome:
        ended.append(Outcome(*fields))
        return ended[-1]

    def answer(_: int, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        left_s.append(context.time_remaining())
        return pb.ModelInferResponse()

    def have_ended(number: int) -> bool:
        return len(ended) == number

    def slowly() -> Iterator[bytes]:
        for number, request in enumerate(itertools.cycle(requests_of("m", made_up_rows(metadata(IMAGE), 1)))):
            wait_until(partial(have_ended, number), "the calls before to end")
            now_s[0] = 200.0 * number
            yield request

    monkeypatch.setattr(load, "Outcome", note)

    class Slow(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            return slowly()

    with serving(Server(answer).register) as address:
        measured = open_loop(plan(address, requests=Slow(), warm_up_s=0.0, deadline_s=300.0), rate=1.0)
    assert measured.statuses == {OK: 2, LATE: 1}
    assert left_s[1] < 101.0


def test_every_status_is_counted_and_nothing_is_tried_again() -> None:
    server = Server(refuse(grpc.StatusCode.UNAVAILABLE))
    with serving(server.register) as address:
        measured = closed_loop(plan(address, seconds=0.2), in_flight=2)
    assert set(measured.statuses) == {"UNAVAILABLE"}
    assert len(server.asked) == len(measured.outcomes)
    assert measured.answered_per_s == 0.0
    assert measured.latency_ms(OK) == {}


def test_nobody_at_the_address_is_an_error() -> None:
    with pytest.raises(TimeoutError, match="no service answers at"):
        closed_loop(plan("127.0.0.1:1", ready_timeout_s=0.5), in_flight=1)


def test_made_up_rows_fit_the_metadata_and_are_the_same_for_a_seed() -> None:
    rows = made_up_rows(metadata(IMAGE, AGE, COUNT, TOWN), 50, seed=3)
    assert {name: (values.shape, values.dtype.kind) for name, values in rows.items()} == {
        "image": ((50, 2, 3), "u"),
        "age": ((50,), "f"),
        "count": ((50,), "i"),
        "town": ((50,), "O"),
    }
    assert rows["image"].max() > 200
    again = made_up_rows(metadata(IMAGE, AGE, COUNT, TOWN), 50, seed=3)
    assert all(np.array_equal(rows[name], again[name]) for name in rows)


def test_rows_of_no_fixed_shape_cannot_be_made_up() -> None:
    text = pb.ModelMetadataResponse.TensorMetadata(name="text", datatype="INT64", shape=[-1, -1])
    with pytest.raises(BadInput, match="'text' has rows of no fixed shape"):
        made_up_rows(metadata(text), 1)


def test_requests_hold_so_many_rows_and_ask_for_outputs() -> None:
    rows = {"age": np.arange(7, dtype=np.float32)}
    requests = [pb.ModelInferRequest.FromString(one) for one in requests_of("m", rows, 3, version="2", outputs=["y"])]
    assert [np.frombuffer(one.raw_input_contents[0], "<f4").tolist() for one in requests] == [[0, 1, 2], [3, 4, 5]]
    assert {(one.model_name, one.model_version, one.outputs[0].name) for one in requests} == {("m", "2", "y")}


def test_too_few_rows_for_one_request_are_refused() -> None:
    with pytest.raises(BadInput, match="2 rows do not fill a request of 3"):
        requests_of("m", {"age": np.zeros(2)}, 3)


def test_rows_of_a_parquet_file_take_the_types_of_the_inputs(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    columns = {
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(image),
        "age": pa.array([1, 2], pa.int32()),
        "town": ["Ulm", "Köln"],
        "label": [0, 1],
    }
    pq.write_table(pa.table(columns), path)
    rows = rows_of_file(metadata(IMAGE, AGE, TOWN), path)
    assert set(rows) == {"image", "age", "town"}
    assert rows["image"].tolist() == image.tolist()
    assert rows["age"].dtype == np.float32
    request = pb.ModelInferRequest.FromString(requests_of("m", rows, 2)[0])
    assert [tensor.datatype for tensor in request.inputs] == ["UINT8", "FP32", "BYTES"]


def test_bytes_of_a_parquet_file_are_sent_with_the_zeros_that_they_end_in(tmp_path: Path) -> None:
    pq.write_table(pa.table({"town": [b"a\0", b"\0\0"]}), tmp_path / "rows.parquet")
    rows = rows_of_file(metadata(TOWN), tmp_path / "rows.parquet")
    request = pb.ModelInferRequest.FromString(requests_of("m", rows, 2)[0])
    assert request.raw_input_contents[0] == b"\2\0\0\0a\0\2\0\0\0\0\0"


def test_int96_timestamps_of_a_parquet_file_keep_their_year(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    when = pa.array(["9999-12-31T00:00:00"]).cast(pa.timestamp("us"))
    pq.write_table(pa.table({"when": when}), path, use_deprecated_int96_timestamps=True)
    moment = pb.ModelMetadataResponse.TensorMetadata(name="when", datatype="INT64", shape=[-1])
    assert rows_of_file(metadata(moment), path)["when"].tolist() == when.cast(pa.int64()).to_pylist()


def test_numbers_for_an_input_of_text_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"town": [5]}), tmp_path / "rows.parquet")
    np.save(tmp_path / "rows.npy", np.array([5]))
    for name in ("rows.parquet", "rows.npy"):
        with pytest.raises(BadInput, match="'town'"):
            rows_of_file(metadata(TOWN), tmp_path / name)


def test_rows_with_nulls_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"town": ["a", None]}), tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match=r"'town' .* has nulls"):
        rows_of_file(metadata(TOWN), tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("name", "arrays", "expected"),
    [
        ("rows.npz", {"age": np.zeros(2)}, "has no count; the model's inputs are age, count"),
        ("rows.npz", {"age": np.zeros(2), "count": np.zeros(3, int)}, "give as many of each"),
        ("rows.npz", {"age": np.zeros(0), "count": np.zeros(0, int)}, "at least one"),
        ("rows.npz", {"age": np.array(["x"]), "count": np.zeros(1, int)}, "'age' is FP32, and the file has <U1"),
        ("rows.npz", {"age": np.zeros(1), "count": np.array([0.5])}, "'count' is INT64, and the file has float64"),
        ("rows.csv", {}, "is no .npy, .npz or .parquet"),
    ],
    ids=["missing", "unequal", "none", "text", "fractions", "another-kind"],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, name: str, arrays: Any, expected: str) -> None:
    path = tmp_path / name
    if arrays:
        np.savez(path, **arrays)
    else:
        path.write_text("age,count\n1,2\n")
    with pytest.raises(BadInput, match=expected):
        rows_of_file(metadata(AGE, COUNT), path)


def test_integers_beyond_the_input_s_type_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.full((1, 2, 3), 256))
    with pytest.raises(BadInput, match="'image' is UINT8"):
        rows_of_file(metadata(IMAGE), tmp_path / "rows.npy")
