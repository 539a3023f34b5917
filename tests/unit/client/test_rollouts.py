"""`millrace rollout|rollback`, on a real server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.longrunning import operations_pb2_grpc

from inference_service.deploy.deployments import Deployments
from inference_service.domain.deployment import Kept, VersionPolicy
from millrace.inference.v1 import deployment_service_pb2_grpc
from millrace_client.cli import millrace
from millrace_client.inference import keep_latest
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.support.deployment_server import commanded, weighed
from tests.support.grpc_answers import abort, serving, status
from tests.support.rolling_servicer import Rolling, Rollout


def run(servicer: Any, *arguments: str) -> Result:
    def register(server: grpc.Server) -> None:
        deployment_service_pb2_grpc.add_DeploymentServiceServicer_to_server(servicer, server)
        operations_pb2_grpc.add_OperationsServicer_to_server(servicer, server)

    with serving(register) as address:
        result = CliRunner().invoke(millrace, (*arguments, "--inference-address", address))
    assert "Traceback" not in result.output
    return result


def test_the_options_become_a_plan_and_each_step_is_reported_once() -> None:
    servicer = Rolling()
    options = "--step 5:60 --step 100:0.5 --max-error-share 0 --max-p99-ms 12.5 --max-p99-ratio 2 --min-requests 9"
    options += " --window 30 --compare datasets/d/versions/v:test --min-agreement 0.9"
    result = run(servicer, "rollout", "digits", "j", *options.split())
    assert result.exit_code == 0, result.output
    (request,) = servicer.requests
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
    reported = [line for line in result.stdout.splitlines() if "version 2 has" in line]
    assert [line.split(" has ")[1] for line in reported] == [
        "5 % of the traffic, for 1 min 00 s",
        "100 % of the traffic, for 1 min 00 s",
    ]
    assert "deployments/digits answers as version 2." in result.stdout


def test_without_options_everything_is_left_to_the_server() -> None:
    servicer = Rolling()
    result = run(servicer, "rollout", "digits", "trainingJobs/j/checkpoints/c", "--no-wait", "--json")
    assert json.loads(result.stdout)["rollout"]["version"] == "2"
    (request,) = servicer.requests
    assert not request.spec.steps
    assert not request.spec.limits.HasField("max_error_share")
    assert not request.spec.limits.HasField("max_p99_latency")
    assert not request.spec.limits.HasField("window")
    assert not request.spec.HasField("comparison")


def test_the_policy_is_set_once_the_rollout_is_accepted() -> None:
    servicer = Rolling()
    result = run(servicer, "rollout", "digits", "j", "--keep", "2")
    assert result.exit_code == 0, result.output
    request, kept = servicer.requests
    assert request.spec.checkpoint == "trainingJobs/j"
    assert (kept.deployment.name, list(kept.update_mask.paths)) == ("deployments/digits", ["spec.version_policy"])
    assert kept.deployment.spec.version_policy == keep_latest(2)


def test_a_rollout_that_is_refused_changes_no_policy_and_unloads_nothing(file_store: StoreSettings) -> None:
    store = open_store(file_store)
    one = weighed("digits", 0, 0, 100)
    before = Deployments(store).create(replace(one, spec=replace(one.spec, version_policy=VersionPolicy(Kept.ALL))))
    result = commanded(store, "rollout", "digits", "trainingJobs/nobody/checkpoints/c", "--keep", "1")
    assert (result.exit_code, "trainingJobs/nobody" in result.stderr) == (3, True)
    assert Deployments(store).get("deployments/digits") == before


def test_a_policy_that_cannot_be_set_is_an_error_that_says_that_the_rollout_goes_on() -> None:
    class Unkept(Rolling):
        def UpdateDeployment(self, _: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            abort(context, status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the store is full"))

    result = run(Unkept(), "rollout", "digits", "j", "--keep", "2")
    assert (result.exit_code, result.stdout) == (1, "")
    error, remedy = result.stderr.splitlines()
    assert error == "error: deployments/digits rolls out, but --keep is not set: the store is full"
    assert "millrace deployments traffic deployments/digits --keep" in remedy


def test_a_rollout_that_is_rolled_back_is_an_error() -> None:
    result = run(Rolling(Rollout.STATE_ROLLED_BACK), "rollout", "digits", "j")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (4, "error: version 2: too slow")


@pytest.mark.parametrize("step", ["5", "5:", "x:1", "5:nan", "5:inf", "5:1e300", "9999999999:1"])
def test_a_step_that_is_none_is_wrong_usage(step: str) -> None:
    result = run(Rolling(), "rollout", "digits", "j", "--step", step)
    assert result.exit_code == 2
    assert "PERCENT:SECONDS" in result.output


@pytest.mark.parametrize("time", ["nan", "1e300"])
@pytest.mark.parametrize("option", ["--window", "--max-p99-ms"])
def test_a_time_that_is_no_number_is_wrong_usage(option: str, time: str) -> None:
    result = run(Rolling(), "rollout", "digits", "j", option, time)
    assert (result.exit_code, option in result.output) == (2, True)


def test_rolling_back_reports_what_answers_now() -> None:
    servicer = Rolling()
    result = run(servicer, "rollback", "digits", "--etag", "e")
    assert "answers as version 1; the rollout of version 2 is rolled back." in result.stdout
    assert [(one.name, one.etag) for one in servicer.requests] == [("deployments/digits", "e")]
