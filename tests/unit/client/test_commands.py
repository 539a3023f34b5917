"""The `millrace` command: exit codes, plain errors, `--json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from millrace.train.v1 import suggestion_pb2, train_service_pb2_grpc
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client import connect
from millrace_client.cli import COMMANDS, command, millrace
from millrace_client.stack import supervisor
from tests.support.fake_servicers import BreakingStreams, Job, Refusing
from tests.support.grpc_answers import bad_field, error_info, serving, status

NOBODY = "127.0.0.1:1"
PAGE = Path(__file__).parents[3] / "docs" / "commands.md"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "RECONNECT_FOR_S", 0.2)
    for service in ("DATA", "TRAIN", "INFERENCE"):
        monkeypatch.setenv(f"MILLRACE_{service}_ADDRESS", NOBODY)
    return tmp_path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(millrace, arguments)
    assert "Traceback" not in result.output
    return result


def watched(servicer: Any, *arguments: str) -> Result:
    def register(server: grpc.Server) -> None:
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)

    with serving(register) as address:
        return run("train", "watch", "j", "--train-address", address, *arguments)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (grpc.StatusCode.INTERNAL, 1),
        (grpc.StatusCode.DATA_LOSS, 1),
        (grpc.StatusCode.NOT_FOUND, 3),
        (grpc.StatusCode.INVALID_ARGUMENT, 4),
        (grpc.StatusCode.ALREADY_EXISTS, 4),
        (grpc.StatusCode.FAILED_PRECONDITION, 4),
        (grpc.StatusCode.ABORTED, 4),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 5),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 5),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_each_kind_of_failure_has_its_exit_code(code: grpc.StatusCode, exit_code: int) -> None:
    result = watched(Refusing(status(code, "no")))
    assert result.exit_code == exit_code
    assert result.stderr.startswith("error: no\n")


def test_an_error_names_field_remedy_and_request_id() -> None:
    reported = status(
        grpc.StatusCode.INVALID_ARGUMENT,
        "the name is malformed",
        error_info("INVALID_FIELD", remedy="use trainingJobs/{j}"),
        bad_field("name", "'x': use trainingJobs/{j}"),
    )
    servicer = Refusing(reported)
    lines = watched(servicer).stderr.splitlines()
    assert lines == [
        "error: the name is malformed",
        "  name: 'x': use trainingJobs/{j}",
        "  remedy: use trainingJobs/{j}",
        f"  request id: {servicer.called_with['x-request-id']}",
    ]


def test_nobody_at_the_address_is_exit_code_5_with_a_remedy() -> None:
    result = run("data", "list")
    assert result.exit_code == 5
    assert f"no service answers at {NOBODY} (Connection refused)" in result.stderr
    assert "millrace up" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "list"),
        ("data", "show", "datasets/d/versions/v"),
        ("data", "import", "d", "--parquet", "train=x"),
        ("train", "create", "j", "--dataset-version", "datasets/d/versions/v"),
        ("train", "watch", "j"),
        ("train", "list"),
        ("train", "cancel", "j"),
        ("deploy", "m", "j"),
        ("deployments", "list"),
        ("deployments", "show", "m"),
        ("deployments", "delete", "m"),
        ("deployments", "traffic", "m", "--no-shadow"),
        ("predict", "m", "--dataset", "datasets/d/versions/v"),
        ("demo", "--mnist-uri", "file:///nowhere"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_with_json_a_failure_too_is_one_document(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--json")
    assert result.exit_code == 5
    assert json.loads(result.stdout)["error"]["status"] == "UNAVAILABLE"


def test_watching_with_json_prints_a_line_for_each_update() -> None:
    result = watched(Succeeding(), "--json")
    assert result.exit_code == 0, result.output
    updates = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["event"]["sequence"] for one in updates if "event" in one] == ["1", "2", "3"]
    assert updates[-1]["job"]["state"] == "STATE_SUCCEEDED"


def test_watching_a_job_that_fails_is_exit_code_1() -> None:
    result = watched(Succeeding(Job.STATE_FAILED))
    assert result.exit_code == 1
    assert "error: trainingJobs/j failed" in result.stderr


class Succeeding(BreakingStreams):
    """A job of three events that ends as it is told to."""

    def __init__(self, final: Any = Job.STATE_SUCCEEDED) -> None:
        super().__init__(events=3, per_stream=2, final=final)

    def GetTrainingJob(self, request: Any, _context: grpc.ServicerContext) -> Job:  # noqa: N802
        return Job(name=request.name, state=self._final)


def test_status_and_down_without_a_stack(home: Path) -> None:
    status_result = run("status", "--json")
    assert status_result.exit_code == 5
    document = json.loads(status_result.stdout)
    assert document["stack"] is None
    assert {part["health"] for part in document["parts"]} == {"UNREACHABLE"}
    assert json.loads(run("down", "--json").stdout) == {"stopped": False}
    assert str(home) in run("down").stdout.replace("\n", "")


@pytest.mark.parametrize("allowed", [True, False])
def test_a_job_may_be_allowed_to_go_on_on_cpus(allowed: bool) -> None:
    asked: list[Any] = []

    class Creating(train_service_pb2_grpc.TrainServiceServicer):
        def CreateTrainingJob(self, request: Any, _context: grpc.ServicerContext) -> Job:  # noqa: N802
            asked.append(request.spec)
            return Job(name="trainingJobs/j")

        def SuggestTrainingSpec(  # noqa: N802
            self, request: Any, _context: grpc.ServicerContext
        ) -> suggestion_pb2.SuggestTrainingSpecResponse:
            return suggestion_pb2.SuggestTrainingSpecResponse(spec=request.spec)

    with serving(
        lambda server: train_service_pb2_grpc.add_TrainServiceServicer_to_server(Creating(), server)
    ) as address:
        options = ["--allow-cpu-fallback"] if allowed else []
        run("train", "create", "j", "--dataset-version", "datasets/d/versions/v", "--train-address", address, *options)

    assert [spec.placement.allow_cpu_fallback for spec in asked] == [allowed]


class Holding(train_service_pb2_grpc.TrainServiceServicer):
    """A cluster of four CPUs, of which a job and a deployment hold three, and a job that waits for two."""

    def GetClusterUse(self, _request: Any, _context: grpc.ServicerContext) -> pb.ClusterUse:  # noqa: N802
        use = pb.ClusterUse(nodes=1, cpus=4.0, free_cpus=1.0)
        use.time.GetCurrentTime()
        use.holders.add(job="trainingJobs/a", cpus=1.0)
        use.holders.add(deployment_uid="u1", cpus=2.0)
        return use

    def ListTrainingJobs(self, _request: Any, _context: grpc.ServicerContext) -> pb.ListTrainingJobsResponse:  # noqa: N802
        waiting = Job(name="trainingJobs/b", state=Job.STATE_PENDING, waiting_for="2 workers of 1 CPU: [none] free")
        return pb.ListTrainingJobsResponse(training_jobs=[Job(name="trainingJobs/a"), waiting])


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def register(server: grpc.Server) -> None:
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(Holding(), server)
        answers = health.HealthServicer()
        for service in ("", "train", "millrace.train.v1.TrainService"):
            answers.set(service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(answers, server)

    with serving(register) as address:
        monkeypatch.setenv("MILLRACE_TRAIN_ADDRESS", address)
        yield


@pytest.mark.usefixtures("holding")
def test_status_says_who_holds_which_cpus_and_what_is_free() -> None:
    shown = run("status").stdout

    assert re.search(r"trainingJobs/a +1 +0", shown)
    assert re.search(r"a deployment, u1 +2 +0", shown), "the service that knows its name does not answer"
    assert re.search(r"free +1 of 4 +0 of 0", shown)
    cluster = json.loads(run("status", "--json").stdout)["cluster"]
    assert cluster["free"] == {"cpus": 1.0, "gpus": 0.0}
    assert [(one["holder"], one["cpus"]) for one in cluster["holders"]] == [
        ("trainingJobs/a", 1.0),
        ("a deployment, u1", 2.0),
    ]


def test_a_service_on_an_overloaded_machine_has_seconds_to_report_its_health() -> None:
    left_s: list[float] = []

    class Slow(health.HealthServicer):
        def Check(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            left_s.append(context.time_remaining())
            return super().Check(request, context)

    def register(server: grpc.Server) -> None:
        answers = Slow()
        answers.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(answers, server)

    with serving(register) as address, connect(train=address) as client:
        assert client.health.check("train") == "SERVING"
    assert left_s[0] > 4.0


@pytest.mark.usefixtures("holding")
def test_a_list_of_jobs_says_what_those_that_cannot_begin_wait_for() -> None:
    shown = run("train", "list").stdout

    assert "trainingJobs/b waits for 2 workers of 1 CPU: [none] free" in shown
    assert "trainingJobs/a waits" not in shown


def test_up_says_when_it_is_running_already(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from millrace_client.stack.record import Process, Record

    me = Process.from_pid(os.getpid())
    assert me is not None
    addresses = dict.fromkeys(("data", "train", "inference"), NOBODY)
    record = Record(
        state="ready",
        supervisor=me,
        addresses=addresses,
        store="file:///s",
        ray_address=NOBODY,
        dashboard="http://d",
        import_roots=(),
        ray_folder="",
    )
    monkeypatch.setattr(supervisor, "running_record", lambda _: record)
    document = json.loads(run("up", "--json").stdout)
    assert document["already_running"] is True
    assert document["addresses"] == addresses
    assert "already running" in run("up").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("data", "import", "d"),
        ("data", "import", "d", "--idx", "train=only-one"),
        ("data", "import", "d", "--parquet", "t=x", "--hold-out", "train=0.1"),
        ("train", "create", "j"),
        ("predict", "m"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_every_command_has_help_that_says_where_the_exit_codes_are() -> None:
    listed = run("--help").stdout
    assert "Exit codes" in listed
    for name, (_, text) in COMMANDS.items():
        assert text in listed
        assert run(name, "--help").exit_code == 0


def test_the_page_of_commands_lists_every_command_and_says_which_have_json() -> None:
    text = PAGE.read_text()
    begin = text.index("From a shell: `millrace data ")
    paragraph = text[begin : text.index("\n\n", begin)]
    listed = set()
    for group, names in re.findall(r"`millrace (?:(\w+) )?([\w|]+)`", paragraph):
        listed |= {f"{group} {name}".strip() for name in names.split("|")}
    assert listed == commands().keys()
    assert [name for name, one in commands().items() if not any(p.name == "as_json" for p in one.params)] == [
        "data quarantine"
    ]


def commands() -> dict[str, click.Command]:
    """All that do something, by what is typed for them."""
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        one = millrace.get_command(click.Context(millrace), name)
        if isinstance(one, click.Group):
            found |= {f"{name} {part}": command for part, command in one.commands.items()}
        elif one is not None:
            found[name] = one
    return found
