"""The first commands of docs/sweeps.md are run as they stand: digits, a sweep, its best trial deployed and asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import run_millrace, stack_environment
from tests.support.patterns import write_mnist_like

PAGE = Path(__file__).parents[2] / "docs" / "sweeps.md"

pytestmark = [pytest.mark.timeout(900), pytest.mark.chaos]


def console_blocks(text: str) -> list[str]:
    """What is typed in each, as a script."""
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(r"^\$ ", "", block, flags=re.MULTILINE) for block in blocks]


def test_the_commands_of_the_page_about_sweeps_end_in_an_answer_of_the_best_trial(home: Path, tmp_path: Path) -> None:
    root = home / "import" / "sweeps"
    write_mnist_like(root / "MNIST" / "raw")
    commands = console_blocks(PAGE.read_text())[0]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    page = subprocess.run(
        ("bash", "-euxc", commands),
        env={**stack_environment(home), "PATH": path, "MNIST_ROOT": str(root), "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )

    print(page.stdout)
    assert page.returncode == 0, page.stderr
    shown = json.loads(run_millrace(home, "train", "sweeps", "rates", "--json").stdout)
    assert shown["state"] == "STATE_SUCCEEDED"
    assert len(shown["trials"]) == 4
    assert (tmp_path / "trial.html").stat().st_size > 0
    # What answered is the best of the trials.
    asked = run_millrace(
        home, "predict", "digits", "--dataset", "datasets/digits/versions/v1", "--limit", "1", "--json"
    )
    assert json.loads(asked.stdout)["lineage"]["training_job"] == shown["best_training_job"]
