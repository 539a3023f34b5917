"""Inference with many requests in flight, on a real server."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from inference import grpc_service_pb2_grpc
from millrace_client import connect, errors
from millrace_client.inference import ANSWERS_HELD
from tests.support.fake_servicers import Doubling
from tests.support.grpc_answers import serving
from tests.support.waiting import wait_until


def register(servicer: Any) -> Any:
    return lambda server: grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)


def requests(*values: int) -> list[dict[str, Any]]:
    return [{"x": np.array([value])} for value in values]


def test_an_answer_has_arrays_lineage_and_latency() -> None:
    with serving(register(Doubling())) as address, connect(inference=address) as millrace:
        answer = millrace.inference.infer("m", {"x": np.array([21])})
    assert answer.outputs["y"].tolist() == [42]
    assert (answer.model, answer.version) == ("m", "1")
    assert answer.lineage.training_job == "trainingJobs/j"
    assert answer.latency_s > 0


def test_many_answers_come_in_the_order_of_their_requests() -> None:
    with serving(register(Doubling())) as address, connect(inference=address) as millrace:
        answers = list(millrace.inference.infer_many("m", requests(*range(200)), in_flight=16))
    assert [int(one.outputs["y"][0]) for one in answers] == [2 * value for value in range(200)]


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    servicer = Doubling()
    with serving(register(servicer)) as address, connect(inference=address) as millrace:
        list(millrace.inference.infer_many("m", requests(*range(60)), in_flight=3))
    assert 1 <= servicer.max_in_flight <= 3


def test_a_full_queue_is_tried_again_after_the_time_it_asks_for() -> None:
    with serving(register(Doubling(full_every=3))) as address, connect(inference=address) as millrace:
        answers = list(millrace.inference.infer_many("m", requests(*range(30)), in_flight=8))
    assert [int(one.outputs["y"][0]) for one in answers] == [2 * value for value in range(30)]


def test_answers_behind_a_request_that_hangs_are_bounded() -> None:
    servicer = Doubling(hangs_at=0)
    with (
        serving(register(servicer)) as address,
        connect(inference=address) as millrace,
        ThreadPoolExecutor(1) as pool,
    ):
        answers = pool.submit(list, millrace.inference.infer_many("m", requests(*range(1000)), in_flight=4))
        most = 4 * ANSWERS_HELD - 1  # and the one that hangs
        wait_until(lambda: servicer.answered >= most, "answers behind the one that hangs")
        time.sleep(0.2)
        held = servicer.answered
        servicer.go_on.set()
        assert [int(one.outputs["y"][0]) for one in answers.result()] == [2 * value for value in range(1000)]
    assert held == most


def test_another_error_ends_it_with_that_error() -> None:
    with (
        serving(register(Doubling())) as address,
        connect(inference=address) as millrace,
        pytest.raises(errors.InvalidArgument, match="below zero"),
    ):
        list(millrace.inference.infer_many("m", requests(1, 2, -1, 3), in_flight=2))


def test_none_in_flight_at_once_is_refused_instead_of_waiting_for_ever() -> None:
    with connect(inference="127.0.0.1:1") as millrace, pytest.raises(ValueError, match="in_flight is 0"):
        next(millrace.inference.infer_many("m", requests(1), in_flight=0))


def test_a_client_may_stop_reading_answers() -> None:
    with serving(register(Doubling())) as address, connect(inference=address) as millrace:
        answers = millrace.inference.infer_many("m", requests(*range(50)), in_flight=4)
        assert int(next(answers).outputs["y"][0]) == 0
        answers.close()  # type: ignore[attr-defined]
        assert millrace.inference.infer("m", {"x": np.array([1])}).outputs["y"].tolist() == [2]


def test_one_client_serves_many_threads() -> None:
    with (
        serving(register(Doubling())) as address,
        connect(inference=address) as millrace,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda value: millrace.inference.infer("m", {"x": np.array([value])}), range(64)))
    assert [int(one.outputs["y"][0]) for one in answers] == [2 * value for value in range(64)]
