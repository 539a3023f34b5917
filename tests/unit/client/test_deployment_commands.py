"""`millrace deployments list|show|delete`, on the inference service's own servicer and a real store."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from inference_service.deploy.deployments import Deployments
from inference_service.domain.deployment import Autoscaling, HeaderRoute, Shadow, State
from shared.errors import FailedPrecondition
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.deployment_server import commanded, weighed

NAME = "deployments/digits"
BROKEN = FailedPrecondition("the model does not load", reason="NOT_LOADED").as_record()


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    return open_store(file_store)


def test_a_list_shows_each_with_its_state_and_who_has_the_traffic(store: ObjectStore) -> None:
    deployments = Deployments(store)
    deployments.create(weighed("digits", 95, 5, 0))
    deployments.create(weighed("broken", 100, state=State.FAILED, error=BROKEN))
    result = commanded(store, "deployments", "list")
    assert result.exit_code == 0, result.output
    header, _, first, second = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert header == ["deployment", "state", "traffic", "replicas", "checkpoint"]
    assert first == ["deployments/broken", "failed", "1:", "100", "%", "2", "trainingJobs/j/checkpoints/c"]
    assert second[:-2] == ["deployments/digits", "ready", "1:", "95", "%,", "2:", "5", "%"]
    assert second[-2:] == ["6", "trainingJobs/j/checkpoints/c"]
    document = json.loads(commanded(store, "deployments", "list", "--json").stdout)
    assert [one["name"] for one in document["deployments"]] == ["deployments/broken", NAME]


def test_a_list_of_nothing_says_so(store: ObjectStore) -> None:
    assert commanded(store, "deployments", "list").stdout == "None yet.\n"
    assert json.loads(commanded(store, "deployments", "list", "--json").stdout) == {"deployments": []}


def test_one_is_shown_with_its_versions_and_whatever_steers_its_traffic(store: ObjectStore) -> None:
    routes = (HeaderRoute("x-canary", "[yes]", "2"),)
    Deployments(store).create(weighed("digits", 3, 1, 0, routes=routes, shadow=Shadow("3", 10)))
    result = commanded(store, "deployments", "show", "digits")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert [NAME, "ready"] in lines
    assert ["version", "state", "traffic", "replicas", "checkpoint"] in lines
    assert ["1", "ready", "75", "%", "2", "trainingJobs/j/checkpoints/c"] in lines
    assert ["2", "ready", "25", "%", "2", "trainingJobs/j/checkpoints/c"] in lines
    assert ["3", "ready", "0", "%", "2", "trainingJobs/j/checkpoints/c"] in lines
    assert "requests with x-canary: [yes] go to version 2" in result.stdout
    assert "version 3 gets copies of 10 % of the requests" in result.stdout
    assert "the latest version stays loaded without traffic" in result.stdout
    assert "replicas: 2, threads each: 1; batches of up to 8 rows, which wait up to 1 ms for others" in result.stdout
    assert "etag uid-digi-1" in result.stdout
    document = json.loads(commanded(store, "deployments", "show", NAME, "--json").stdout)
    assert (document["name"], document["traffic"]["weights"]) == (NAME, {"1": 3, "2": 1})


def test_one_that_scales_is_shown_with_its_limits(store: ObjectStore) -> None:
    one = weighed("digits", 100)
    scaling = Autoscaling(min_replicas=1, max_replicas=4, rows_per_replica=8)
    Deployments(store).create(replace(one, spec=replace(one.spec, autoscaling=scaling)))
    assert "replicas: 1 to 4," in commanded(store, "deployments", "show", "digits").stdout


def test_one_that_failed_is_shown_with_why(store: ObjectStore) -> None:
    Deployments(store).create(weighed("digits", 0, state=State.FAILED, error=BROKEN))
    assert "the model does not load" in commanded(store, "deployments", "show", "digits").stdout


def test_showing_what_is_not_there_is_exit_code_3(store: ObjectStore) -> None:
    result = commanded(store, "deployments", "show", "nobody", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["status"] == "NOT_FOUND"


def test_deleting_asks_first_and_takes_it_out_of_service(store: ObjectStore) -> None:
    deployments = Deployments(store)
    deployments.create(weighed("digits", 100))
    refused = commanded(store, "deployments", "delete", "digits", answer="n\n")
    assert (refused.exit_code, f"Delete {NAME}?" in refused.stdout) == (1, True)
    assert deployments.get(NAME).state is State.READY
    result = commanded(store, "deployments", "delete", "digits", answer="y\n")
    assert (result.exit_code, f"{NAME} is being deleted" in result.stdout) == (0, True)
    assert deployments.get(NAME).state is State.DELETING


def test_only_what_still_has_the_etag_is_deleted(store: ObjectStore) -> None:
    deployments = Deployments(store)
    etag = deployments.create(weighed("digits", 100)).etag
    stale = commanded(store, "deployments", "delete", "digits", "--etag", "stale", "--json")
    assert (stale.exit_code, json.loads(stale.stdout)["error"]["status"]) == (4, "ABORTED")
    assert deployments.get(NAME).state is State.READY
    result = commanded(store, "deployments", "delete", NAME, "--etag", etag, "--json")
    assert json.loads(result.stdout) == {"deleting": NAME}
    assert deployments.get(NAME).state is State.DELETING
