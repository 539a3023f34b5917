"""The service answers that a check did not end before the client's own deadline ends the call."""

from __future__ import annotations

import pytest

from millrace_client import checkpoint_transfer, train
from train_service.jobs import checkpoint_import, own_code
from train_service.jobs.own_code import Limits

# The time in which a child is ended and the answer sent.
ANSWER_S = 30.0


@pytest.mark.parametrize("timeout_s", [train.IMPORTED_TIMEOUT_S, train.CHECKED_TIMEOUT_S])
def test_the_client_waits_longer_than_the_check_of_a_module_may_take(timeout_s: float) -> None:
    assert timeout_s >= own_code.CHECK_WAIT_S + Limits().wall_s + own_code.GUARD_S + ANSWER_S


@pytest.mark.parametrize("size_bytes", [0, checkpoint_import.MAX_BYTES])
def test_the_client_waits_longer_than_the_reading_of_weights_may_take(size_bytes: int) -> None:
    child_s = checkpoint_import.BUSY_FACTOR * (checkpoint_import.BASE_S + size_bytes / checkpoint_import.BYTES_PER_S)
    # A place among the imports, and one among all children.
    waits_s = 2 * own_code.CHECK_WAIT_S
    timeout_s = checkpoint_transfer.BASE_S + size_bytes / checkpoint_transfer.BYTES_PER_S
    assert timeout_s >= waits_s + child_s + own_code.GUARD_S + ANSWER_S
