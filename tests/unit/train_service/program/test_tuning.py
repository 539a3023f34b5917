"""Ray Tune's Tuner in plain values, and what of it is refused by its line."""

from __future__ import annotations

from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

from shared.errors import InvalidArgument
from train_service.program.tuning import TrialResults, settings_of, space_of

LINE = "cells.py:9"


def test_a_space_is_constants_and_domains_by_their_paths() -> None:
    space = {
        "lr": tune.loguniform(1e-5, 1e-3),
        "dropout": tune.uniform(0, 0.5),
        "batch_size": tune.choice([16, 32]),
        "layers": tune.randint(1, 4),
        "model": {"width": tune.grid_search([8, 16]), "kind": "mlp"},
        "epochs": 3,
    }
    assert space_of({"train_loop_config": space}, LINE) == {
        "constants": {"model": {"kind": "mlp"}, "epochs": 3},
        "domains": {
            "lr": {"kind": "log_uniform", "low": 1e-5, "high": 1e-3},
            "dropout": {"kind": "uniform", "low": 0, "high": 0.5},
            "batch_size": {"kind": "choice", "values": [16, 32]},
            "layers": {"kind": "integers", "low": 1, "high": 3},
            "model.width": {"kind": "grid", "values": [8, 16]},
        },
    }


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ({"train_loop_config": {"lr": tune.quniform(0, 1, 0.1)}}, "Quantized as 'lr'"),
        ({"train_loop_config": {"lr": tune.randn()}}, "Normal as 'lr'"),
        ({"train_loop_config": {"a": {"n": tune.lograndint(1, 9)}}}, "LogUniform as 'a.n'"),
        ({"train_loop_config": {"lr": tune.sample_from(lambda _: 1)}}, "as 'lr'"),
        ({"train_loop_config": {"lr": 1}}, "has nothing to search"),
        ({"scaling_config": 1, "train_loop_config": {"lr": tune.uniform(0, 1)}}, "param_space['scaling_config']"),
    ],
)
def test_a_parameter_that_a_sweep_cannot_draw_is_refused_by_its_line(space: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        space_of(space, LINE)
    assert caught.value.message.startswith(f"{LINE}: ")
    assert text in caught.value.message


def test_a_configuration_is_the_settings_of_a_sweep() -> None:
    scheduler = ASHAScheduler(max_t=30, grace_period=2, reduction_factor=3)
    config = tune.TuneConfig(num_samples=10, metric="loss", mode="min", scheduler=scheduler, max_concurrent_trials=3)
    assert settings_of(config, LINE) == {
        "metric": "loss",
        "maximize": False,
        "num_samples": 10,
        "max_concurrent": 3,
        "asha": {"max_t": 30, "grace_period": 2, "reduction_factor": 3.0},
    }
    by_scheduler = tune.TuneConfig(scheduler=ASHAScheduler(metric="accuracy", mode="max", max_t=5))
    settings = settings_of(by_scheduler, LINE)
    assert (settings["metric"], settings["maximize"], settings["asha"]["grace_period"]) == ("accuracy", True, 1)
    assert settings_of(tune.TuneConfig(metric="loss", mode="max"), LINE)["asha"] is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "Tuner has no tune_config"),
        (tune.TuneConfig(mode="min"), "names no metric and mode"),
        (tune.TuneConfig(metric="loss", mode="min", time_budget_s=3), "TuneConfig(time_budget_s=...)"),
        (tune.TuneConfig(metric="loss", mode="min", scheduler=MedianStoppingRule()), "MedianStoppingRule"),
        (
            tune.TuneConfig(metric="loss", mode="min", scheduler=ASHAScheduler(time_attr="epoch")),
            "time_attr='epoch'",
        ),
        (tune.TuneConfig(metric="loss", mode="min", scheduler=ASHAScheduler(brackets=2)), "brackets"),
    ],
)
def test_a_configuration_that_no_sweep_has_is_refused_by_its_line(config: Any, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        settings_of(config, LINE)
    assert caught.value.message.startswith(f"{LINE}: ")
    assert text in caught.value.message


def test_the_best_trial_is_that_of_the_best_checkpoint() -> None:
    described = {
        "trials": [
            {
                "name": "a",
                "config": {"lr": 1},
                "error": "",
                "checkpoints": [_reported("a1", 3.0), _reported("a2", 2.0)],
            },
            {
                "name": "b",
                "config": {"lr": 2},
                "error": "",
                "checkpoints": [_reported("b1", 1.0), _reported("b2", 4.0)],
            },
            {"name": "c", "config": {"lr": 3}, "error": "it raised", "checkpoints": []},
        ]
    }
    results = TrialResults.from_answer(described, {"metric": "loss", "maximize": False}, lambda name: f"/{name}")
    best: Any = results.get_best_result()
    worst: Any = results.get_best_result("loss", "max")
    assert (best.path, best.config, best.metrics["loss"]) == ("b", {"train_loop_config": {"lr": 2}}, 1.0)
    assert best.checkpoint.path == "/b1"
    assert worst.checkpoint.path == "/b2"
    assert (len(results), results.num_errors, results.num_terminated) == (3, 1, 2)
    assert list(results.get_dataframe()["config/train_loop_config/lr"]) == [1, 2, 3]
    with pytest.raises(RuntimeError, match="'accuracy'"):
        results.get_best_result("accuracy", "max")


def _reported(name: str, loss: float) -> dict[str, Any]:
    return {"name": name, "metrics": {"loss": loss}}


def _trial(name: str, lr: int, checkpoints: list[dict[str, Any]], error: str = "") -> dict[str, Any]:
    return {"name": name, "config": {"lr": lr}, "error": error, "checkpoints": checkpoints}
