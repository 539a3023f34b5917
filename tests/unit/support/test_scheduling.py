"""Which tests share a process of pytest-xdist."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.scheduling import LEARNING, OTHER_FORKING, BySuite

ROOT = Path(__file__).parents[3]


@pytest.fixture
def by_suite() -> BySuite:
    # Made without xdist's own set-up, which needs its processes: only scopes are asked for.
    scheduling = BySuite.__new__(BySuite)
    scheduling.config = SimpleNamespace(rootpath=ROOT)
    return scheduling


@pytest.mark.parametrize(
    ("file", "scope"),
    [
        ("tests/unit/train_service/learning/test_learner.py", LEARNING),
        ("tests/unit/train_service/worker/test_text_model.py", OTHER_FORKING),
        ("tests/unit/train_service/learning/test_metrics.py", "tests/unit/train_service/learning/test_metrics.py"),
        ("tests/integration/train_service/test_runs.py", "tests/integration/train_service"),
        ("tests/fault/test_data_kills_by_stage.py", "tests/fault_test_data"),
    ],
)
def test_files_that_share_a_process_have_one_scope(by_suite: BySuite, file: str, scope: str) -> None:
    assert by_suite._split_scope(f"{file}::test_a") == scope


def test_all_files_that_fork_ranks_share_two_processes(by_suite: BySuite) -> None:
    folder = ROOT / "tests" / "unit" / "train_service"
    forking = [file for file in folder.rglob("test_*.py") if "in_ranks import" in file.read_text()]
    assert len(forking) > 10
    scopes = {by_suite._split_scope(f"{file.relative_to(ROOT)}::test_a") for file in forking}
    assert scopes == {LEARNING, OTHER_FORKING}
