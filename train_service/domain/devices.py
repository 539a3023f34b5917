"""The devices of a run as its job's log keeps them: what its first attempt chose for all, and what the last one had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys of `JobRecord.choices`; the values are CPU and GPU.
RUN_DEVICE = "device"
ATTEMPT_DEVICE = "attempt_device"
# What the attempt before had; only of one that changed it.
DEVICE_BEFORE = "device_before"


def with_devices(choices: Mapping[str, Any], run: str, attempt: str) -> dict[str, Any]:
    """The choices of a job whose next attempt is on `attempt`."""
    chosen = {**choices, RUN_DEVICE: run, ATTEMPT_DEVICE: attempt}
    before = choices.get(ATTEMPT_DEVICE, run)
    chosen.pop(DEVICE_BEFORE, None)
    return chosen if before == attempt else {**chosen, DEVICE_BEFORE: before}


def attempt_device(choices: Mapping[str, Any]) -> str:
    """Of the present or last attempt; empty before the first, and of a job that an earlier release ran."""
    return str(choices.get(ATTEMPT_DEVICE, ""))
