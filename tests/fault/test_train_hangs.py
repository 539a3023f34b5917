"""A worker that stands still is noticed, named and replaced; the stacks of the ranks that answer are kept."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from millrace.train.v1 import train_service_pb2 as pb
from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.process_states import stop_process
from tests.support.ray_head import ray_head
from tests.support.training import State, digits_spec, train_stack
from tests.support.waiting import wait_until
from train_service.records.logs import STACKS_CHUNK

WORKER = "ray::RayTrainWorker"
# 30 s without a sign, and what it takes to end it on a busy machine.
NOTICED_TIMEOUT_S = 75.0

pytestmark = [pytest.mark.timeout(1200), pytest.mark.chaos]


def test_a_stopped_worker_is_noticed_named_killed_and_replaced(tmp_path: Path, faults: Faults) -> None:
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    with ray_head(num_cpus=4) as head, train_stack(settings, head.address, tmp_path) as stack:
        job = stack.client.create(digits_spec(epochs=12, checkpoint_every_steps=5))
        watch = stack.client.watch(job.name, timeout_s=1100)
        watch.until("checkpoint_committed")
        watch.until("progress")
        workers = head.processes(WORKER)
        stopped = max(workers)
        stop_process(stopped)
        faults.add("SIGSTOP worker", "training", "file")
        began = time.monotonic()

        ended = watch.until("attempt_ended").attempt_ended
        noticed_s = time.monotonic() - began
        wait_until(lambda: stopped not in head.processes(), "the stopped worker to be killed")
        watch.rest()

        print(f"\nnoticed after {noticed_s:.1f} s")
        assert 30.0 <= noticed_s < NOTICED_TIMEOUT_S
        assert ended.cause == pb.AttemptEnded.CAUSE_HUNG
        (hung,) = ended.ranks
        assert f"rank {hung} at step" in ended.text
        other = stack.store.get(f"{job.name}/logs/a00001/r{1 - hung:04d}/{STACKS_CHUNK}").decode()
        assert "in train_loop" in other
        assert (watch.jobs[-1].state, watch.jobs[-1].failures) == (State.STATE_SUCCEEDED, 1)
        assert watch.of("attempt_started")[1].step > 0
