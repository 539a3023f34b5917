from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from inference_service.domain.deployment import Autoscaling, Deployment, Scale, Spec, check_spec
from shared.errors import InvalidArgument
from tests.unit.inference_service.domain.test_deployment import UNSET, deployment

GIVEN: dict[str, Any] = {"min_replicas": 2, "max_replicas": 5, "rows_per_replica": 9}


def spec(**changes: Any) -> Spec:
    return check_spec(checkpoint="trainingJobs/j", **{**UNSET, **changes})


def test_zeros_mean_one_replica_at_least_and_a_full_batch_for_each() -> None:
    made = spec(autoscaling=Autoscaling(min_replicas=0, max_replicas=3, rows_per_replica=0), max_batch_size=7)
    assert made.autoscaling is not None
    assert (made.autoscaling.min_replicas, made.autoscaling.rows_per_replica) == (1, 7)
    assert made.num_replicas == 1


def test_a_version_begins_with_as_many_as_it_is_to_take_over_within_the_bounds() -> None:
    made = spec(autoscaling=Autoscaling(**GIVEN))
    assert [made.scale(replicas).initial for replicas in (0, 3, 9)] == [2, 3, 5]
    assert spec(num_replicas=4).scale(9) == Scale(initial=4, cpus=1)


def test_a_replica_takes_its_threads_or_what_is_said() -> None:
    assert spec(threads_per_replica=3).scale().cpus == 3
    packed = spec(threads_per_replica=3, cpus_per_replica=0.25, gpus_per_replica=0.5).scale()
    assert (packed.cpus, packed.gpus) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"autoscaling": Autoscaling(**{**GIVEN, "min_replicas": -1})}, ["autoscaling.min_replicas"]),
        ({"autoscaling": Autoscaling(**{**GIVEN, "max_replicas": 1})}, ["autoscaling.max_replicas"]),
        ({"autoscaling": Autoscaling(**{**GIVEN, "max_replicas": 0})}, ["autoscaling.max_replicas"]),
        ({"autoscaling": Autoscaling(**{**GIVEN, "max_replicas": 65})}, ["autoscaling.max_replicas"]),
        ({"autoscaling": Autoscaling(**{**GIVEN, "rows_per_replica": -3})}, ["autoscaling.rows_per_replica"]),
        ({"autoscaling": Autoscaling(**GIVEN, up_after_s=-1)}, ["autoscaling.scale_up_after"]),
        ({"autoscaling": Autoscaling(**GIVEN, down_after_s=1e6)}, ["autoscaling.scale_down_after"]),
        ({"autoscaling": Autoscaling(**GIVEN), "num_replicas": 2}, ["num_replicas"]),
        ({"cpus_per_replica": 0.0}, ["cpus_per_replica"]),
        ({"cpus_per_replica": math.nan}, ["cpus_per_replica"]),
        ({"cpus_per_replica": 257.0, "gpus_per_replica": -0.5}, ["cpus_per_replica", "gpus_per_replica"]),
        ({"gpus_per_replica": 1.5}, ["gpus_per_replica"]),
        ({"gpus_per_replica": math.nan}, ["gpus_per_replica"]),
    ],
)
def test_a_value_out_of_range_is_refused_by_field(changes: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        spec(**changes)
    assert [field for field, _ in refused.value.fields] == [f"spec.{field}" for field in fields]


def test_a_record_keeps_it_and_one_of_before_has_a_fixed_number() -> None:
    made = spec(autoscaling=Autoscaling(**GIVEN), cpus_per_replica=0.5)
    assert Spec.from_record(asdict(made)) == made
    record = deployment().as_record()
    for field in ("autoscaling", "cpus_per_replica", "gpus_per_replica"):
        del record["spec"][field]
    before = Deployment.from_record(record).spec
    assert before.scale(7) == Scale(initial=1, cpus=1, gpus=0.0, autoscaling=None)
