"""docs/own-models.md, as a reader follows it: its folder is pushed, trained, deployed and asked."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace_client import Millrace, connect
from millrace_client.stack.record import read_record
from tests.support.command import run_millrace
from tests.support.patterns import TEST_ROWS, patterns

PAGE = Path(__file__).parents[2] / "docs" / "own-models.md"

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def millrace(home: Path, tour: subprocess.CompletedProcess[str]) -> Iterator[Millrace]:
    """Whose store has the dataset of the tutorial."""
    assert tour.returncode == 0, tour.stderr
    record = read_record(home)
    assert record is not None
    addresses = record.addresses
    with connect(data=addresses["data"], train=addresses["train"], inference=addresses["inference"]) as connected:
        yield connected


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "project"
    folder.mkdir()
    for name, code in re.findall(r"`project/(\w+\.py)`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / name).write_text(code)
    return folder


def command(home: Path, project: Path, beginning: str) -> list[Any]:
    """Run the page's command, with --json. Return the documents that it prints."""
    (line,) = [
        one for one in re.findall(r"^\$ millrace (.*)$", PAGE.read_text(), re.MULTILINE) if one.startswith(beginning)
    ]
    words = [
        str(project) + word.removeprefix("./project") if "./project" in word else word for word in shlex.split(line)
    ]
    done = run_millrace(home, *words, "--json")
    assert done.returncode == 0, done.stderr
    try:
        return [json.loads(done.stdout)]
    except json.JSONDecodeError:
        return [json.loads(one) for one in done.stdout.splitlines()]


@pytest.mark.long
def test_the_page_s_model_is_trained_deployed_and_answers_with_its_digest(
    home: Path, project: Path, millrace: Millrace
) -> None:
    command(home, project, "train create cells")
    job = millrace.train.get_training_job("trainingJobs/cells")
    assert job.spec.model.entry == "net:build"
    bundle = job.spec.model.code_bundle
    command(home, project, "deploy cells")

    images, labels = patterns(TEST_ROWS, seed=TEST_ROWS)
    answers = list(millrace.inference.infer_many("cells", ({"image": image[None]} for image in images)))

    assert answers[0].lineage.code_bundle == bundle == millrace.train.push_code(project).name
    given = np.concatenate([answer.outputs["label"] for answer in answers])
    assert (given == labels).mean() > 0.5
    assert {"validation_accuracy", "validation_certainty"} <= set(
        list(millrace.train.list_checkpoints("trainingJobs/cells"))[-1].metrics
    )


@pytest.mark.long
def test_the_page_s_training_step_is_trained_and_its_checkpoints_are_ranked_by_logged_metrics(
    home: Path, project: Path, millrace: Millrace
) -> None:
    command(home, project, "train create averaged")

    job = millrace.train.get_training_job("trainingJobs/averaged")
    found = {one.name: one.metrics for one in millrace.train.list_checkpoints(job.name) if one.metrics}
    assert found[job.best_checkpoint]["val_accuracy"] == max(one["val_accuracy"] for one in found.values()) > 0.3
