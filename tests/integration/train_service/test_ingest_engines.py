"""Whoever prepares the rows, the run is the same: bit for bit the same weights at the end."""

from __future__ import annotations

import pytest

from millrace.train.v1 import resources_pb2 as res
from tests.support.training import State, TrainStack, digits_spec
from tests.support.waiting import wait_until


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_run_whose_rows_ray_data_prepares_ends_with_the_weights_of_one_by_threads(file_stack: TrainStack) -> None:
    weights = []
    for ingest in (res.TrainingSpec.INGEST_RAY_DATA, res.TrainingSpec.INGEST_THREADS):
        job = file_stack.client.create(digits_spec(epochs=1, ingest=ingest))
        done = file_stack.client.finished(job.name)
        assert (done.state, done.attempt) == (State.STATE_SUCCEEDED, 1), done
        weights.append(file_stack.weights(f"{job.name}/checkpoints/final"))

    assert weights[0] == weights[1]


def test_a_run_leaves_a_processor_to_those_who_prepare_its_rows(file_stack: TrainStack) -> None:
    """Four workers of one CPU each would fill the cluster, and wait for ever for rows that nobody prepares."""
    client = file_stack.client
    job = client.create(digits_spec(ingest=res.TrainingSpec.INGEST_RAY_DATA, num_workers=4, global_batch_size=60))

    wait_until(lambda: client.get(job.name).waiting_for != "", "the job to say what it waits for")

    assert client.get(job.name).waiting_for.endswith("besides 1 CPU that prepares rows")
    client.cancel(job.name)
    assert client.finished(job.name).attempt == 0
