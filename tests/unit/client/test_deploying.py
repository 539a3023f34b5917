"""`millrace deploy`, on a real server."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf.duration_pb2 import Duration

from millrace.inference.v1 import deployment_service_pb2 as pb
from millrace.inference.v1 import deployment_service_pb2_grpc as pb_grpc
from millrace_client.cli import millrace
from millrace_client.inference import autoscaling, keep_all, keep_latest
from tests.support.deploying_servicer import Deploying
from tests.support.grpc_answers import serving


def deployed(*options: str) -> tuple[Result, list[pb.DeploymentSpec]]:
    servicer = Deploying()

    def register(server: grpc.Server) -> None:
        pb_grpc.add_DeploymentServiceServicer_to_server(servicer, server)

    with serving(register) as address:
        result = CliRunner().invoke(millrace, ("deploy", "m", "j", *options, "--inference-address", address))
    assert "Traceback" not in result.output
    return result, servicer.specs


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), {}),
        (("--replicas", "3"), {"num_replicas": 3}),
        (("--replicas", "1..4"), {"autoscaling": autoscaling(1, 4)}),
        (("--replicas", "2..2"), {"num_replicas": 2}),
        (("--cpus", "0.5", "--gpus", "0.25"), {"cpus_per_replica": 0.5, "gpus_per_replica": 0.25}),
        (
            ("--threads", "2", "--max-queued-rows", "100", "--max-batch-delay-ms", "0.5"),
            {
                "threads_per_replica": 2,
                "max_queued_rows": 100,
                "max_batch_delay": Duration(nanos=500_000),
            },
        ),
        (("--max-batch-delay-ms", "0"), {"max_batch_delay": Duration()}),
        (("--allow-non-finite",), {"allow_non_finite": True}),
        (("--keep", "2"), {"version_policy": keep_latest(2)}),
        (("--keep", "all"), {"version_policy": keep_all()}),
        (
            ("--replicas", "1..2", "--rows-per-replica", "8"),
            {"autoscaling": autoscaling(1, 2, rows_per_replica=8)},
        ),
        (
            ("--replicas", "0..4", "--scale-up-after", "1", "--scale-down-after", "60"),
            {"autoscaling": autoscaling(0, 4, scale_up_after_s=1, scale_down_after_s=60)},
        ),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_the_options_become_a_specification(options: tuple[str, ...], wanted: dict[str, Any]) -> None:
    result, specs = deployed(*options)
    assert result.exit_code == 0, result.output
    assert specs == [pb.DeploymentSpec(checkpoint="trainingJobs/j", **wanted)]


@pytest.mark.parametrize("text", ["many", "1..", "..4", "1-4", "1...4"])
def test_another_number_of_replicas_is_refused_with_the_remedy(text: str) -> None:
    result, specs = deployed("--replicas", text)
    assert result.exit_code == 2
    assert "use a number, or MIN..MAX, e.g. 1..4" in result.output
    assert specs == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--replicas", "3", "--rows-per-replica", "8"), "needs --replicas MIN..MAX"),
        (("--scale-up-after", "1"), "needs --replicas MIN..MAX"),
        (("--max-batch-delay-ms", "nan"), "use a finite number"),
        (("--max-batch-delay-ms", "1e300"), "use a finite number"),
        (("--replicas", "1..4", "--scale-up-after", "1e30"), "use a finite number"),
        (("--replicas", "1..4", "--scale-down-after", "-1e30"), "use a finite number"),
        (("--keep", "-1"), "use a number from 1 on, or all"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_options_that_mean_nothing_are_wrong_usage(options: tuple[str, ...], expected: str) -> None:
    result, specs = deployed(*options)
    assert (result.exit_code, expected in " ".join(result.output.split())) == (2, True), result.output
    assert specs == []


def test_omitted_autoscaling_options_are_left_to_the_server() -> None:
    assert autoscaling(1, 4) == pb.Autoscaling(min_replicas=1, max_replicas=4)
    full = autoscaling(1, 4, rows_per_replica=8, scale_up_after_s=0, scale_down_after_s=2.5)
    assert (full.rows_per_replica, full.scale_down_after.ToMilliseconds()) == (8, 2500)
    assert full.HasField("scale_up_after")
