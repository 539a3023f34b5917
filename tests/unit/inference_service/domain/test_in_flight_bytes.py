from __future__ import annotations

import pytest

from inference_service.serve.infer import InFlightBytes
from shared.errors import ResourceExhausted


def test_bytes_above_the_limit_are_refused_until_enough_are_released() -> None:
    in_flight_bytes = InFlightBytes(10)
    in_flight_bytes.reserve(6)
    in_flight_bytes.reserve(4)
    with pytest.raises(ResourceExhausted) as refused:
        in_flight_bytes.reserve(1)
    assert refused.value.specific_reason == "QUEUE_FULL"
    assert refused.value.metadata == {"queued_bytes": "10", "max_queued_bytes": "10"}
    assert refused.value.retry_after_s is not None
    in_flight_bytes.release(6)
    in_flight_bytes.reserve(5)


def test_one_that_is_alone_is_taken_whatever_its_size() -> None:
    in_flight_bytes = InFlightBytes(10)
    in_flight_bytes.reserve(11)
    with pytest.raises(ResourceExhausted):
        in_flight_bytes.reserve(1)
    in_flight_bytes.release(11)
    in_flight_bytes.reserve(11)


def test_a_request_that_leaves_half_of_the_limit_is_found() -> None:
    in_flight_bytes = InFlightBytes(10)
    assert (in_flight_bytes.would_leave_half(5), in_flight_bytes.would_leave_half(6)) == (True, False)
    in_flight_bytes.reserve(4)
    assert (in_flight_bytes.would_leave_half(1), in_flight_bytes.would_leave_half(2)) == (True, False)
