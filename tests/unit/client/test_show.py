"""`millrace data show`: a version's report in a terminal, as a page and as JSON."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2_grpc, quality_pb2, resources_pb2
from millrace_client.cli import millrace
from millrace_client.report import (
    HEIGHT,
    WIDTH,
    block_bars,
    box_bars,
    check_text,
    number_text,
    share_text,
    step_text,
)
from millrace_client.report.pages import page
from tests.support.fake_servicers import OnePreview
from tests.support.grpc_answers import serving
from tests.support.previews import NASTY, preview


def show(*arguments: str, with_report: bool = True) -> str:
    result = shown_by(*arguments, with_report=with_report)
    assert result.exit_code == 0, result.output
    return result.stdout


def shown_by(*arguments: str, with_report: bool = True) -> Result:
    def register(server: grpc.Server) -> None:
        servicer = OnePreview(preview(with_report=with_report))
        data_service_pb2_grpc.add_DataServiceServicer_to_server(servicer, server)

    with serving(register) as address:
        command = ("data", "show", "datasets/d/versions/v2", "--data-address", address, *arguments)
        return CliRunner().invoke(millrace, command)


def test_the_terminal_shows_all_that_is_known() -> None:
    text = show()
    for wanted in (
        "datasets/d/versions/v2  active  4 rows  5.2 MB",
        "from datasets/d/versions/v1",
        "resize(image, height=2, width=2)",
        "uint8 2 × 2",
        "▁ █▂",
        "ants 66.7 %, bees 33.3 %",
        "33.3 % + 1 NaN",
        "−∞",
        "≈ 9,000",
        "2020-01-01",
        "✓   price is 0 or more",
        "✗   note matches [a-z]+",
        "3 rows left out",
        "a.csv, line 17",
        "0 (ants)",
    ):
        assert wanted in text, wanted


def test_predictions_name_the_checkpoint_that_they_are_from() -> None:
    shown = preview(with_report=True)
    made_by = resources_pb2.Prediction(checkpoint="trainingJobs/j/checkpoints/c", checkpoint_sha256="ef" * 32)
    shown.version.prediction.CopyFrom(made_by)

    def register(server: grpc.Server) -> None:
        data_service_pb2_grpc.add_DataServiceServicer_to_server(OnePreview(shown), server)

    with serving(register) as address:
        result = CliRunner().invoke(millrace, ("data", "show", shown.version.name, "--data-address", address))
    assert f"predicted by trainingJobs/j/checkpoints/c  sha256:{'ef' * 32}" in result.stdout
    assert "predicted by <code>trainingJobs/j/checkpoints/c</code>" in page(shown)


def test_data_is_neither_markup_nor_a_control_sequence() -> None:
    text = show()
    assert "[bold]x[/]" in text
    assert "\x1b" not in text


def test_a_version_without_a_report_shows_its_columns_and_rows(tmp_path: Path) -> None:
    text = show("--html", str(tmp_path / "page.html"), with_report=False)
    assert "date32[day]" in text
    assert "0 (ants)" in text
    assert "No statistics" in (tmp_path / "page.html").read_text()


def test_json_has_the_version_the_rows_and_the_report(tmp_path: Path) -> None:
    document = json.loads(show("--json", "--html", str(tmp_path / "page.html")))
    assert document["version"]["name"] == "datasets/d/versions/v2"
    assert document["rows"][0]["label"] == 0
    assert document["rows"][0]["image"] == "<2 × 2>"
    assert document["report"]["checks"][1]["quarantined"] == "3"
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("option", ["--html", "--contact-sheet"])
def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path, option: str) -> None:
    path = tmp_path / "nowhere" / "file"
    result = shown_by(option, str(path))
    assert result.exit_code == 1
    assert result.stderr == f"error: {path}: No such file or directory\n"


def test_the_contact_sheet_is_saved(tmp_path: Path) -> None:
    assert "Saved" in show("--contact-sheet", str(tmp_path / "sheet.png"))
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert "no contact sheet" in show("--contact-sheet", str(tmp_path / "none.png"), with_report=False)


class Page(HTMLParser):
    """Collects what a page needs of the world, and whether its elements are closed in order."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.wanted: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self._open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), "no script"
            self.wanted += [value or ""] if name in ("src", "href") else []
            self.ids += [value or ""] if name == "id" else []
            if name == "aria-labelledby":
                assert value, tag

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_the_page_needs_no_script_no_file_and_no_network() -> None:
    text = page(preview())
    found = Page(text)
    assert "script" not in found.tags
    assert all(one.startswith(("data:image/png;base64,", "#")) for one in found.wanted)
    assert not re.search(r"url\(|@import|https?:", text)


def test_the_page_escapes_what_comes_from_data() -> None:
    text = page(preview())
    assert NASTY not in text
    assert "&lt;script&gt;alert(1)" in text


