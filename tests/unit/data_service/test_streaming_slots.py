"""Streams that hold much memory are counted."""

from __future__ import annotations

import pytest

from data_service.streaming import Slots
from shared.errors import ResourceExhausted


def test_one_stream_more_than_there_are_slots_is_refused_until_one_ends() -> None:
    slots = Slots(2)

    with slots.one():
        with slots.one(), pytest.raises(ResourceExhausted) as refused, slots.one():
            pass
        assert refused.value.retry_after_s
        with slots.one():
            pass


def test_a_stream_that_fails_gives_its_slot_back() -> None:
    slots = Slots(1)

    for _ in range(3):
        with pytest.raises(OSError, match="broken"), slots.one():
            raise OSError("broken")
