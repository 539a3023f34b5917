"""ModelStatistics of several frontend processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from inference import grpc_service_pb2 as oip
from inference_service.domain.deployment import Deployment
from inference_service.frontend_processes import Peers
from inference_service.serve.models import Models
from inference_service.serve.repository import SummedStatistics
from tests.support.inference_server import ask, deployment, inference_server


def counted(one: Deployment, requests: int, at_s: float, batch_rows: int) -> Models:
    """What a frontend knows that answered so many requests of two rows, each in a batch of `batch_rows`."""
    models = Models()
    models.replace([one])
    statistics = models.statistics(one, one.versions[0])
    for _ in range(requests):
        statistics.answered(rows=2, now_s=at_s, total_s=1.0, model_s=0.5, input_s=0.1, infer_s=0.2, output_s=0.3)
        statistics.batch_ran(rows=batch_rows, round_trip_s=0.5, input_s=0.1, infer_s=0.2, output_s=0.3)
    statistics.failed(status="UNAVAILABLE", now_s=at_s, total_s=0.25)
    return models


def test_frontends_answer_with_the_sum_of_what_all_have_counted(tmp_path: Path) -> None:
    one = deployment()
    frontends = [
        SummedStatistics(counted(one, requests, at_s, rows), Peers(tmp_path, number))
        for number, (requests, at_s, rows) in enumerate([(3, 100.0, 4), (2, 200.0, 2), (1, 50.0, 4)])
    ]
    for frontend in frontends:
        frontend.leave()
    for frontend in frontends:
        (found,) = frontend.statistics_of("m", "")
        assert (found.name, found.version) == ("m", "1")
        assert (found.last_inference, found.inference_count, found.execution_count) == (200_000, 12, 6)
        seen = found.inference_stats
        assert (seen.success.count, seen.success.ns) == (6, 6_000_000_000)
        assert (seen.fail.count, seen.fail.ns) == (3, 750_000_000)
        assert [(batch.batch_size, batch.compute_infer.count) for batch in found.batch_stats] == [(2, 2), (4, 4)]
        assert found.batch_stats[1].compute_infer.ns == 800_000_000


def test_later_counts_and_removed_models_are_published_anew(tmp_path: Path) -> None:
    one, other = deployment(), deployment("other")
    models = counted(one, 1, 100.0, 4)
    frontend, asked = SummedStatistics(models, Peers(tmp_path, 1)), Models()

    def reported() -> dict[str, int]:
        frontend.leave()
        found = {
            one.name: one.inference_count for one in SummedStatistics(asked, Peers(tmp_path, 0)).statistics_of("", "")
        }
        return {name: count for name, count in found.items() if count}

    asked.replace([one, other])
    assert reported() == reported() == {"m": 2}
    models.statistics(one, one.versions[0]).answered(
        rows=5, now_s=101.0, total_s=1.0, model_s=0.5, input_s=0.1, infer_s=0.2, output_s=0.3
    )
    assert reported() == {"m": 7}
    models.replace([other])
    assert reported() == {}


def test_a_frontend_started_again_leaves_nothing_of_what_the_one_before_it_counted(tmp_path: Path) -> None:
    one = deployment()
    asked = SummedStatistics(counted(one, 3, 100.0, 4), Peers(tmp_path, 0))
    SummedStatistics(counted(one, 5, 100.0, 4), Peers(tmp_path, 1)).leave()
    assert asked.statistics_of("m", "")[0].inference_count == 16
    SummedStatistics(Models(), Peers(tmp_path, 1)).leave()
    assert asked.statistics_of("m", "")[0].inference_count == 6


def test_a_deployment_made_anew_has_none_of_its_namesake_s(tmp_path: Path) -> None:
    old = deployment()
    SummedStatistics(counted(old, 3, 100.0, 4), Peers(tmp_path, 1)).leave()
    new = SummedStatistics(counted(replace(old, uid="another"), 1, 100.0, 4), Peers(tmp_path, 0))
    assert new.statistics_of("m", "1")[0].inference_count == 2


async def test_a_client_of_one_frontend_learns_what_others_answered(tmp_path: Path) -> None:
    one = deployment()
    SummedStatistics(counted(one, 3, 100.0, 4), Peers(tmp_path, 1)).leave()

    async with inference_server(one, peers=Peers(tmp_path, 0)) as server:
        await asyncio.gather(server.stub.ModelInfer(ask(1, 2)), server.stub.ModelInfer(ask(3)))
        (found,) = (await server.stub.ModelStatistics(oip.ModelStatisticsRequest(name="m"))).model_stats
        assert found.inference_count == 3 * 2 + 3
