"""The GPU check says plainly where there is none, and a check that fails stops no other."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_processes import CheckFailed


def test_without_a_gpu_it_says_so_in_one_sentence_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert gpu_check.main([]) == 2
    assert capsys.readouterr().out == f"{gpu_check.NO_GPU}\n"


def test_a_check_that_fails_stops_no_other_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def misses(_: gpu_check.Check) -> str:
        raise CheckFailed("the bits differ")

    def breaks(_: gpu_check.Check) -> str:
        raise ZeroDivisionError

    def holds(check: gpu_check.Check) -> str:
        check.figures["seen"] = 1
        return "all is well"

    for name, work in (("resume", misses), ("copies", breaks), ("nccl", holds)):
        monkeypatch.setitem(gpu_check.CHECKS, name, work)

    assert gpu_check.main(["--device", "cpu", "--only", "resume", "copies", "nccl"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["FAILED", "resume"], ["FAILED", "copies"], ["ok", "nccl"]]
    last = json.loads(lines[-1])
    assert (last["ok"], last["seen"], last["device"]) == (False, 1, "cpu")
    assert last["results"]["resume"] == "failed: CheckFailed: the bits differ"
    assert last["results"]["nccl"] == "ok"


def test_the_copies_are_really_made_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--only", "copies"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prefetch_speedup"] > 0
