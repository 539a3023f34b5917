"""The README's tour is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import stack_environment
from tests.support.patterns import write_mnist_like

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.timeout(900)


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_tour_of_the_readme_runs(home: Path, tmp_path: Path) -> None:
    blocks = python_blocks(README.read_text())
    assert len(blocks) >= 5
    root = home / "import" / "mnist"
    write_mnist_like(root / "MNIST" / "raw")
    script = tmp_path / "tour.py"
    script.write_text("\n".join(blocks))

    tour = subprocess.run(
        (sys.executable, script),
        env={**stack_environment(home), "MNIST_ROOT": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert tour.returncode == 0, tour.stderr
    # Its last two blocks print where an answer comes from, and what is wrong with a tensor.
    assert 'dataset_version: "datasets/tour/versions/v1"' in tour.stdout
    assert 'training_job: "trainingJobs/tour"' in tour.stdout
    assert "image" in tour.stdout.splitlines()[-1]
