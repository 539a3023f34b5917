"""A wish to cancel is obeyed soon, whatever the job is doing, and keeps what was committed."""

from __future__ import annotations

import grpc
import pytest

from tests.support.refusals import refused
from tests.support.training import State, TrainStack, digits_spec

pytestmark = pytest.mark.timeout(600)


def test_a_running_job_cancelled_twice_stops_after_its_next_step_and_keeps_its_checkpoints(
    s3_stack: TrainStack,
) -> None:
    client = s3_stack.client
    job = client.create(digits_spec(epochs=1000, checkpoint_every_steps=5))
    watch = client.watch(job.name)  # neither job would end by itself within hours
    watch.until("checkpoint_committed")

    with_old_etag = refused(lambda: client.cancel(job.name, etag="7"))
    asked = client.cancel(job.name, etag=job.etag)
    client.cancel(job.name)
    watch.rest()

    assert with_old_etag.code == grpc.StatusCode.ABORTED
    assert (with_old_etag.reason, with_old_etag.metadata) == ("STALE_ETAG", {"resource": job.name})
    assert asked.state == State.STATE_CANCELLING
    assert asked.etag != job.etag
    assert watch.jobs[-1].etag == asked.etag, "cancelling twice is cancelling once"
    assert [one.state for one in watch.jobs[-2:]] == [State.STATE_CANCELLING, State.STATE_CANCELLED]
    kept = client.checkpoints(job.name)
    assert [one.step for one in kept] == [5 * (number + 1) for number in range(len(kept))]
    assert kept == watch.of("checkpoint_committed")
    assert client.get(job.name).latest_checkpoint == kept[-1].name
    assert s3_stack.weights(kept[-1].name)


def test_a_job_that_waits_for_more_workers_than_there_are_cpus_can_be_cancelled(file_stack: TrainStack) -> None:
    client = file_stack.client
    job = client.create(digits_spec(num_workers=8, global_batch_size=120))
    watch = client.watch(job.name)
    watch.until_state(State.STATE_PENDING)

    client.cancel(job.name)
    watch.rest()

    assert watch.jobs[-1].state == State.STATE_CANCELLED
    assert not watch.events
    assert not client.checkpoints(job.name)
