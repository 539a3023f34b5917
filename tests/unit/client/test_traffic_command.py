"""`millrace deployments traffic`, on the inference service's own servicer and a real store."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from inference_service.deploy.deployments import Deployments
from inference_service.domain.deployment import Deployment, HeaderRoute, Kept, Shadow, VersionPolicy
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.deployment_server import commanded, weighed

NAME = "deployments/digits"
ROUTE = HeaderRoute("x-canary", "yes", "2")
KEEP_ALL = VersionPolicy(Kept.ALL)


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    """With `digits`, whose three versions all stay loaded; the first has the traffic."""
    made = open_store(file_store)
    one = weighed("digits", 100, 0, 0, routes=(ROUTE,), shadow=Shadow("3", 10))
    Deployments(made).create(keeping(one, KEEP_ALL))
    return made


def keeping(one: Deployment, policy: VersionPolicy) -> Deployment:
    return replace(one, spec=replace(one.spec, version_policy=policy))


def steered(store: ObjectStore, *options: str) -> Deployment:
    """The deployment after the command, which is done."""
    result = commanded(store, "deployments", "traffic", "digits", *options)
    assert result.exit_code == 0, result.output
    return Deployments(store).get(NAME)


def shares(one: Deployment) -> dict[str, int]:
    return {version.number: version.weight for version in one.versions}


def test_weights_share_the_traffic_out_and_leave_the_rest_as_it_is(store: ObjectStore) -> None:
    after = steered(store, "--weight", "1=95", "--weight", "2=5")
    assert shares(after) == {"1": 95, "2": 5, "3": 0}
    assert (after.routes, after.shadow, after.spec.version_policy) == ((ROUTE,), Shadow("3", 10), KEEP_ALL)


def test_routes_take_the_place_of_those_before(store: ObjectStore) -> None:
    after = steered(store, "--route", "x-canary=a:b=c:3", "--route", "x-user=me:2")
    assert after.routes == (HeaderRoute("x-canary", "a:b=c", "3"), HeaderRoute("x-user", "me", "2"))
    assert shares(after) == {"1": 100, "2": 0, "3": 0}
    assert steered(store, "--no-routes").routes == ()


def test_a_shadow_is_set_and_taken_away(store: ObjectStore) -> None:
    assert steered(store, "--shadow", "2=50").shadow == Shadow("2", 50)
    assert steered(store, "--no-shadow").shadow is None


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--keep", "2"), VersionPolicy(Kept.LATEST, count=2)),
        (("--keep", "all"), KEEP_ALL),
        (("--keep-version", "1", "--keep-version", "3"), VersionPolicy(Kept.NAMED, named=("1", "3"))),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_a_policy_says_which_versions_stay_loaded(
    store: ObjectStore, options: tuple[str, ...], wanted: VersionPolicy
) -> None:
    assert steered(store, *options).spec.version_policy == wanted


def test_versions_that_the_policy_does_not_keep_are_retired(store: ObjectStore) -> None:
    after = steered(store, "--keep", "1")
    assert [version.number for version in after.versions if version.retired_at is None] == ["1", "3"]


def test_the_command_prints_how_the_traffic_is_divided(store: ObjectStore) -> None:
    result = commanded(store, "deployments", "traffic", "digits", "--weight", "2=1", "--no-routes")
    assert ["2", "ready", "100", "%", "2"] in [line.split()[:5] for line in result.stdout.splitlines()]
    assert "x-canary" not in result.stdout
    result = commanded(store, "deployments", "traffic", "digits", "--weight", "1=1", "--json")
    assert json.loads(result.stdout)["traffic"]["weights"] == {"1": 1}


def test_a_version_that_is_not_loaded_is_refused_with_its_field_and_what_is(store: ObjectStore) -> None:
    result = commanded(store, "deployments", "traffic", "digits", "--weight", "7=5")
    assert result.exit_code == 4
    assert "deployment.traffic.weights[7]" in result.stderr
    assert "use a version that is loaded: 1, 2, 3" in result.stderr


def test_only_what_still_has_the_etag_is_changed(store: ObjectStore) -> None:
    etag = Deployments(store).get(NAME).etag
    assert shares(steered(store, "--weight", "2=1", "--etag", etag))["2"] == 1
    stale = commanded(store, "deployments", "traffic", "digits", "--weight", "3=1", "--etag", etag, "--json")
    assert (stale.exit_code, json.loads(stale.stdout)["error"]["status"]) == (4, "ABORTED")
    assert shares(Deployments(store).get(NAME))["2"] == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "name what to change"),
        (("--weight", "1"), "use VERSION=WEIGHT, e.g. 2=5"),
        (("--weight", "1=many"), "use VERSION=WEIGHT, e.g. 2=5"),
        (("--weight", "1=99999999999"), "use VERSION=WEIGHT, e.g. 2=5"),
        (("--weight", "1=5", "--weight", "1=6"), "version 1 has several weights"),
        (("--route", "x-canary=yes"), "use HEADER=VALUE:VERSION, e.g. x-canary=yes:2"),
        (("--route", "x-canary:2"), "use HEADER=VALUE:VERSION, e.g. x-canary=yes:2"),
        (("--route", "a=b:2", "--no-routes"), "--route or --no-routes"),
        (("--shadow", "2"), "use VERSION=PERCENT, e.g. 2=10"),
        (("--shadow", "2=10", "--no-shadow"), "--shadow or --no-shadow"),
        (("--keep", "some"), "use a number from 1 on, or all"),
        (("--keep", "0"), "use a number from 1 on, or all"),
        (("--keep", "2", "--keep-version", "1"), "--keep or --keep-version"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_options_that_say_nothing_plain_are_wrong_usage(
    store: ObjectStore, options: tuple[str, ...], expected: str
) -> None:
    before = Deployments(store).get(NAME)
    result = commanded(store, "deployments", "traffic", "digits", *options)
    assert (result.exit_code, expected in " ".join(result.stderr.split())) == (2, True), result.stderr
    assert Deployments(store).get(NAME) == before
