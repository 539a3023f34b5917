"""`millrace train coverage|metrics|logs|watch|report|suspend|resume|delete`, on a real server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from millrace.train.v1 import code_bundle_pb2, resources_pb2, train_service_pb2_grpc
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client import connect
from millrace_client.cli import millrace
from millrace_client.cli.progress import has_accuracy
from millrace_client.report.pages import HEIGHT, WIDTH, attempts_of, curve
from tests.support.grpc_answers import serving
from tests.support.recorded_servicer import NASTY, REGRESSION, STEPS, Job, ProgramRun, RecordedRun
from tests.unit.client.test_show import Page

Spec = resources_pb2.TrainingSpec


def run(servicer: RecordedRun, *arguments: str) -> Result:
    def register(server: grpc.Server) -> None:
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)

    with serving(register) as address:
        result = CliRunner().invoke(millrace, ("train", *arguments, "--train-address", address))
    assert "Traceback" not in result.output
    return result


def test_coverage_shows_every_epoch() -> None:
    result = run(RecordedRun(), "coverage", "j")
    assert result.exit_code == 0, result.output
    assert [line.split()[:3] for line in result.stdout.splitlines() if "done" in line] == [
        ["0", "done", "1,000"],
        ["1", "done", "1,000"],
        ["2", "done", "1,000"],
    ]
    document = json.loads(run(RecordedRun(), "coverage", "j", "--json", "--checkpoint", "c", "--epoch", "1").stdout)
    assert [one["checkpoint"] for one in document["coverage"]] == ["trainingJobs/j/checkpoints/c"]


@pytest.mark.parametrize(
    ("state", "of_one", "of_two"),
    [
        (Job.STATE_SUCCEEDED, "left early", "not begun"),
        (Job.STATE_CANCELLED, "left early", "not begun"),
        (Job.STATE_RUNNING, "at work", "at work"),
        (Job.STATE_SUSPENDED, "at work", "at work"),
    ],
)
def test_an_epoch_is_at_work_only_where_the_run_is_not_over(state: Job.State, of_one: str, of_two: str) -> None:
    result = run(ProgramRun(state=state), "coverage", "j")
    assert result.exit_code == 0, result.output
    assert re.findall(r"^ *(\d) +(\D+?) +[\d,]+ ", result.stdout, re.MULTILINE) == [
        ("0", "done"),
        ("1", of_one),
        ("2", of_two),
    ]


@pytest.mark.parametrize(
    ("witness", "text"),
    [
        (pb.Coverage.WITNESS_UNSPECIFIED, "rows whose gradients the optimizer has applied (OPTIMIZER)"),
        (pb.Coverage.WITNESS_OPTIMIZER, "rows whose gradients the optimizer has applied (OPTIMIZER)"),
        (pb.Coverage.WITNESS_GIVEN, "rows that the program was given (GIVEN)"),
        (pb.Coverage.WITNESS_INDICES, "indices that a DataLoader's sampler drew (INDICES)"),
        (pb.Coverage.WITNESS_NONE, "reads its own data (NONE)"),
    ],
)
def test_coverage_says_what_its_numbers_rest_on(
    monkeypatch: pytest.MonkeyPatch, witness: pb.Coverage.Witness, text: str
) -> None:
    shards = []

    def witnessed(self: RecordedRun, request: Any, context: grpc.ServicerContext) -> pb.Coverage:
        shards.append(request.shard)
        found = counted(self, request, context)
        found.witness = witness
        return found

    counted = RecordedRun.GetCoverage
    monkeypatch.setattr(RecordedRun, "GetCoverage", witnessed)
    result = run(RecordedRun(), "coverage", "j", "--split", "validation")
    assert text in result.stdout
    assert set(shards) == {"validation"}


def test_a_program_shows_its_reports_as_steps_and_no_epoch_that_it_did_not_name() -> None:
    assert re.search(r"trainingJobs/j +\S+ +17 ", run(ProgramRun(), "list").stdout)
    table = run(ProgramRun(), "metrics", "j").stdout
    assert re.search(r"^ *5 +1 +0\.5", table, re.MULTILINE), table
    assert "-1" not in table


def test_rows_consumed_twice_are_reported_and_are_exit_code_1() -> None:
    result = run(RecordedRun(repeated=12), "coverage", "j")
    assert result.exit_code == 1
    assert "epoch 1: repeated rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …" in result.stdout
    assert "error: trainingJobs/j: epoch 1" in result.stderr
    assert run(RecordedRun(repeated=1), "coverage", "j", "--json").exit_code == 1
    assert run(RecordedRun(), "coverage", "j", "--epoch", "7").exit_code == 4


def test_metrics_are_a_table_or_a_document_a_line() -> None:
    lines = run(RecordedRun(), "metrics", "j", "--after", "3", "--json").stdout.splitlines()
    assert [int(json.loads(line)["step"]) for line in lines] == list(range(4, STEPS + 1))
    table = run(RecordedRun(), "metrics", "j", "--last", "2").stdout
    assert re.search(r"30 +2 +2 +0\.002 +0\.03333\d* +0\.75", table)
    assert "28 " not in table


@pytest.mark.parametrize("breaks", [0, 2])
def test_logs_are_printed_whole_and_once_however_often_the_stream_breaks(breaks: int) -> None:
    result = run(RecordedRun(breaks=breaks), "logs", "j", "--follow")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == ["0    one", f"1    {NASTY} [31m", "0    two", "0    three", "own  own"]


def test_the_log_of_a_later_attempt_says_how_to_read_the_one_before() -> None:
    newest = run(RecordedRun(), "logs", "j", "--rank", "0")
    assert newest.stderr == "This is attempt 2; --attempt 1 shows the one before it.\n"
    first = run(RecordedRun(), "logs", "j", "--rank", "0", "--attempt", "1")
    assert (first.stderr, first.stdout) == ("", newest.stdout)
    assert run(RecordedRun(), "logs", "j", "--json").stderr == ""


def test_the_log_of_one_rank_is_printed_as_it_is() -> None:
    assert run(RecordedRun(), "logs", "j", "--rank", "0").stdout == "one\ntwo\nthree\n"
    assert run(RecordedRun(), "logs", "j", "--rank", "-1").stdout == "own\n"


def test_requests_reach_the_service() -> None:
    servicer = RecordedRun()
    assert "suspending" in run(servicer, "suspend", "j", "--etag", "3").stdout
    assert "recovering" in run(servicer, "resume", "trainingJobs/j").stdout
    assert json.loads(run(servicer, "delete", "j", "--json").stdout)["state"] == "STATE_DELETING"
    assert run(servicer, "delete", "j").exit_code == 1  # nobody confirmed
    assert [(type(one).__name__, one.name, one.etag) for one in servicer.requests] == [
        ("SuspendTrainingJobRequest", "trainingJobs/j", "3"),
        ("ResumeTrainingJobRequest", "trainingJobs/j", ""),
        ("DeleteTrainingJobRequest", "trainingJobs/j", ""),
    ]


def test_watching_reports_restarts_and_waiting() -> None:
    text = run(RecordedRun(), "watch", "j").stdout
    for wanted in (
        "attempt 1 begins on 3 workers",
        "attempt 1 lost: a rank stood still (rank 2): rank 2 <script>alert(1)</script>[bold]",
        "attempt 2 goes on from step 10 on 2 workers",
        "warning: something was mended <script>alert(1)</script>[bold]",
        "trainingJobs/j succeeded",
    ):
        assert wanted in text, wanted


def test_progress_lines_show_throughput_waiting_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_client.cli.progress.LINE_EVERY_S", 0.0)
    text = run(RecordedRun(), "watch", "j").stdout
    assert re.search(r"epoch 3/3  step 30/30  loss 0\.250 .* rows/s .* left .*25% for rows, 5% for checkpoints", text)


def test_watching_a_suspended_job_reports_its_run_and_ends_well() -> None:
    result = run(RecordedRun(state=Job.STATE_SUSPENDED), "watch", "j")
    assert result.exit_code == 0
    assert "attempt 2 goes on from step 10 on 2 workers" in result.stdout
    assert "trainingJobs/j suspended" in result.stdout


def test_of_a_run_that_learns_numbers_its_metrics_are_shown_and_no_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_client.cli.progress.LINE_EVERY_S", 0.0)
    text = run(RecordedRun(task=REGRESSION), "watch", "j").stdout
    assert re.search(r"step 30/30  loss 0\.250  mae 1\.25  r2 -0\.5  .* rows/s", text)
    assert "epoch 3/3: validation mae 1.25, r2 -0.5, loss 0.750 (100 rows)" in text
    assert "accuracy" not in text


def test_the_list_has_no_accuracy_of_a_run_that_learns_numbers() -> None:
    assert "0.0%" in run(RecordedRun(), "list").stdout
    assert "0.0%" not in run(RecordedRun(task=REGRESSION), "list").stdout


@pytest.mark.parametrize(
    ("spec", "accuracy", "is_shown"),
    [
        (Spec(), 0.0, True),
        (Spec(model=resources_pb2.Model(entry="net:Net")), 0.25, True),
        (Spec(model=resources_pb2.Model(entry="gan:GAN")), 0.0, False),
        (Spec(program=code_bundle_pb2.Program(entry="train:loop")), 0.0, False),
        (Spec(program=code_bundle_pb2.Program(entry="train:loop")), 0.25, True),
        (Spec(task=REGRESSION), 0.25, False),
    ],
)
def test_an_accuracy_that_own_code_does_not_report_is_not_shown(spec: Spec, accuracy: float, is_shown: bool) -> None:
    assert has_accuracy(spec, resources_pb2.Progress(step=7, accuracy=accuracy)) is is_shown


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "page.html"
    result = run(RecordedRun(repeated=5), "report", "j", "--html", str(path))
    assert result.exit_code == 0, result.output
    return path.read_text()


def test_the_report_shows_curves_restarts_coverage_checkpoints_and_spec(page: str) -> None:
    for wanted in (
        "<h3>loss ",
        "<h3>validation_accuracy ",
        "lost: a rank stood still",
        "step-00000010",
        "something was mended",
        'class="number warn">5<',
        '<span class="good">best</span>',
        "&#34;learning_rate&#34;: 0.002",
        "of 30",
        "25.0 %",
    ):
        assert wanted in page, wanted


def test_the_report_needs_no_script_no_file_and_no_network(page: str) -> None:
    found = Page(page)
    assert "script" not in found.tags
    assert all(one.startswith("#") for one in found.wanted)
    assert not re.search(r"url\(|@import|https?:", page)
    assert NASTY not in page


def test_the_report_is_accessible(page: str) -> None:
    found = Page(page)
    assert found.tags.count("h1") == 1
    assert len(found.ids) == len(set(found.ids))
    assert all("aria-label=" in svg for svg in re.findall(r"<svg[^>]*>", page))


def test_a_run_whose_rows_are_not_known_any_more_can_be_reported_on(tmp_path: Path) -> None:
    result = run(RecordedRun(repeated=None), "report", "j", "--html", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    assert "its dataset version is gone" in page
    assert "<h3>loss " in page
    assert "the version is gone" in run(RecordedRun(repeated=None), "coverage", "j").stderr


def test_an_attempt_that_died_before_it_reported_ended_at_the_step_it_began_at() -> None:
    begun = pb.TrainingEvent(attempt=2, attempt_started=pb.AttemptStarted(num_workers=2, step=50))
    (attempt,) = attempts_of(Job(), [begun])
    assert (attempt.first_step, attempt.last_step) == (50, 50)


def test_a_job_at_work_can_be_reported_on(tmp_path: Path) -> None:
    result = run(RecordedRun(state=Job.STATE_RUNNING), "report", "j", "--html", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output
    assert "running" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("count", [1, 2, 40, 5000])
def test_a_curve_stays_in_its_box_and_small(count: int) -> None:
    values = [(float(step), float(step % 97)) for step in range(count)]
    values.insert(count // 2, (count / 2, float("nan")))
    made = curve("loss", values)
    assert made is not None
    assert made.omitted == 1
    assert len(made.line) + len(made.band) < 30_000
    for x, y in re.findall(r"([-\d.]+),([-\d.]+)", made.line + made.band):
        assert 0 <= float(x) <= WIDTH
        assert 0 <= float(y) <= HEIGHT
    assert curve("loss", [(1, float("inf"))]) is None


def test_logs_of_the_sdk_go_on_where_a_stream_broke() -> None:
    def register(server: grpc.Server) -> None:
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(RecordedRun(breaks=1), server)

    with serving(register) as address, connect(train=address) as client:
        found = list(client.train.stream_logs("trainingJobs/j"))
    assert [(one.attempt, one.rank, one.text) for one in found if one.rank == 0] == [
        (2, 0, "one\n"),
        (2, 0, "two\nthree\n"),
    ]
