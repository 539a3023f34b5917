"""The answer of the child that reads weights is taken only as the child writes it: code in the child may change it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from shared.checkpoint.format import WEIGHTS
from train_service.jobs.weights_child import MAX_LISTED, REPORT, Report, open_plain, take_report, take_weights

GOOD = Report(
    format="TORCH",
    key="state_dict",
    fitted=[{"source": "module.a", "target": "a", "widened_from": ""}],
    missing=["b"],
    missing_allowed=["b"],
    misfits=[{"source": "c", "target": "c", "in_file": "float32 (1,)", "in_model": "float32 (2,)"}],
    non_finite=[{"source": "module.a", "count": 3}],
    others=["epoch"],
)


def written(folder: Path, report: dict[str, Any] | str) -> Path:
    (folder / REPORT).write_text(report if isinstance(report, str) else json.dumps(report))
    return folder


def tensors(folder: Path, *names: str) -> Path:
    safetensors.torch.save_file({name: torch.zeros(2) for name in names}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("report", [Report(), GOOD, replace(GOOD, missing=[f"b{n}" for n in range(MAX_LISTED + 1)])])
def test_the_childs_report_is_taken(tmp_path: Path, report: Report) -> None:
    assert take_report(written(tmp_path, report.as_json())) == report.as_json()


def test_half_a_surrogate_pair_in_a_name_is_reported_as_a_question_mark(tmp_path: Path) -> None:
    report = replace(GOOD, dropped=["odd \udcff"]).as_json()
    assert take_report(written(tmp_path, report))["dropped"] == ["odd ?"]


@pytest.mark.parametrize(
    "change",
    [
        {"fitted": 7},
        {"fitted": []},
        {"fitted_count": 2},
        {"fitted_count": "1"},
        {"missing_count": True},
        {"dropped_count": -1},
        {"fitted_count": 2**31, "fitted": [GOOD.fitted[0]] * MAX_LISTED},
        {"missing": [None]},
        {"missing": ["odd \udcff"]},
        {"misfits": ["c"]},
        {"misfits": [{"source": "c"}]},
        {"non_finite": [{"source": "module.a", "count": 2**63}]},
        {"fitted": [{**GOOD.fitted[0], "more": ""}]},
        {"format": None},
        {"key": 3},
        {"fits": True},
    ],
)
def test_a_report_that_the_child_does_not_write_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the report"):
        take_report(written(tmp_path, {**GOOD.as_json(), **change}))


@pytest.mark.parametrize("text", ["", "7", "[]", "{", "[" * 100_000])
def test_a_report_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        take_report(written(tmp_path, text))


def test_weights_with_the_tensors_of_the_report_are_taken(tmp_path: Path) -> None:
    take_weights(tensors(tmp_path, "a", "b", "twin of a"), GOOD.as_json(), tmp_path / "taken")
    assert list(safetensors.torch.load_file(tmp_path / "taken")) == ["a", "b", "twin of a"]


def test_more_tensors_and_longer_names_than_a_report_has_are_taken(tmp_path: Path) -> None:
    names = [f"{'long' * 200}{number}" for number in range(MAX_LISTED + 1)]
    report = Report(fitted=[{"source": name, "target": name, "widened_from": ""} for name in names])
    take_weights(tensors(tmp_path, *names), report.as_json(), tmp_path / "taken")
    assert (tmp_path / "taken").exists()


def without_weights(folder: Path) -> None:
    del folder


def of_other_tensors(folder: Path) -> None:
    tensors(folder, "a", "c")


def of_fewer_tensors(folder: Path) -> None:
    tensors(folder, "a")


def cut_off(folder: Path) -> None:
    encoded = (tensors(folder, "a", "b") / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(encoded[:-1])


def of_bytes(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"no weights")


def of_a_nested_header(folder: Path) -> None:
    header = b"[" * 100_000
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


def of_an_infinite_end(folder: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e999]}}'
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


def a_link(folder: Path) -> None:
    (tensors(folder, "a", "b") / WEIGHTS).rename(folder / "other")
    (folder / WEIGHTS).symlink_to(folder / "other")


@pytest.mark.parametrize(
    "forged",
    [
        without_weights,
        of_other_tensors,
        of_fewer_tensors,
        cut_off,
        of_bytes,
        of_a_nested_header,
        of_an_infinite_end,
        a_link,
    ],
)
def test_weights_that_are_not_those_of_the_report_are_refused(tmp_path: Path, forged: Callable[[Path], None]) -> None:
    forged(tmp_path)
    with pytest.raises(ValueError, match=WEIGHTS):
        take_weights(tmp_path, GOOD.as_json(), tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize("kind", ["pipe", "link", "second name", "folder", "nothing"])
def test_an_answer_that_is_no_plain_file_is_neither_followed_nor_waited_for(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / REPORT, tmp_path / "other"
    other.write_text("{}")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "second name":
        path.hardlink_to(other)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(ValueError, match=r"report\.json"), open_plain(path):
        pass