def test_the_page_is_accessible() -> None:
    text = page(preview())
    found = Page(text)
    assert '<html lang="en">' in text
    assert found.tags.count("h1") == 1
    assert len(found.ids) == len(set(found.ids))
    assert all("aria-label=" in svg for svg in re.findall(r"<svg[^>]*>", text))
    assert all("alt=" in image for image in re.findall(r"<img[^>]*>", text))


@pytest.mark.parametrize(
    ("counts", "text"), [([], ""), ([0, 0], "  "), ([1, 1000], "▁█"), ([0, 4, 8], " ▄█"), ([3], "█")]
)
def test_a_bar_is_seen_however_few_its_rows(counts: list[int], text: str) -> None:
    assert block_bars(counts) == text
    for bar in box_bars(counts):
        assert (bar.height >= 1.5) == (bar.count > 0)
        assert 0 <= bar.x < bar.x + bar.width <= WIDTH
        assert bar.y + bar.height == pytest.approx(HEIGHT)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-3.0, "−3"),
        (0.13066, "0.1307"),
        (12_345.6, "12,346"),
        (1.5e12, "1.5e+12"),
        (2e-7, "2e−07"),
        (float("nan"), "NaN"),
        (float("-inf"), "−∞"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "0 %"),
        (0, 9, "0 %"),
        (9, 9, "100 %"),
        (1, 10**6, "< 0.1 %"),
        (10**6 - 1, 10**6, "> 99.9 %"),
        (1, 3, "33.3 %"),
    ],
)
def test_shares_never_round_to_none_or_all(part: int, whole: int, text: str) -> None:
    assert share_text(part, whole) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"column": "x", "not_null": {}}, "x is not null"),
        ({"column": "x", "unique": {}}, "x is unique"),
        ({"column": "x", "range": {"min": 0, "max": 5}}, "x is from 0 to 5"),
        ({"column": "x", "range": {"max": 5}}, "x is 5 or less"),
        ({"column": "x", "one_of": {"values": [{"integer": 1}, {"text": "a"}]}}, "x is one of 1, a"),
        ({"row_count": {"min": 1000}}, "the version has 1,000 or more rows"),
        ({"row_count": {"split": "test", "max": 5}}, "test has at most 5 rows"),
        ({"column": "x", "class_balance": {"min_share": 0.05}}, "each x has at least 5 % of the rows"),
        ({"column": "x", "drift": {"max_population_stability_index": 0.2}}, "x drifts by a psi of at most 0.2"),
    ],
    ids=str,
)
def test_checks_read_as_sentences(fields: dict[str, Any], text: str) -> None:
    assert check_text(quality_pb2.QualityCheck(**fields)) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"column": "x", "to_float": {}}, "to_float(x)"),
        ({"normalize": {"mean": [0.1307], "std": [0.3081]}}, "normalize(mean=[0.1307], std=[0.3081])"),
        ({"rename": {"columns": {"a": "b"}}}, "rename(columns=a→b)"),
        (
            {"column": "x", "fill_nulls": {"value": {"number": 1.5}, "statistic": 1}},
            "fill_nulls(x, value=1.5, statistic=mean)",
        ),
        (
            {"column": "x", "one_hot_encode": {"categories": list("abcde")}},
            "one_hot_encode(x, categories=[a, b, c, … 2 more])",
        ),
        ({"concat": {"columns": ["a"], "into": "b", "keep": True}}, "concat(columns=[a], into='b', keep=true)"),
        ({}, "a step that this program does not know"),
    ],
    ids=str,
)
def test_steps_read_as_calls(fields: dict[str, Any], text: str) -> None:
    assert step_text(transform_pb2.TransformStep(**fields)) == text


@pytest.mark.parametrize(("rows", "said"), [(0, ""), (1, "1 row left out: "), (2000, "2,000 rows left out: ")])
def test_a_new_version_says_how_many_rows_were_left_out(
    rows: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from millrace_client.cli.versions import print_version

    print_version(resources_pb2.DatasetVersion(name="datasets/d/versions/v1", quarantined_row_count=rows))
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last.startswith(said)
    assert ("millrace data quarantine datasets/d/versions/v1" in last) is bool(rows)


def test_a_narrow_terminal_shows_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from millrace_client.cli import versions as shown

    narrow = Console(width=80, record=True, file=io.StringIO(), highlight=False)
    monkeypatch.setattr(shown, "console", lambda: narrow)
    shown.print_preview(preview())
    text = narrow.export_text()
    tables = [line for line in text.splitlines() if not line.startswith((" " * 10, "  "))]
    assert all(len(line) <= 80 for line in tables)
    assert re.search(r"price +train +33.3 %", text)
    assert "not shown for want of room: " in text
    assert text.count("…") < 8
