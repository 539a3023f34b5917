"""Between the contract of sweeps and the service's own values."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import sweep_pb2 as sw
from shared.errors import InvalidArgument
from shared.jobs import JobRecord
from tests.support.training import digits_spec
from train_service.domain.sweep import Asha, Domain
from train_service.servicer import sweep_spec_from_proto, sweep_to_proto
from train_service.sweeps.sweeps import SweepView

RATE = "optimizer.learning_rate"


def whole_spec(**parameters: Any) -> sw.SweepSpec:
    """Every field set, none to its default."""
    spec = sw.SweepSpec(
        base=digits_spec(),
        num_samples=3,
        seed=2**64 - 1,
        metric="validation_loss",
        order=res.CheckpointPolicy.ORDER_MAXIMIZE,
        max_concurrent_trials=7,
        asha=sw.Asha(grace_period=2, reduction_factor=3.5, max_t=9),
    )
    domains = {
        "optimizer.schedule": {"grid": {"values": ["SCHEDULE_CONSTANT", "SCHEDULE_COSINE_WITH_WARMUP"]}},
        "precision": {"choice": {"values": ["PRECISION_BFLOAT16"]}},
        "model.kwargs.hidden": {"choice": {"values": [[64, 32], [128.5], {"a": "b"}, False]}},
        RATE: {"log_uniform": {"low": 1e-4, "high": 0.1}},
        "loss.label_smoothing": {"uniform": {"low": 0.25, "high": 0.5}},
        "seed": {"integers": {"low": 3, "high": 2**40}},
        "optimizer.scheduler_kwargs.last_epoch": {"integers": {"low": -3, "high": 2}},
    }
    json_format.ParseDict({"parameters": parameters or domains}, spec)
    return spec


def reported(spec: sw.SweepSpec) -> sw.SweepSpec:
    record = JobRecord(uid="u", name="sweeps/s", spec={}, create_time=1.0, update_time=2.0)
    return sweep_to_proto(SweepView(record, sweep_spec_from_proto(spec, ()), None, "", "")).spec


def test_nothing_of_a_specification_is_lost() -> None:
    spec = whole_spec()
    again = reported(spec)
    for field in ("parameters", "num_samples", "seed", "metric", "order", "max_concurrent_trials", "asha"):
        assert getattr(again, field) == getattr(spec, field), field
    assert again.base.checkpoints.best_metric == "validation_loss"
    assert reported(again) == again


def test_whole_numbers_are_ints_and_names_lose_their_prefix() -> None:
    spec = sweep_spec_from_proto(whole_spec(), ())
    assert spec.parameters["model.kwargs.hidden"].values == ([64, 32], [128.5], {"a": "b"}, False)
    assert [type(one) for one in spec.parameters["model.kwargs.hidden"].values[0]] == [int, int]
    assert spec.parameters["precision"].values == ("BFLOAT16",)
    assert spec.parameters["seed"] == Domain(kind="integers", low=3, high=2**40)


def test_an_omitted_field_has_its_default() -> None:
    spec = sw.SweepSpec(base=digits_spec())
    spec.asha.SetInParent()
    made = sweep_spec_from_proto(spec, ())
    assert (made.num_samples, made.seed, made.max_concurrent_trials) == (1, 0, 4)
    assert made.asha == Asha(grace_period=1, reduction_factor=4.0, max_t=0)
    assert (made.ranking.metric, made.ranking.maximize) == ("validation_accuracy", True)


@pytest.mark.parametrize(("metric", "maximize"), [("validation_loss", False), ("validation_f1", True), ("", False)])
def test_a_metric_orders_itself_unless_the_base_orders_it(metric: str, maximize: bool) -> None:
    policy = res.CheckpointPolicy(best_metric="validation_recall", order=res.CheckpointPolicy.ORDER_MINIMIZE)
    made = sweep_spec_from_proto(sw.SweepSpec(base=digits_spec(checkpoints=policy), metric=metric), ())
    assert (made.ranking.metric, made.ranking.maximize) == (metric or "validation_recall", maximize)


def test_a_sweep_spec_without_base_or_model_or_with_nan_in_a_grid_is_refused_with_its_field() -> None:
    no_base = sw.SweepSpec()
    no_model = sw.SweepSpec(base=res.TrainingSpec(epochs=1))
    no_number = sw.SweepSpec(base=digits_spec())
    no_number.parameters[RATE].grid.values.add().number_value = float("nan")
    for spec, field in (
        (no_base, "spec.base"),
        (no_model, "spec.base.model"),
        (no_number, f"spec.parameters[{RATE}].grid"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            sweep_spec_from_proto(spec, ())
        assert [one for one, _ in refused.value.fields] == [field]
        assert field in refused.value.message
