"""A job in local mode: alone in the attempt's own process, with all that a job with workers leaves behind."""

from __future__ import annotations

import pytest

from millrace.train.v1 import train_service_pb2 as pb
from tests.support.ray_head import RayHead
from tests.support.training import TRAIN_ROWS, State, TrainClient, TrainStack, digits_spec

EPOCHS = 6

pytestmark = pytest.mark.timeout(900)


def logged(client: TrainClient, name: str, attempt: int) -> dict[int, str]:
    """What each rank said in that attempt."""
    lines: dict[int, str] = {}
    for part in client.rpc.StreamLogs(pb.StreamLogsRequest(name=name, attempt=attempt), timeout=60):
        lines[part.rank] = lines.get(part.rank, "") + part.text
    return lines


@pytest.mark.long
def test_a_suspended_and_resumed_run_without_workers_ends_as_one_with_a_worker(
    file_stack: TrainStack, train_ray: RayHead
) -> None:
    client = file_stack.client
    local = client.create(digits_spec(epochs=EPOCHS, num_workers=0))
    watch = client.watch(local.name)
    watch.until("progress")
    assert not train_ray.processes("ray::RayTrainWorker")
    client.suspend(local.name)
    watch.until_state(State.STATE_SUSPENDED)
    client.resume(local.name)
    watch.rest()
    with_worker = client.finished(client.create(digits_spec(epochs=EPOCHS, num_workers=1)).name)

    done = client.get(local.name)
    assert (done.state, done.attempt, done.failures) == (State.STATE_SUCCEEDED, 2, 0)
    assert (done.spec.HasField("num_workers"), done.spec.num_workers) == (True, 0)
    assert file_stack.weights(done.latest_checkpoint) == file_stack.weights(with_worker.latest_checkpoint)
    assert [one.num_workers for one in watch.of("attempt_started")] == [1, 1]
    coverage = client.rpc.GetCoverage(pb.GetCoverageRequest(name=local.name, epoch=EPOCHS - 1), timeout=60)
    assert (coverage.seen_once, coverage.missing, coverage.repeated) == (TRAIN_ROWS, 0, 0)
    lines = logged(client, local.name, 2)
    assert list(lines) == [0]
    assert lines[0].count("resuming from") == 1
