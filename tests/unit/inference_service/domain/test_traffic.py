"""Traffic by hand: weights, routes by header, a shadow, and which versions stay loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inference_service.domain.deployment import (
    Deployment,
    HeaderRoute,
    Kept,
    Shadow,
    State,
    TrafficChange,
    VersionPolicy,
    check_change,
    headers_of,
)
from inference_service.domain.rollout import RolloutStep
from inference_service.domain.rollout_transitions import with_change, with_next_step, with_rollback
from inference_service.serve.models import choose_version
from shared.errors import Conflict, FailedPrecondition, InvalidArgument
from tests.unit.inference_service.domain.test_deployment import SIGNATURE, deployment, version
from tests.unit.inference_service.domain.test_rollout_transitions import NAME, loaded, retired, rolling, sure, weights

ROUTE = HeaderRoute("x-canary", "yes", "2")


def two(policy: VersionPolicy | None = None) -> Deployment:
    """Version 1 has all traffic, and 2 is loaded beside it."""
    ready = deployment(State.READY, version("1", signature=SIGNATURE), version("2", weight=0, signature=SIGNATURE))
    kept = policy or VersionPolicy(Kept.ALL)
    return replace(ready, numbers_used=2, spec=replace(ready.spec, version_policy=kept))


def changed(before: Deployment, **change: Any) -> Deployment:
    return with_change(before, NAME, check_change(TrafficChange(**change)), "", 5.0)


def test_weights_are_taken_as_they_are_and_those_not_named_get_none() -> None:
    after = changed(two(), weights={"2": 9})
    assert (weights(after), after.generation) == ({"1": 0, "2": 9}, 2)
    assert weights(changed(after, weights={"1": 3, "2": 1})) == {"1": 3, "2": 1}


def test_a_version_that_loses_its_traffic_stays_only_if_the_policy_keeps_it() -> None:
    assert retired(changed(two(VersionPolicy()), weights={"2": 1})) == ["1"]
    assert retired(changed(two(), policy=VersionPolicy())) == []  # 1 has traffic, 2 is the newest
    assert retired(changed(two(), policy=VersionPolicy(Kept.NAMED, named=("1",)))) == ["2"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights": {"3": 1}}, "deployment.traffic.weights[3]"),
        ({"weights": {"1": 0}}, "deployment.traffic.weights"),
        ({"weights": {"1": 1001}}, "deployment.traffic.weights[1]"),
        ({"weights": {"1": 5, "2": -1}}, "deployment.traffic.weights[2]"),
        ({"routes": (replace(ROUTE, version="3"),)}, "deployment.traffic.routes[0].version"),
        ({"routes": (ROUTE, replace(ROUTE, header="X-Canary"))}, "deployment.traffic.routes[1].header"),
        ({"routes": (replace(ROUTE, header="x-bin"),)}, "deployment.traffic.routes[0].header"),
        ({"routes": (replace(ROUTE, value=""),)}, "deployment.traffic.routes[0].value"),
        ({"routes": (ROUTE,) * 21}, "deployment.traffic.routes"),
        ({"shadow": Shadow("3", 5)}, "deployment.traffic.shadow.version"),
        ({"shadow": Shadow("2", 101)}, "deployment.traffic.shadow.percent"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        changed(two(), **change)
    assert [one for one, _ in refused.value.fields] == [field]


def test_a_rollout_has_the_weights_while_it_is_under_way_and_nothing_else() -> None:
    one = loaded(rolling())
    with pytest.raises(FailedPrecondition, match="rolling out"):
        changed(one, weights={"1": 1})
    after = changed(one, routes=(ROUTE,), shadow=Shadow("2", 10))
    assert (after.routes, after.shadow, weights(after)) == ((ROUTE,), Shadow("2", 10), weights(one))
    assert Deployment.from_record(after.as_record()) == after
    back = sure(with_rollback(after, NAME, "", 6.0))  # they go with their version
    assert (back.routes, back.shadow) == ((), None)


def test_a_change_is_for_what_is_ready_and_as_it_was_seen() -> None:
    with pytest.raises(FailedPrecondition, match="LOADING"):
        changed(deployment(State.LOADING), routes=())
    with pytest.raises(Conflict):
        with_change(two(), NAME, TrafficChange(routes=()), "old", 5.0)


def test_a_shadow_of_no_share_is_none() -> None:
    assert changed(changed(two(), shadow=Shadow("2", 10)), shadow=Shadow("", 0)).shadow is None


@pytest.mark.parametrize(
    ("wanted", "headers", "number"),
    [
        ("", {"x-canary": "yes"}, "2"),
        ("", {"x-canary": "yes please"}, "1"),
        ("", {}, "1"),
        ("1", {"x-canary": "yes"}, "1"),
    ],
)
def test_a_header_leads_to_its_version_unless_the_request_names_one(
    wanted: str, headers: dict[str, str], number: str
) -> None:
    one = changed(two(), routes=(ROUTE,))
    assert choose_version(one, wanted, 0.5, headers=lambda: headers).number == number


def test_a_route_to_a_version_that_cannot_answer_now_is_passed_over() -> None:
    one = changed(two(), routes=(ROUTE,))
    chosen = choose_version(one, "", 0.5, lambda version: version.number == "1", lambda: {"x-canary": "yes"})
    assert chosen.number == "1"


def test_while_the_new_version_cannot_answer_those_do_that_had_the_traffic_before() -> None:
    rolled = sure(loaded(rolling(steps=(RolloutStep(100, 60.0),))))
    assert weights(rolled) == {"1": 0, "2": 100}
    assert choose_version(rolled, "", 0.5).number == "2"
    assert choose_version(rolled, "", 0.5, lambda version: version.number == "1").number == "1"
    assert choose_version(rolled, "", 0.5, lambda _: False).number == "2"
    assert rolled.rollout is not None
    done = sure(with_next_step(rolled, rolled.rollout.uid, 0, 9.0))
    assert choose_version(done, "", 0.5, lambda version: version.number == "1").number == "2"


def test_headers_are_those_of_the_call_and_over_them_those_of_the_parameter() -> None:
    metadata: list[tuple[str, str | bytes]] = [("x-canary", "no"), ("x-trace-bin", b"\0"), ("user-agent", "g")]
    assert headers_of(metadata, {}) == {"x-canary": "no", "user-agent": "g"}
    own = {"headers": '{"X-Canary": "yes"}'}
    assert headers_of(metadata, own) == {"x-canary": "yes", "user-agent": "g"}


@pytest.mark.parametrize("given", ["", "x-canary: yes", "[]", '{"x": 1}', "[" * 200_000, 7, True])
def test_a_parameter_that_holds_no_headers_is_refused(given: object) -> None:
    with pytest.raises(InvalidArgument, match="JSON object"):
        headers_of([], {"headers": given})
