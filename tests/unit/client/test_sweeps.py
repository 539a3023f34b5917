"""`millrace train sweep|sweeps` and the client's ways to write and await a sweep, on a real server."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from google.protobuf import json_format
from google.protobuf.struct_pb2 import NULL_VALUE, Value

import millrace_client as mc
from millrace.train.v1 import resources_pb2, sweep_pb2, train_service_pb2_grpc
from millrace_client import train as train_module
from millrace_client.cli import millrace
from tests.support.grpc_answers import serving
from tests.support.sweeping_servicer import RATE, Sweep, Sweeping


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "SWEEP_POLL_INTERVAL_S", 0.01)


def register(servicer: Any) -> Any:
    return lambda server: train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)


def run(servicer: Any, *arguments: str) -> Result:
    with serving(register(servicer)) as address:
        result = CliRunner().invoke(millrace, ("train", *arguments, "--train-address", address))
    assert "Traceback" not in result.output
    return result


def parsed(domain: Any) -> Any:
    return json_format.MessageToDict(domain, preserving_proto_field_name=True)


def test_the_options_become_a_specification() -> None:
    servicer = Sweeping()
    options = "--grid optimizer.name=SGD,AdamW --choice model.kwargs.dropout=0,0.5,true --uniform max_gradient_norm=0:1"
    options += f" --log-uniform {RATE}=1e-4:1e-1 --integers seed=1:9 --samples 3 --sweep-seed 4 --max-concurrent 2"
    options += " --metric validation_loss --asha --grace-period 2 --dataset-version datasets/d/versions/v --epochs 8"

    result = run(servicer, "sweep", "s", *options.split())

    assert result.exit_code == 0, result.output
    assert "sweeps/s is durable and starts, 3 trials" in result.stdout
    (request,) = servicer.requests
    spec = request.spec
    assert (request.sweep_id, spec.base.dataset_version, spec.base.epochs) == ("s", "datasets/d/versions/v", 8)
    assert {path: parsed(domain) for path, domain in spec.parameters.items()} == {
        "optimizer.name": {"grid": {"values": ["SGD", "AdamW"]}},
        "model.kwargs.dropout": {"choice": {"values": [0, 0.5, True]}},
        "max_gradient_norm": {"uniform": {"high": 1}},
        RATE: {"log_uniform": {"low": 1e-4, "high": 1e-1}},
        "seed": {"integers": {"low": "1", "high": "9"}},
    }
    assert (spec.num_samples, spec.seed, spec.max_concurrent_trials, spec.metric) == (3, 4, 2, "validation_loss")
    assert spec.asha == sweep_pb2.Asha(grace_period=2)


def test_a_specification_may_come_from_a_file_as_the_docs_have_it(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "sweeps.md").read_text()
    (tmp_path / "sweep.json").write_text(text.partition("```json\n")[2].partition("```")[0])
    servicer = Sweeping()

    result = run(servicer, "sweep", "s", "--spec", str(tmp_path / "sweep.json"))

    assert result.exit_code == 0, result.output
    spec = servicer.requests[0].spec
    assert (spec.base.epochs, spec.num_samples, spec.asha.grace_period) == (4, 4, 1)
    assert spec.parameters[RATE].log_uniform.high == 0.1


@pytest.mark.parametrize(
    "options",
    [
        "",
        f"--grid {RATE}",
        f"--uniform {RATE}=1",
        f"--uniform {RATE}=a:b",
        "--integers seed=1.5:2",
        f"--log-uniform ={RATE}",
        f"--grid {RATE}=0.1,0.2 --grid {RATE}=0.3",
        f"--grid {RATE}=0.1,0.2 --log-uniform {RATE}=1e-4:1e-1",
        f"--grid {RATE}=0.1,0.2 --grace-period 2",
        f"--grid {RATE}=0.1,0.2 --reduction-factor 3",
    ],
)
def test_an_unreadable_file_is_wrong_usage_and_sends_no_request(options: str) -> None:
    servicer = Sweeping()
    assert run(servicer, "sweep", "s", *options.split(), "--dataset-version", "datasets/d/versions/v").exit_code == 2
    assert servicer.requests == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (f"--choice {RATE}=0.1,0.2 --uniform {RATE}=0:1", f"--uniform: {RATE} has a domain already"),
        (f"--grid {RATE}=0.1,0.2 --grace-period 1", "--grace-period is a parameter of --asha, which is not there"),
        (f"--grid {RATE}=0.1,0.2 --reduction-factor 2", "--reduction-factor is a parameter of --asha"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(options: str, expected: str) -> None:
    result = run(Sweeping(), "sweep", "s", *options.split(), "--dataset-version", "datasets/d/versions/v")
    assert expected in result.stderr


def test_the_trials_are_a_table_with_the_best_one_marked() -> None:
    result = run(Sweeping(), "sweeps", "s")

    rows = [line.split() for line in result.stdout.splitlines() if "s-00" in line and "checkpoints" not in line]
    assert rows == [
        ["s-000", "stopped", "early", "1e-07", "1/3", "0.1000", "0.2000"],
        ["★", "s-001", "succeeded", "0.003", "3/3", "0.9100", "0.9300"],
        ["s-002", "–", "0.5", "0/3"],
    ]
    assert "best trainingJobs/s-001/checkpoints/step-00000009" in result.stdout
    assert json.loads(run(Sweeping(), "sweeps", "s", "--json").stdout)["best_training_job"] == "trainingJobs/s-001"


def test_a_trial_that_was_deleted_is_shown_as_such() -> None:
    shown = run(Sweeping(deleted=2), "sweeps", "s").stdout
    row = next(line.split() for line in shown.splitlines() if "s-002" in line)
    assert row == ["s-002", "deleted", "0.5", "0/3"]


def test_the_error_of_a_failed_sweep_is_shown_below_its_trials() -> None:
    error = "no checkpoint of the 3 trials has the metric 'f2' [bold]"
    assert error in run(Sweeping(error=error), "sweeps", "s").stdout


def test_sweeps_are_listed() -> None:
    line = next(line for line in run(Sweeping(), "sweeps").stdout.splitlines() if "sweeps/s" in line)
    assert line.split()[:4] == ["sweeps/s", "running", "3", RATE]


@pytest.mark.parametrize(("final", "exit_code"), [(Sweep.STATE_SUCCEEDED, 0), (Sweep.STATE_FAILED, 1)])
def test_watching_ends_with_the_sweep_and_reports_whether_it_failed(final: Any, exit_code: int) -> None:
    options = ("--grid", f"{RATE}=0.1,0.2", "--dataset-version", "datasets/d/versions/v", "--watch")
    result = run(Sweeping(final), "sweep", "s", *options)
    assert result.exit_code == exit_code
    assert "★" in result.stdout
    assert ("error: sweeps/s failed" in result.stderr) is (exit_code == 1)


def test_cancel_and_delete_take_the_name_of_a_sweep() -> None:
    servicer = Sweeping()
    assert "cancelling" in run(servicer, "cancel", "sweeps/s").stdout
    assert "deleting" in run(servicer, "delete", "sweeps/s", "--yes", "--etag", "3").stdout
    assert [(type(one).__name__, one.name, one.etag) for one in servicer.requests] == [
        ("CancelSweepRequest", "sweeps/s", ""),
        ("DeleteSweepRequest", "sweeps/s", "3"),
    ]


def test_a_sweep_without_a_checkpoint_cannot_be_deployed_yet() -> None:
    with serving(register(Sweeping(best=""))) as address:
        result = CliRunner().invoke(millrace, ("deploy", "m", "sweeps/s", "--train-address", address))
    assert result.exit_code == 1
    assert "error: sweeps/s has no checkpoint yet" in result.stderr


def test_waiting_survives_a_moment_without_an_answer() -> None:
    with serving(register(Sweeping())) as address, mc.connect(train=address) as client:
        states = [one.state for one in client.train.watch_sweep("sweeps/s")]
    assert states == [Sweep.STATE_RUNNING, Sweep.STATE_SUCCEEDED]


def test_waiting_keeps_no_version_of_the_sweep_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Any]] = []
    most = 0

    class Version:
        pass

    def versions(*_: Any, **__: Any) -> Iterator[Any]:
        nonlocal most
        for _one in range(5):
            version: Any = Version()
            kept.append(weakref.ref(version))
            yield version
            del version
            most = max(most, sum(one() is not None for one in kept))

    monkeypatch.setattr(train_module.TrainClient, "watch_sweep", versions)
    with mc.connect(train="127.0.0.1:1") as client:
        assert client.train.wait_sweep("sweeps/s") is kept[-1]()
    assert most <= 2


def test_a_specification_is_written_in_few_words() -> None:
    base = resources_pb2.TrainingSpec(epochs=2)
    spec = mc.sweep_spec(base, {"seed": mc.integers(1, 3), "loss.name": mc.choice("mse", None)}, asha=mc.asha(max_t=7))
    assert spec.base == base
    assert not spec.HasField("num_samples")
    assert spec.parameters["seed"].integers == sweep_pb2.IntegerRange(low=1, high=3)
    assert list(spec.parameters["loss.name"].choice.values) == [Value(string_value="mse"), Value(null_value=NULL_VALUE)]
    assert spec.asha.max_t == 7
