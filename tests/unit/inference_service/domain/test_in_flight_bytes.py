from __future__ import annotations

import pytest

from inference_service.serve.infer import InFlightBytes
from shared.errors import ResourceExhausted


def test_what_would_be_too_much_is_refused_until_enough_is_given_back() -> None:
    held = InFlightBytes(10)
    held.take(6)
    held.take(4)
    with pytest.raises(ResourceExhausted) as refused:
        held.take(1)
    assert refused.value.specific_reason == "QUEUE_FULL"
    assert refused.value.metadata == {"queued_bytes": "10", "max_queued_bytes": "10"}
    assert refused.value.retry_after_s is not None
    held.give_back(6)
    held.take(5)


def test_one_that_is_alone_is_taken_whatever_its_size() -> None:
    held = InFlightBytes(10)
    held.take(11)
    with pytest.raises(ResourceExhausted):
        held.take(1)
    held.give_back(11)
    held.take(11)


def test_what_nobody_waits_for_leaves_half() -> None:
    held = InFlightBytes(10)
    assert (held.would_leave_half(5), held.would_leave_half(6)) == (True, False)
    held.take(4)
    assert (held.would_leave_half(1), held.would_leave_half(2)) == (True, False)
