"""What exporters wrote, read back by the tools that it is for. Each is an extra."""

from __future__ import annotations

import importlib
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from click.testing import CliRunner, Result

from millrace.train.v1 import train_service_pb2 as pb
from millrace.train.v1 import train_service_pb2_grpc
from millrace_client.cli import millrace
from millrace_client.export import TARGETS, ExporterMissing, export_run, parameters
from tests.support.grpc_answers import serving
from tests.support.recorded_servicer import STEPS, Job, RecordedRun, job, points

LOSSES = {point.step: pytest.approx(point.values["loss"]) for point in points()}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B gives its own process half a minute to start, too little on a busy machine."""
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "300")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "300")


def export(target: str, folder: Path) -> Result:
    def register(server: grpc.Server) -> None:
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(RecordedRun(), server)

    with serving(register) as address:
        command = ("train", "export", "j", str(folder), "--to", target, "--train-address", address, "--json")
        result = CliRunner().invoke(millrace, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["points"] == STEPS
    return result


def of_mlflow(folder: Path) -> tuple[Any, Any]:
    """A client of the file store there, and the one run in it."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    experiment = client.get_experiment_by_name("millrace")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def level_db_records(data: bytes) -> list[bytes]:
    """The records of a wandb file: a log of LevelDB, of blocks of 32 KiB, behind 7 bytes of its own."""
    records, at, begun = [], 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        piece = data[at + 7 : at + 7 + length]
        begun = piece if kind in (1, 2) else begun + piece
        if kind in (1, 4):
            records.append(begun)
        at += 7 + length
    return records


def test_tensorboard_reads_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export("tensorboard", tmp_path)
    export("tensorboard", tmp_path)  # replaces the first

    found = EventAccumulator(str(tmp_path / "j"), size_guidance={"scalars": 0})
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "learning_rate", "validation_accuracy"}
    assert {one.step: one.value for one in found.Scalars("loss")} == LOSSES
    assert [one.step for one in found.Scalars("validation_accuracy")] == [10, 20, 30]
    assert found.Scalars("loss")[0].wall_time == points()[0].time.seconds
    assert b"optimizer.learning_rate" in found.Tensors("spec")[0].tensor_proto.string_val[0]


def test_mlflow_reads_every_step(tmp_path: Path) -> None:
    export("mlflow", tmp_path)

    client, run = of_mlflow(tmp_path)
    assert (run.info.run_name, run.info.status) == ("j", "FINISHED")
    assert run.data.params["optimizer.learning_rate"] == "0.002"
    assert run.data.tags["millrace.training_job"] == "trainingJobs/j"
    assert {one.step: one.value for one in client.get_metric_history(run.info.run_id, "loss")} == LOSSES


def of_wandb(folder: Path) -> list[Any]:
    """The records of the one run there."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [messages.Record.FromString(data) for data in level_db_records(path.read_bytes())]


def test_wandb_reads_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    export("wandb", tmp_path)

    losses = {}
    for record in of_wandb(tmp_path):
        if record.WhichOneof("record_type") == "history":
            items = {"".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item}
            losses[record.history.step.num] = items["loss"]
    assert losses == LOSSES


@pytest.mark.parametrize("target", TARGETS)
def test_values_that_are_not_finite_are_exported_too(target: str, tmp_path: Path) -> None:
    odd = [pb.MetricPoint(step=1, values={"loss": math.nan}), pb.MetricPoint(step=2, values={"loss": math.inf})]
    assert export_run(target, job(), odd, tmp_path).points == 2


@pytest.mark.parametrize("target", TARGETS)
def test_an_extra_that_is_not_installed_is_named_with_its_remedy(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == target]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, target, None)
    with pytest.raises(ExporterMissing, match=target):
        export_run(target, job(), [], tmp_path)


def test_parameters_are_flat() -> None:
    found = parameters(job())
    assert found["epochs"] == "3"
    assert found["transform.steps.0.column"] == "image"
    assert all(isinstance(value, str) for value in found.values())


def test_no_exporter_is_imported_before_it_is_needed() -> None:
    code = "import millrace_client.cli.train, millrace_client.export, sys; print(*sys.modules)"
    loaded = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout.split()
    assert set(TARGETS).isdisjoint(loaded)


def test_mlflow_has_the_parameters_of_columns_whatever_they_are_called(tmp_path: Path) -> None:
    made = job()
    renamed = {"Age (years)": "a", "Age [years]": "b", "Age _years_": "c", "km/h": "d", "km/h/..": "e", "ü" * 300: "f"}
    made.spec.transform.steps.add().rename.columns.update(renamed)

    export_run("mlflow", made, [], tmp_path)

    _, run = of_mlflow(tmp_path)
    prefix = "transform.steps.1.rename.columns."
    found = {name.removeprefix(prefix): one for name, one in run.data.params.items() if name.startswith(prefix)}
    assert sorted(found.values()) == ["a", "b", "c", "d", "e", "f"]
    assert found["Age _years_"] == "c", "a name that is good stays"
    assert {found["Age _years__2"], found["Age _years__3"]} == {"a", "b"}
    assert found["km_h"] == "d"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (Job.STATE_PENDING, "SCHEDULED"),
        (Job.STATE_RUNNING, "RUNNING"),
        (Job.STATE_RECOVERING, "RUNNING"),
        (Job.STATE_SUSPENDED, "SCHEDULED"),
        (Job.STATE_SUCCEEDED, "FINISHED"),
        (Job.STATE_FAILED, "FAILED"),
        (Job.STATE_CANCELLED, "KILLED"),
    ],
    ids=lambda value: value if isinstance(value, str) else Job.State.Name(value),
)
def test_mlflow_says_of_a_run_what_became_of_it(state: Job.State, status: str, tmp_path: Path) -> None:
    made = job(state)
    export_run("mlflow", made, points(), tmp_path)

    _, run = of_mlflow(tmp_path)
    ended = made.update_time.ToMilliseconds() if status in ("FINISHED", "FAILED", "KILLED") else None
    assert (run.info.status, run.info.end_time) == (status, ended)


@pytest.mark.parametrize(
    ("state", "exit_code", "tag"),
    [
        (Job.STATE_RUNNING, 0, "running"),
        (Job.STATE_SUSPENDED, 0, "suspended"),
        (Job.STATE_SUCCEEDED, 0, "succeeded"),
        (Job.STATE_FAILED, 1, "failed"),
        (Job.STATE_CANCELLED, 255, "cancelled"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wandb_says_of_a_run_what_became_of_it(state: Job.State, exit_code: int, tag: str, tmp_path: Path) -> None:
    export_run("wandb", job(state), points(), tmp_path)

    records = {record.WhichOneof("record_type"): record for record in of_wandb(tmp_path)}
    assert records["exit"].exit.exit_code == exit_code
    assert list(records["run"].run.tags) == [tag]


def test_a_state_of_a_later_release_is_no_tag(tmp_path: Path) -> None:
    export_run("wandb", job(cast("Job.State", 99)), points(), tmp_path)

    records = {record.WhichOneof("record_type"): record for record in of_wandb(tmp_path)}
    assert list(records["run"].run.tags) == []
