"""The rule that Ray Serve's controller scales by, under Serve's own delays and bounds, and what replicas tell it."""

from __future__ import annotations

from typing import Any

import pytest
from ray.cloudpickle import loads
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from inference_service.domain.batch_policy import Load
from inference_service.domain.deployment import Autoscaling
from inference_service.serve.autoscaling import REFUSED, ROWS
from inference_service.serve.ray_serve import _autoscaling
from inference_service.serve.replica import LOAD_TTL_S, LoadAggregator

CONFIG = _autoscaling(
    Autoscaling(min_replicas=1, max_replicas=8, rows_per_replica=32, up_after_s=0, down_after_s=60), 1
)


def decided(*recorded: dict[str, float], now: int = 2, target: int | None = None) -> int:
    """How many replicas Serve goes for, `now` being there, of which some recorded this last."""
    replicas = [ReplicaID(str(place), DeploymentID("model", "app")) for place in range(now)]
    raw: dict[str, Any] = {}
    for replica, metrics in zip(replicas, recorded, strict=False):
        for name, value in metrics.items():
            raw.setdefault(name, {})[replica] = [TimeStampedValue(1.0, 1000.0), TimeStampedValue(2.0, value)]
    context = AutoscalingContext(
        deployment_id=DeploymentID("model", "app"),
        deployment_name="model",
        app_name="app",
        current_num_replicas=now,
        target_num_replicas=target or now,
        running_replicas=replicas,
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={},
        raw_metrics=raw,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=CONFIG,
    )
    # As the controller gets it.
    rule = loads(CONFIG.policy.get_serialized_policy_def() or b"")
    return _apply_autoscaling_config(rule)(context)[0]


@pytest.mark.parametrize(
    ("rows", "wanted"), [(64.0, 2), (65.0, 3), (200.0, 7), (33.0, 2)], ids=["enough", "one more", "many", "kept"]
)
def test_autoscaling_requests_a_replica_for_each_batch_of_rows(rows: float, wanted: int) -> None:
    assert decided({ROWS: rows, REFUSED: 0.0}) == wanted


def test_fewer_only_after_the_delay() -> None:
    assert decided({ROWS: 0.0, REFUSED: 0.0}) == 2


def test_while_rows_are_refused_there_is_one_more_than_there_are_and_no_more_than_one() -> None:
    assert decided({ROWS: 3.0, REFUSED: 1.0}) == 3
    assert decided({ROWS: 3.0, REFUSED: 500.0}, target=3) == 3  # it starts


def test_a_replica_that_missed_a_report_does_not_hide_it() -> None:
    assert decided({ROWS: 0.0, REFUSED: 0.0}, {ROWS: 90.0, REFUSED: 0.0}) == 3


def test_without_any_report_the_number_of_replicas_stays() -> None:
    assert decided() == 2


def test_several_frontends_add_up_and_one_that_is_gone_is_forgotten() -> None:
    now_s = 100.0
    reported = LoadAggregator(lambda: now_s)
    assert reported.in_all() == {}
    reported.add("a", Load(10.0, 1))
    now_s += LOAD_TTL_S / 2
    reported.add("b", Load(5.5, 2))
    assert reported.in_all() == {ROWS: 15.5, REFUSED: 3.0}
    now_s += LOAD_TTL_S / 2 + 1
    assert reported.in_all() == {ROWS: 5.5, REFUSED: 2.0}
    now_s += LOAD_TTL_S
    assert reported.in_all() == {ROWS: 0.0, REFUSED: 0.0}
