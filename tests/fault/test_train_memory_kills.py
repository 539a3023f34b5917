"""A node without memory, where Ray kills what runs on it: the job says so, and not only that its process ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.ray_head import ray_head
from tests.support.training import State, digits_spec, train_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

# Any node uses more than that, so Ray's memory monitor kills each worker soon after it has started.
ALWAYS_SHORT = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "250"}


def test_an_attempt_that_ray_kills_for_memory_says_that_the_node_ran_low(tmp_path: Path, faults: Faults) -> None:
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    with ray_head(num_cpus=4, environ=ALWAYS_SHORT) as head, train_stack(settings, head.address, tmp_path) as stack:
        spec = digits_spec()
        spec.max_failures = 0
        job = stack.client.finished(stack.client.create(spec).name)
        faults.add("killed by Ray for memory", "training", "file")

        assert job.state == State.STATE_FAILED
        assert "the node ran low on memory" in job.error.message, job.error.message
        assert "GB used /" in job.error.message, job.error.message
