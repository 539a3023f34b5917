"""Training with only a version: how the client has the version prepared, and what the command shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.longrunning import operations_pb2
from google.protobuf import json_format
from google.rpc import code_pb2

import millrace_client as mc
from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc
from millrace.data.v1 import resources_pb2 as data_pb2
from millrace.train.v1 import resources_pb2, suggestion_pb2, train_service_pb2_grpc
from millrace_client.cli import millrace
from millrace_client.specs import ratio_split
from millrace_client.steps import standardize
from tests.support.grpc_answers import serving

SOURCE, PREPARED = "datasets/d/versions/v1", "datasets/d/versions/v2"
REQUEST_ID = "3f2b8c1e-0c5e-4b7e-9d2a-5f1c2b3a4d5e"


def choice(field: str) -> suggestion_pb2.Choice:
    return suggestion_pb2.Choice(field=field, value=f"the {field}", reason=f"Why {field}.")


@dataclass
class Both(train_service_pb2_grpc.TrainServiceServicer, data_service_pb2_grpc.DataServiceServicer):
    """A source that has to be prepared first. `gone`: the version that was made then was deleted; `failed`: making it
    had failed; `no_source`: so was the source."""

    gone: bool = False
    failed: bool = False
    no_source: bool = False
    asked: list[suggestion_pb2.SuggestTrainingSpecRequest] = field(default_factory=list)
    transformed: list[data_service_pb2.TransformVersionRequest] = field(default_factory=list)
    created: list[resources_pb2.TrainingSpec] = field(default_factory=list)

    def SuggestTrainingSpec(self, request: Any, _context: Any) -> suggestion_pb2.SuggestTrainingSpecResponse:  # noqa: N802
        self.asked.append(request)
        answer = suggestion_pb2.SuggestTrainingSpecResponse(spec=request.spec)
        answer.spec.dataset_version = request.dataset_version
        if request.dataset_version == SOURCE:
            answer.spec.label_column = "kind"
            answer.choices.append(choice("label_column"))
            answer.preparation.source = SOURCE
            answer.preparation.transform.steps.append(standardize("a"))
            answer.preparation.splits.add(split="train", weight=0.8)
            answer.preparation.splits.add(split="validation", weight=0.2)
            answer.preparation.split_seed = 17
            answer.preparation.fit_split = "train"
            answer.preparation.request_id = REQUEST_ID
        else:
            answer.spec.model.in_channels = 7
            answer.choices.append(choice("model.in_channels"))
        return answer

    def TransformVersion(self, request: Any, context: grpc.ServicerContext) -> operations_pb2.Operation:  # noqa: N802
        self.transformed.append(request)
        first = request.request_id == REQUEST_ID
        if first and (self.gone or self.no_source):
            context.abort(grpc.StatusCode.NOT_FOUND, "it was deleted since")
        operation = operations_pb2.Operation(name="operations/o", done=True)
        if first and self.failed:
            operation.error.code = code_pb2.CANCELLED
            operation.error.message = "cancelled"
        else:
            operation.response.Pack(data_pb2.DatasetVersion(name=PREPARED))
        return operation

    def GetVersion(self, request: Any, context: grpc.ServicerContext) -> data_pb2.DatasetVersion:  # noqa: N802
        if self.no_source:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is none")
        return data_pb2.DatasetVersion(name=request.name)

    def CreateTrainingJob(self, request: Any, _context: Any) -> resources_pb2.TrainingJob:  # noqa: N802
        if not request.validate_only:
            self.created.append(request.spec)
        return resources_pb2.TrainingJob(name="trainingJobs/j", spec=request.spec)


@contextmanager
def client_of(both: Both) -> Iterator[mc.Millrace]:
    with serving(register(both)) as address, mc.connect(data=address, train=address, inference=address) as client:
        yield client


def register(both: Both) -> Any:
    def add(server: Any) -> None:
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(both, server)
        data_service_pb2_grpc.add_DataServiceServicer_to_server(both, server)

    return add


def create(both: Both, *options: str) -> Result:
    with serving(register(both)) as address:
        arguments = ("train", "create", "j", "--dataset-version", SOURCE, *options)
        result = CliRunner().invoke(millrace, (*arguments, "--train-address", address, "--data-address", address))
    assert "Traceback" not in result.output
    return result


def test_a_version_is_prepared_on_request_and_asked_about_again() -> None:
    both = Both()
    with client_of(both) as client:
        made = client.train.suggest_training_spec(SOURCE, prepare=True, epochs=3)
    (request,) = both.transformed
    assert (request.parent, request.source, request.fit_split) == ("datasets/d", SOURCE, "train")
    assert list(request.transform.steps) == [standardize("a")]
    assert request.splits == ratio_split({"train": 0.8, "validation": 0.2}, seed=17)
    assert request.request_id == REQUEST_ID, "so that the same preparation is made once"
    assert [one.dataset_version for one in both.asked] == [SOURCE, PREPARED]
    assert both.asked[1].spec.label_column == "kind", "what was chosen stays"
    assert (made.version, made.preparation, made.spec.epochs, made.spec.model.in_channels) == (PREPARED, None, 3, 7)
    assert [one.field for one in made.choices] == ["label_column", "model.in_channels"]


def test_a_version_alone_gives_a_specification_that_can_be_read_changed_and_trained() -> None:
    both = Both()
    with client_of(both) as client:
        made = client.training_spec(SOURCE, spec=resources_pb2.TrainingSpec(seed=5), epochs=3)
        client.train.create_training_job("j", made)
        made.spec.num_workers = 2
        client.train.create_training_job("j", made.spec)
    assert str(made).splitlines() == [
        "label_column = the label_column: Why label_column.",
        "model.in_channels = the model.in_channels: Why model.in_channels.",
    ]
    first, second = both.created
    assert (first.dataset_version, first.epochs, first.seed, first.model.in_channels) == (PREPARED, 3, 5, 7)
    assert (first.num_workers, second.num_workers) == (0, 2)


def test_a_suggestion_that_needs_a_preparation_is_not_trained() -> None:
    both = Both()
    with client_of(both) as client:
        made = client.train.suggest_training_spec(SOURCE)
        with pytest.raises(ValueError, match=rf"specification for {SOURCE} is incomplete.*Millrace\.training_spec\(\)"):
            client.train.create_training_job("j", made)
    assert both.created == []


def test_nothing_is_made_unless_it_is_asked_for() -> None:
    both = Both()
    with client_of(both) as client:
        made = client.train.suggest_training_spec(SOURCE)
    assert both.transformed == []
    assert made.preparation is not None
    assert made.spec.dataset_version == SOURCE


@pytest.mark.parametrize("both", [Both(gone=True), Both(failed=True)], ids=["deleted", "cancelled"])
def test_a_prepared_version_that_is_not_there_any_more_is_made_anew(both: Both) -> None:
    with client_of(both) as client:
        assert client.train.suggest_training_spec(SOURCE, prepare=True).version == PREPARED
    first, second = (one.request_id for one in both.transformed)
    assert first == REQUEST_ID != second


def test_a_source_that_is_gone_is_reported_and_nothing_is_made_anew() -> None:
    both = Both(no_source=True)
    with client_of(both) as client, pytest.raises(mc.MillraceError):
        client.train.suggest_training_spec(SOURCE, prepare=True)
    assert len(both.transformed) == 1


def test_the_command_prepares_says_what_it_chose_and_trains() -> None:
    both = Both()
    result = create(both, "--epochs", "3")
    assert result.exit_code == 0, result.output
    for reported in ("label_column", "Why model.in_channels.", f"{PREPARED} is prepared", "trainingJobs/j is durable"):
        assert reported in result.stdout
    (spec,) = both.created
    assert (spec.dataset_version, spec.model.in_channels, spec.epochs) == (PREPARED, 7, 3)


def test_a_dry_run_shows_the_preparation_and_makes_nothing() -> None:
    both = Both()
    result = create(both, "--dry-run")
    assert result.exit_code == 0, result.output
    assert '"standardize"' in result.stdout
    assert "Nothing was made." in result.stdout
    document = json.loads(create(both, "--dry-run", "--json").stdout)
    assert document["spec"]["label_column"] == "kind"
    assert document["choices"][0]["reason"] == "Why label_column."
    assert document["preparation"]["request_id"] == REQUEST_ID
    assert (both.transformed, both.created) == ([], [])


def test_a_dry_run_of_a_whole_specification_checks_it_and_makes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json_format.MessageToJson(resources_pb2.TrainingSpec(dataset_version=SOURCE, epochs=2)))
    both = Both()
    with serving(register(both)) as address:
        result = CliRunner().invoke(
            millrace, ("train", "create", "j", "--spec", str(file), "--dry-run", "--train-address", address)
        )
    assert json.loads(result.stdout) == {"dataset_version": SOURCE, "epochs": 2}
    assert (both.asked, both.created) == ([], [])
