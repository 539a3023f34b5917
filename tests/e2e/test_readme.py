"""The Python of the README, of the tutorial and of the page about tables is run as it stands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.page_code import run_python_of

pytestmark = pytest.mark.timeout(1800)


def test_the_tutorial_runs(tour: subprocess.CompletedProcess[str]) -> None:
    assert tour.returncode == 0, tour.stderr
    # Its last two blocks print where an answer comes from, and what is wrong with a tensor.
    assert 'dataset_version: "datasets/tour/versions/v1"' in tour.stdout
    assert 'training_job: "trainingJobs/tour"' in tour.stdout
    assert "image" in tour.stdout.splitlines()[-1]


def test_the_examples_of_the_readme_run(home: Path, tmp_path: Path) -> None:
    ended = run_python_of("README.md", home, tmp_path)

    assert ended.returncode == 0, ended.stderr
    # It prints what was chosen for the version alone, and where the answer comes from.
    assert "model.builder = " in ended.stdout
    assert 'training_job: "trainingJobs/mnist"' in ended.stdout


def test_the_page_about_tables_runs(home: Path, tmp_path: Path) -> None:
    ended = run_python_of("docs/how-to/tables.md", home, tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert "1 row kept aside" in ended.stdout
    assert "model.builder = mlp" in ended.stdout
