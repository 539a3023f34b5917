"""`millrace data verify|delete|transform|import`: what they ask the server for, and how they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2

from millrace.common.v1 import lineage_pb2
from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc, quality_pb2, resources_pb2
from millrace.inference.v1 import deployment_service_pb2, deployment_service_pb2_grpc
from millrace_client import checks, specs
from millrace_client.calls import Operation
from millrace_client.cli import millrace
from millrace_client.cli.versions import FORMS
from tests.support.grpc_answers import serving

VERSION = "datasets/d/versions/v1"


# Of the operation that each request starts.
METADATA: dict[type, Any] = {
    data_service_pb2.ImportVersionRequest: data_service_pb2.ImportVersionMetadata,
    data_service_pb2.TransformVersionRequest: data_service_pb2.TransformVersionMetadata,
    data_service_pb2.PredictVersionRequest: data_service_pb2.PredictVersionMetadata,
}


class Recording(data_service_pb2_grpc.DataServiceServicer):
    """Answers everything at once and keeps what it was asked."""

    def __init__(self, *damages: data_service_pb2.Damage) -> None:
        self.asked: list[Any] = []
        self._damages = damages

    def CreateDataset(self, request: Any, _context: Any) -> resources_pb2.Dataset:  # noqa: N802
        return resources_pb2.Dataset(name=f"datasets/{request.dataset_id}")

    def ImportVersion(self, request: Any, _context: Any) -> operations_pb2.Operation:  # noqa: N802
        return self._done(request)

    def TransformVersion(self, request: Any, _context: Any) -> operations_pb2.Operation:  # noqa: N802
        return self._done(request)

    def PredictVersion(self, request: Any, _context: Any) -> operations_pb2.Operation:  # noqa: N802
        return self._done(request)

    def DeleteVersion(self, request: Any, _context: Any) -> empty_pb2.Empty:  # noqa: N802
        self.asked.append(request)
        return empty_pb2.Empty()

    def DeleteDataset(self, request: Any, _context: Any) -> empty_pb2.Empty:  # noqa: N802
        self.asked.append(request)
        return empty_pb2.Empty()

    def VerifyVersion(self, _request: Any, _context: Any) -> Iterator[Any]:  # noqa: N802
        yield data_service_pb2.VerifyVersionResponse(files_total=2)
        yield data_service_pb2.VerifyVersionResponse(
            files_total=2, files_checked=2, bytes_checked=2_000_000, rows_checked=700, damages=self._damages
        )

    def _done(self, request: Any) -> operations_pb2.Operation:
        self.asked.append(request)
        operation = operations_pb2.Operation(name="operations/o", done=True)
        operation.metadata.Pack(METADATA[type(request)](version=VERSION))
        operation.response.Pack(resources_pb2.DatasetVersion(name=VERSION))
        return operation


def run(servicer: Recording, *arguments: str, **options: Any) -> Result:
    def register(server: grpc.Server) -> None:
        data_service_pb2_grpc.add_DataServiceServicer_to_server(servicer, server)

    with serving(register) as address:
        result = CliRunner().invoke(millrace, ["data", *arguments, "--data-address", address], **options)
    assert "Traceback" not in result.output
    return result


def test_a_good_version_is_said_to_be_good() -> None:
    result = run(Recording(), "verify", VERSION)
    assert result.exit_code == 0, result.output
    assert "as it was committed: 2 files, 2.0 MB, 700 rows" in result.stdout


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_damage_is_exit_code_1_and_reported_whole(json_flag: tuple[str, ...]) -> None:
    damages = [data_service_pb2.Damage(path=f"{name}.parquet", description="is gone") for name in "ab"]
    result = run(Recording(*damages), "verify", VERSION, *json_flag)
    assert result.exit_code == 1
    if json_flag:
        document = json.loads(result.stdout)
        assert [one["path"] for one in document["damages"]] == ["a.parquet", "b.parquet"]
    else:
        assert "a.parquet: is gone\nb.parquet: is gone" in result.stdout


def test_nothing_is_deleted_without_a_yes() -> None:
    servicer = Recording()
    assert run(servicer, "delete", VERSION, input="n\n").exit_code == 1
    assert servicer.asked == []
    assert run(servicer, "delete", VERSION, input="y\n").exit_code == 0
    assert run(servicer, "delete", "d", "--yes", "--etag", "3").exit_code == 0
    assert servicer.asked == [
        data_service_pb2.DeleteVersionRequest(name=VERSION),
        data_service_pb2.DeleteDatasetRequest(name="datasets/d", etag="3"),
    ]


def test_a_transform_is_read_from_a_file_and_goes_into_the_sources_dataset(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text('{"steps": [{"column": "age", "standardize": {}}]}')
    servicer = Recording()
    split = ("--split-hash", "id,day", "--share", "train=9", "--share", "test=1", "--seed", "7")
    result = run(servicer, "transform", VERSION, "--steps", str(file), *split)
    assert result.exit_code == 0, result.output
    (request,) = servicer.asked
    assert (request.parent, request.source) == ("datasets/d", VERSION)
    assert request.transform.steps[0].WhichOneof("op") == "standardize"
    assert list(request.splits.hash.key_columns) == ["id", "day"]
    assert request.splits.hash.seed == 7
    assert [(share.split, share.weight) for share in request.splits.hash.shares] == [("train", 9), ("test", 1)]


class Serving(deployment_service_pb2_grpc.DeploymentServiceServicer):
    """Has `deployments/digits`, with two versions."""

    def GetDeployment(self, request: Any, _context: Any) -> deployment_service_pb2.Deployment:  # noqa: N802
        versions = [
            deployment_service_pb2.ModelVersion(
                number=number,
                weight=weight,
                lineage=lineage_pb2.Lineage(
                    checkpoint=f"trainingJobs/j/checkpoints/c{number}", checkpoint_sha256=number
                ),
            )
            for number, weight in (("1", 90), ("2", 10))
        ]
        return deployment_service_pb2.Deployment(name=request.name, versions=versions)


def test_a_prediction_is_asked_for_with_what_its_options_say() -> None:
    servicer = Recording()
    options = ("--to", "scored", "--split", "test", "--column", "id", "--column", "label", "--output", "score")
    more = ("--prefix", "m_", "--quarantine", "--max-quarantined", "5", "--batch-size", "32", "--workers", "3")
    result = run(
        servicer, "predict", VERSION, "--checkpoint", "digits", *options, *more, "--cpus", "2", "--gpus", "0.5"
    )
    assert result.exit_code == 0, result.output
    (request,) = servicer.asked
    request.request_id = ""
    assert request == data_service_pb2.PredictVersionRequest(
        parent="datasets/scored",
        source=VERSION,
        split="test",
        checkpoint="trainingJobs/digits",
        columns=["id", "label"],
        outputs=["score"],
        column_prefix="m_",
        bad_rows=data_service_pb2.BadRows(action=data_service_pb2.BadRows.ACTION_QUARANTINE, max_rows=5),
        workers=data_service_pb2.PredictionWorkers(max_workers=3, batch_size=32, cpus=2, gpus=0.5),
    )


@pytest.mark.parametrize(("named", "number"), [("digits", "1"), ("deployments/digits@2", "2")])
def test_a_deployment_stands_for_the_checkpoint_that_it_serves(named: str, number: str) -> None:
    servicer = Recording()

    def register(server: grpc.Server) -> None:
        deployment_service_pb2_grpc.add_DeploymentServiceServicer_to_server(Serving(), server)

    with serving(register) as address:
        result = run(servicer, "predict", VERSION, "--deployment", named, "--inference-address", address)
    assert result.exit_code == 0, result.output
    (request,) = servicer.asked
    assert (request.checkpoint, request.checkpoint_sha256) == (f"trainingJobs/j/checkpoints/c{number}", number)
    assert request.parent == "datasets/d"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "--checkpoint or --deployment"),
        (("--checkpoint", "j", "--deployment", "d"), "--checkpoint or --deployment"),
        (("--checkpoint", "j", "--max-quarantined", "3"), "needs --quarantine"),
    ],
)
def test_options_of_a_prediction_that_do_not_go_together_are_refused(options: tuple[str, ...], expected: str) -> None:
    servicer = Recording()
    result = run(servicer, "predict", VERSION, *options)
    assert result.exit_code == 2
    assert expected in result.output
    assert servicer.asked == []


def test_the_options_of_an_import_become_its_sources_in_their_order() -> None:
    servicer = Recording()
    result = run(
        servicer,
        *("import", "d", "--csv", "train=/a.csv", "--csv", "train=/b.csv", "--images", "test=/photos"),
        *("--quarantine", "--append-to", VERSION, "--type", "zip=string", "--nan-as-null"),
    )
    assert result.exit_code == 0, result.output
    (request,) = servicer.asked
    assert [source.csv.uri for source in request.sources[:2]] == ["file:///a.csv", "file:///b.csv"]
    assert request.sources[2].image_folder.uri == "file:///photos/"
    assert request.bad_rows.action == data_service_pb2.BadRows.ACTION_QUARANTINE
    assert request.base == data_service_pb2.Base(version=VERSION, mode=data_service_pb2.Base.MODE_APPEND)
    assert request.column_types[0] == data_service_pb2.ColumnType(column="zip", arrow_type="string")
    assert request.partitioning == data_service_pb2.ImportVersionRequest.PARTITIONING_HIVE
    assert request.nan_as_null


def test_an_import_may_take_no_columns_from_folders() -> None:
    servicer = Recording()
    result = run(servicer, "import", "d", "--parquet", "train=/a/", "--partitioning", "none")
    assert result.exit_code == 0, result.output
    (request,) = servicer.asked
    assert request.partitioning == data_service_pb2.ImportVersionRequest.PARTITIONING_NONE


def test_an_import_says_how_its_csv_files_are_written_and_what_holds_of_its_rows() -> None:
    servicer = Recording()
    result = run(
        servicer,
        *("import", "d", "--csv", "train=/a.csv", "--csv", "test=/b.csv", "--json-lines", "test=/c.jsonl"),
        *("--csv-delimiter", "tab", "--csv-columns", "id,name", "--csv-null", "-", "--csv-null", "none"),
        *("--csv-encoding", "latin-1", "--quarantine", "--max-quarantined", "5"),
        *("--quarantine-check", "not_null:id", "--check", "row_count:1000:"),
    )
    assert result.exit_code == 0, result.output
    (request,) = servicer.asked
    for source, uri in zip(request.sources, ("file:///a.csv", "file:///b.csv"), strict=False):
        assert source.csv == data_service_pb2.CsvSource(
            uri=uri,
            delimiter="\t",
            column_names=["id", "name"],
            null_values=["-", "none"],
            encoding="latin-1",
        )
    assert [source.WhichOneof("format") for source in request.sources] == ["csv", "csv", "json_lines"]
    assert request.bad_rows == data_service_pb2.BadRows(action=data_service_pb2.BadRows.ACTION_QUARANTINE, max_rows=5)
    assert list(request.checks) == [checks.row_count(least=1000), checks.not_null("id", quarantine=True)]


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("not_null:a b", checks.not_null("a b")),
        ("unique:id", checks.unique("id")),
        ("range:price=0:99.5", checks.in_range("price", least=0, most=99.5)),
        ("range:price=-1.5:", checks.in_range("price", least=-1.5)),
        ("range:price=:0", checks.in_range("price", most=0)),
        ('one_of:kind=a,2,true,"3"', checks.one_of("kind", ["a", 2, True, "3"])),
        ("one_of:kind=null,1.5", checks.one_of("kind", ["null", "1.5"])),
        ("pattern:zip=[0-9]{5}|a=b:c", checks.matches("zip", "[0-9]{5}|a=b:c")),
        ("row_count::10", checks.row_count(most=10)),
        ("row_count:test=10:20", checks.row_count(split="test", least=10, most=20)),
        ("class_balance:label=0.05:0.5", checks.class_balance("label", min_share=0.05, max_share=0.5)),
        ("drift:price=0.25", checks.drift("price", 0.25)),
    ],
)
def test_a_check_is_a_short_text(text: str, check: checks.Check) -> None:
    servicer = Recording()
    result = run(servicer, "transform", VERSION, "--split-column", "s", "--check", text)
    assert result.exit_code == 0, result.output
    assert list(servicer.asked[0].checks) == [check]


@pytest.mark.parametrize("kind", [one.partition(":")[0] for one in FORMS])
def test_every_check_of_the_contract_has_a_text(kind: str) -> None:
    oneof = quality_pb2.QualityCheck.DESCRIPTOR.oneofs_by_name["check"]
    assert kind in {field.name for field in oneof.fields}
    assert len(oneof.fields) == len(FORMS)
    assert kind in run(Recording(), "import", "--help").output.replace("\n", "")


def test_a_split_by_time_has_its_periods_in_order() -> None:
    servicer = Recording()
    periods = ("--before", "train=2024-01-31", "--before", "validation=2024-02-01T12:00:00+01:00", "--rest", "test")
    result = run(servicer, "transform", VERSION, "--split-time", "day", *periods)
    assert result.exit_code == 0, result.output
    (request,) = servicer.asked
    before = {"train": datetime(2024, 1, 31, tzinfo=UTC), "validation": datetime(2024, 2, 1, 11, tzinfo=UTC)}
    assert request.splits == specs.time_split("day", before, "test")


@pytest.mark.parametrize(
    "arguments",
    [
        ("transform", VERSION),
        ("transform", VERSION, "--split-time", "day", "--rest", "test"),
        ("transform", VERSION, "--split-time", "day", "--before", "train=2024-01-31"),
        ("transform", VERSION, "--split-time", "day", "--before", "train=soon", "--rest", "test"),
        ("transform", VERSION, "--split-column", "s", "--rest", "test"),
        ("transform", VERSION, "--split-time", "day", "--split-column", "s", "--before", "a=2024-01-31", "--rest", "b"),
        ("transform", VERSION, "--split-time", "d", *("--before", "a=2024-01-31") * 2, "--rest", "b"),
        *(
            ("transform", VERSION, "--split-column", "s", "--check", check)
            for check in ("", "not_null", "not_null:", "not_null:a=1", "range:a", "range:a=5", "range:a=:", "odd:a")
        ),
        ("transform", VERSION, "--split-column", "s", "--check", "range:a=low:high"),
        ("transform", VERSION, "--split-column", "s", "--quarantine-check", "drift:a=0.1"),
        ("import", "d", "--parquet", "train=/a", "--csv-delimiter", ";"),
        ("import", "d", "--parquet", "train=/a", "--max-quarantined", "5"),
        ("transform", VERSION, "--split-hash", "id"),
        ("transform", VERSION, "--split-ratio", "--split-column", "s", "--share", "a=1"),
        ("transform", VERSION, "--split-ratio", "--share", "a=much"),
        ("import", "d", "--csv", "train"),
        ("import", "d", "--csv", "t=x", "--append-to", VERSION, "--replace", VERSION),
    ],
    ids=lambda arguments: " ".join(arguments[2:]) or "nothing to do",
)
def test_wrong_usage_is_exit_code_2_and_asks_for_nothing(arguments: tuple[str, ...]) -> None:
    servicer = Recording()
    assert run(servicer, *arguments).exit_code == 2
    assert servicer.asked == []


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("range:a=low:high", "LOW and HIGH are numbers"),
        ("row_count:1.5:", "LOW and HIGH are whole numbers"),
        ("drift:a=much", "MOST is a number"),
    ],
)
def test_a_check_without_its_numbers_names_the_missing_ones(check: str, expected: str) -> None:
    result = run(Recording(), "transform", VERSION, "--split-column", "s", "--check", check)
    assert result.exit_code == 2
    assert expected in result.stderr


class Cancelled(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.names: list[str] = []

    def CancelOperation(self, request: Any, _context: Any) -> empty_pb2.Empty:  # noqa: N802
        self.names.append(request.name)
        return empty_pb2.Empty()


@pytest.mark.parametrize(
    ("state", "expected"),
    [("CREATING", f"Cancelling {VERSION}."), ("ACTIVE", f"{VERSION} is not being made: it is active")],
)
def test_operations_that_make_a_version_can_be_cancelled_and_no_others(state: str, expected: str) -> None:
    servicer, operations = Recording(), Cancelled()
    found = resources_pb2.DatasetVersion(name=VERSION, operation="operations/o", state=f"STATE_{state}")
    servicer.GetVersion = lambda _request, _context: found  # type: ignore[method-assign]

    def register(server: grpc.Server) -> None:
        data_service_pb2_grpc.add_DataServiceServicer_to_server(servicer, server)
        operations_pb2_grpc.add_OperationsServicer_to_server(operations, server)

    with serving(register) as address:
        result = CliRunner().invoke(millrace, ["data", "cancel", VERSION, "--data-address", address])
    assert expected in result.output
    assert operations.names == (["operations/o"] if state == "CREATING" else [])
    assert result.exit_code == (0 if state == "CREATING" else 4)


@pytest.mark.parametrize(
    "arguments",
    [
        ("import", "d", "--parquet", "train=/a"),
        ("transform", VERSION, "--split-column", "s"),
        ("transform", VERSION, "--split-column", "s", "--json"),
        ("predict", VERSION, "--checkpoint", "trainingJobs/j"),
    ],
    ids=" ".join,
)
def test_an_interrupted_wait_says_that_the_work_continues(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_operation: Any, timeout_s: float, **_: Any) -> None:
        assert timeout_s > 10**9  # as long as it takes
        raise KeyboardInterrupt

    monkeypatch.setattr(Operation, "wait", interrupted)
    result = run(Recording(), *arguments)
    assert result.exit_code == 130
    assert f"error: interrupted, but the server goes on making {VERSION}" in result.stderr
    assert "remedy: millrace data list d shows" in result.stderr


def test_a_file_that_is_no_transform_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text('{"steps": [{"standardise": {}}]}')
    result = run(Recording(), "transform", VERSION, "--steps", str(file))
    assert result.exit_code == 2
    assert "no Transform" in result.stderr
