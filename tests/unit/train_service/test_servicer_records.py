"""Coverage, metrics and logs over gRPC: a real server on a real store."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from millrace.train.v1 import train_service_pb2 as pb
from shared.storage import ObjectStore
from tests.support.grpc_kit import call_error
from tests.support.train_server import train_stub
from tests.support.training_records import JOB, begin, commit, finish, make_job
from tests.support.versions import commit_version, striped_digits
from tests.unit.train_service.checkpoints.test_coverage_records import VERSION, table
from train_service.checkpoints.coverage_records import CoverageChain
from train_service.records.logs import LogShipper
from train_service.records.metrics_log import MetricsLog


@pytest.fixture
def jobs(store: ObjectStore) -> Any:
    commit_version(store, VERSION, {"validation": striped_digits(30), "train": striped_digits(1000, 1)})
    jobs = make_job(store, VERSION)
    begin(jobs)
    return jobs


@pytest.mark.usefixtures("jobs")
async def test_coverage_is_answered_and_refused_as_the_contract_says(store: ObjectStore) -> None:
    (part,) = CoverageChain(store, JOB).append(table(0, 1, shift=30))
    entry = commit(store, 2, (part,))

    async with train_stub(store) as stub:
        answer = await stub.GetCoverage(pb.GetCoverageRequest(name=JOB))
        assert (answer.training_job, answer.epoch, answer.checkpoint) == (JOB, 0, entry.name)
        assert (answer.row_count, answer.seen_once, answer.missing, answer.repeated) == (1000, 200, 800, 0)
        assert list(answer.missing_row_ids) == list(range(230, 1030))
        assert not answer.epoch_done
        for request, code in (
            (pb.GetCoverageRequest(name=JOB, epoch=2), grpc.StatusCode.OUT_OF_RANGE),
            (pb.GetCoverageRequest(name=JOB, epoch=-1), grpc.StatusCode.OUT_OF_RANGE),
            (pb.GetCoverageRequest(name="trainingJobs/none"), grpc.StatusCode.NOT_FOUND),
            (pb.GetCoverageRequest(name="nonsense"), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GetCoverageRequest(name=JOB, checkpoint="c"), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            assert (await call_error(stub.GetCoverage(request))).code == code
        store.put(part.path, b"damaged")
        assert (await call_error(stub.GetCoverage(pb.GetCoverageRequest(name=JOB)))).code == grpc.StatusCode.DATA_LOSS


@pytest.mark.usefixtures("jobs")
async def test_metrics_are_sent_page_by_page(store: ObjectStore) -> None:
    with MetricsLog(store, JOB, 1, 0) as log:
        for step in range(1, 8):
            log.add(step, 0, {"loss": 1 / step})

    async with train_stub(store) as stub:
        first = await stub.ListMetrics(pb.ListMetricsRequest(name=JOB, after_step=1, page_size=4))
        rest = await stub.ListMetrics(
            pb.ListMetricsRequest(name=JOB, after_step=1, page_size=4, page_token=first.next_page_token)
        )
        assert [point.step for point in (*first.points, *rest.points)] == [2, 3, 4, 5, 6, 7]
        assert dict(first.points[0].values) == {"loss": 0.5}
        assert (first.points[0].attempt, first.points[0].time.seconds > 0) == (1, True)
        assert rest.next_page_token == ""
        wrong = pb.ListMetricsRequest(name=JOB, page_token="%")
        assert (await call_error(stub.ListMetrics(wrong))).code == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_follower_gets_lines_as_they_come_and_the_end_of_the_attempt(store: ObjectStore, jobs: Any) -> None:
    async with train_stub(store) as stub:
        stream = aiter(stub.StreamLogs(pb.StreamLogsRequest(name=JOB, follow=True), timeout=60))
        with LogShipper(store, JOB, 1, 0) as shipper:
            shipper.add("one")
            first = await anext(stream)
            assert (first.attempt, first.rank, first.text) == (1, 0, "one\n")
            shipper.add("two")
            assert (await anext(stream)).text == "two\n"
            shipper.add("three")
        finish(jobs)
        assert [one.text async for one in stream] == ["three\n"]
        again = stub.StreamLogs(pb.StreamLogsRequest(name=JOB, rank=0))
        assert "".join([one.text async for one in again]) == "one\ntwo\nthree\n"
        nobody = stub.StreamLogs(pb.StreamLogsRequest(name=JOB, rank=-1))
        assert (await call_error(nobody.read())).code == grpc.StatusCode.NOT_FOUND
