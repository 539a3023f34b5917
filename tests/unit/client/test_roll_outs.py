"""`millrace rollout|rollback`, on a real server."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.longrunning import operations_pb2_grpc

from millrace.inference.v1 import deployment_service_pb2_grpc
from millrace_client.cli import millrace
from tests.support.grpc_answers import serving
from tests.support.rolling_servicer import Rolling, RollOut


def run(servicer: Any, *arguments: str) -> Result:
    def register(server: grpc.Server) -> None:
        deployment_service_pb2_grpc.add_DeploymentServiceServicer_to_server(servicer, server)
        operations_pb2_grpc.add_OperationsServicer_to_server(servicer, server)

    with serving(register) as address:
        result = CliRunner().invoke(millrace, (*arguments, "--inference-address", address))
    assert "Traceback" not in result.output
    return result


def test_the_options_become_a_plan_and_each_step_is_told_once() -> None:
    servicer = Rolling()
    options = "--step 5:60 --step 100:0.5 --max-error-share 0 --max-p99-ms 12.5 --max-p99-ratio 2 --min-requests 9"
    options += " --window 30 --compare datasets/d/versions/v:test --min-agreement 0.9"
    result = run(servicer, "rollout", "digits", "j", *options.split())
    assert result.exit_code == 0, result.output
    (request,) = servicer.wishes
    assert (request.name, request.spec.checkpoint) == ("deployments/digits", "trainingJobs/j")
    assert len(request.request_id) == 36
    assert [(one.percent, one.interval.ToMilliseconds()) for one in request.spec.steps] == [(5, 60_000), (100, 500)]
    limits = request.spec.limits
    assert (limits.HasField("max_error_share"), limits.max_error_share) == (True, 0)
    assert (limits.max_p99_latency.ToMicroseconds(), limits.max_p99_ratio, limits.min_requests) == (12_500, 2, 9)
    assert limits.window.ToSeconds() == 30
    wanted = request.spec.comparison
    assert (wanted.dataset_version, wanted.split, wanted.min_agreement) == ("datasets/d/versions/v", "test", 0.9)
    assert not wanted.HasField("max_difference")
    told = [line for line in result.stdout.splitlines() if "version 2 has" in line]
    assert [line.split(" has ")[1] for line in told] == [
        "5 % of the traffic, for 1 min 00 s",
        "100 % of the traffic, for 1 min 00 s",
    ]
    assert "deployments/digits answers as version 2." in result.stdout


def test_without_options_everything_is_left_to_the_server() -> None:
    servicer = Rolling()
    result = run(servicer, "rollout", "digits", "trainingJobs/j/checkpoints/c", "--no-wait", "--json")
    assert json.loads(result.stdout)["roll_out"]["version"] == "2"
    (request,) = servicer.wishes
    assert not request.spec.steps
    assert not request.spec.limits.HasField("max_error_share")
    assert not request.spec.limits.HasField("max_p99_latency")
    assert not request.spec.limits.HasField("window")
    assert not request.spec.HasField("comparison")


def test_a_roll_out_that_is_rolled_back_is_an_error() -> None:
    result = run(Rolling(RollOut.STATE_ROLLED_BACK), "rollout", "digits", "j")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (4, "error: version 2: too slow")


@pytest.mark.parametrize("step", ["5", "5:", "x:1", "5:nan", "5:inf"])
def test_a_step_that_is_none_is_wrong_usage(step: str) -> None:
    result = run(Rolling(), "rollout", "digits", "j", "--step", step)
    assert result.exit_code == 2
    assert "PERCENT:SECONDS" in result.output


@pytest.mark.parametrize("option", ["--window", "--max-p99-ms"])
def test_a_time_that_is_no_number_is_wrong_usage(option: str) -> None:
    result = run(Rolling(), "rollout", "digits", "j", option, "nan")
    assert (result.exit_code, option in result.output) == (2, True)


def test_rolling_back_tells_what_answers_now() -> None:
    servicer = Rolling()
    result = run(servicer, "rollback", "digits", "--etag", "e")
    assert "answers as version 1; the roll-out of version 2 is rolled back." in result.stdout
    assert [(one.name, one.etag) for one in servicer.wishes] == [("deployments/digits", "e")]
