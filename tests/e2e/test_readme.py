"""The README's tour is run as it stands."""

from __future__ import annotations

import subprocess

import pytest

pytestmark = pytest.mark.timeout(900)


def test_the_tour_of_the_readme_runs(tour: subprocess.CompletedProcess[str]) -> None:
    assert tour.returncode == 0, tour.stderr
    # Its last two blocks print where an answer comes from, and what is wrong with a tensor.
    assert 'dataset_version: "datasets/tour/versions/v1"' in tour.stdout
    assert 'training_job: "trainingJobs/tour"' in tour.stdout
    assert "image" in tour.stdout.splitlines()[-1]
