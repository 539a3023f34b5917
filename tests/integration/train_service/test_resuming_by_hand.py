"""Jobs that ended otherwise than well, and go on because somebody wishes it."""

from __future__ import annotations

import math

import pytest
from safetensors.numpy import load

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.training import TRAIN_ROWS, State, TrainStack, digits_spec

EPOCHS, STEPS_AN_EPOCH = 12, 20

pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
def test_a_cancelled_run_that_is_resumed_goes_on_at_its_last_checkpoint_and_sees_every_row_once(
    file_stack: TrainStack,
) -> None:
    client = file_stack.client
    job = client.create(digits_spec(epochs=EPOCHS))
    watch = client.watch(job.name, timeout_s=800)
    watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step > 0)
    client.cancel(job.name)
    watch.until_state(State.STATE_CANCELLED)
    kept = client.checkpoints(job.name)[-1]
    assert 0 < kept.step < EPOCHS * STEPS_AN_EPOCH

    client.resume(job.name)
    again = client.watch(job.name, after_sequence=watch.events[-1].sequence, timeout_s=800)
    again.rest()

    assert again.jobs[-1].state == State.STATE_SUCCEEDED
    (started,) = again.of("attempt_started")
    assert (started.step, started.checkpoint) == (kept.step, kept.name)
    for epoch in range(EPOCHS):
        seen = client.rpc.GetCoverage(pb.GetCoverageRequest(name=job.name, epoch=epoch), timeout=60)
        assert (seen.seen_once, seen.missing, seen.repeated) == (TRAIN_ROWS, 0, 0)


@pytest.mark.long
def test_a_loss_that_is_not_finite_ends_a_run_of_two_workers_at_once_and_again_when_it_is_resumed(
    file_stack: TrainStack,
) -> None:
    client = file_stack.client
    wild = digits_spec(epochs=EPOCHS)
    wild.optimizer.CopyFrom(res.Optimizer(name="SGD", learning_rate=1e30))
    job = client.create(wild)

    failed = client.finished(job.name)

    assert (failed.state, failed.attempt) == (State.STATE_FAILED, 1)
    assert "step" in failed.error.message or "not finite" in failed.error.message
    for checkpoint in client.checkpoints(job.name):
        weights = load(file_stack.weights(checkpoint.name))
        assert all(math.isfinite(tensor.sum()) for tensor in weights.values())
    client.resume(job.name)
    again = client.finished(job.name)
    assert (again.state, again.attempt) == (State.STATE_FAILED, 2)
