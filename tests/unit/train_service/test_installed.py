"""What an installed package registers is found by its name, checked by the service, and trained with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.settings import LOSSES, MODELS, TRAINING_STEPS, installed_names
from tests.support.example import install_example
from tests.unit.train_service.learners import CLASSES, INPUT, NUMBERS, ROWS, SPEC, WIDTH, batch, learner, trained
from train_service.domain.spec import LossSpec, TrainingSpec
from train_service.jobs import model_check
from train_service.jobs.model_check import check_model


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example(tmp_path_factory.mktemp("example"))


@pytest.fixture(autouse=True)
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(site)
    yield
    for name in [name for name in sys.modules if name.startswith("millrace_example")]:
        del sys.modules[name]


TWO_BRANCHES = ModelSpec(builder="two-branches", in_channels=WIDTH, num_classes=CLASSES, kwargs={"width": 5})


def refusal(spec: TrainingSpec) -> tuple[str, str]:
    """The field and what is said of it."""
    with pytest.raises(InvalidArgument) as refused:
        check_model(spec, INPUT)
    ((path, text),) = refused.value.fields
    return path, text


@pytest.mark.timed
def test_a_package_whose_import_takes_long_is_no_large_model(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is on which it is imported."""
    slow = site / "millrace_example_slow.py"
    work = "import time\ntime.sleep(0.5)\nend = time.thread_time() + 0.5\nwhile time.thread_time() < end: pass\n"
    slow.write_text(work + "from millrace_example import TwoBranches\n")
    info = site / "millrace_example_slow-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: millrace-example-slow\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[millrace.models]\nslow-to-import = millrace_example_slow:TwoBranches\n")
    check_model(replace(SPEC, model=TWO_BRANCHES), INPUT)  # torch itself imports what it needs for a first trial
    monkeypatch.setattr(model_check, "LIMIT_S", 0.3)

    check_model(replace(SPEC, model=replace(TWO_BRANCHES, builder="slow-to-import")), INPUT)


def test_a_model_a_loss_and_a_step_of_a_package_train_together() -> None:
    spec = replace(SPEC, model=TWO_BRANCHES, loss=LossSpec(name="focal", kwargs={"gamma": 1.5}), training_step="mixup")
    spec = replace(spec, optimizer=replace(spec.optimizer, learning_rate=0.05))
    check_model(spec, INPUT)
    model = learner(spec)

    losses = [model.describe(model.step(batch()))["loss"] for _ in range(40)]

    assert losses[-1] < losses[0]
    assert {name.partition(".")[0] for name in model.weights()} == {"deep", "wide"}


def test_noise_of_a_package_is_repeated_by_a_resumed_run() -> None:
    spec = replace(SPEC, training_step="mixup", accumulation_steps=2)
    half = trained(spec, range(3))
    rest = learner(spec, prepared=False)
    rest.load(half.weights(), half.state())
    rest.prepare()
    for step in range(3, 6):
        rest.step(batch(step=step))

    whole = trained(spec, range(6)).weights()
    assert all(torch.equal(whole[name], tensor) for name, tensor in rest.weights().items())


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_or_a_loss_may_report_the_mean(parts: int) -> None:
    ours = trained(replace(SPEC, accumulation_steps=parts), range(4))
    means = trained(replace(SPEC, accumulation_steps=parts, training_step="plain"), range(4))
    numbers = trained(replace(NUMBERS, accumulation_steps=parts), range(4))
    squares = trained(replace(NUMBERS, accumulation_steps=parts, loss=LossSpec(name="mean-squares")), range(4))

    for one, other in ((ours, means), (numbers, squares)):
        for name, tensor in one.weights().items():
            torch.testing.assert_close(other.weights()[name], tensor, rtol=1e-4, atol=1e-5)
    assert squares.step(batch(spec=NUMBERS))[:2] == pytest.approx(numbers.step(batch(spec=NUMBERS))[:2], rel=1e-4)


@pytest.mark.parametrize(
    ("path", "said", "change"),
    [
        ("model.builder", "two-branches", {"model": replace(TWO_BRANCHES, builder="no-such")}),
        ("model.builder", "torch.nn.Module", {"model": replace(TWO_BRANCHES, builder="no-model", kwargs={})}),
        ("model.kwargs", "depth", {"model": replace(TWO_BRANCHES, kwargs={"depth": 3})}),
        ("model.builder", "does not take inputs", {"model": replace(TWO_BRANCHES, in_channels=WIDTH + 1)}),
        ("loss.name", "focal", {"loss": LossSpec(name="no-such")}),
        ("loss.kwargs", "alpha", {"loss": LossSpec(name="focal", kwargs={"alpha": 1})}),
        ("loss.name", "one number per row", {"loss": LossSpec(name="crooked")}),
        ("training_step", "mixup", {"training_step": "no-such"}),
        ("training_step", "importing millrace_example.absent:step failed", {"training_step": "broken"}),
    ],
)
def test_a_name_that_no_package_has_or_that_fails_is_refused_by_its_field(
    path: str, said: str, change: dict[str, Any]
) -> None:
    field, text = refusal(replace(SPEC, **change))

    assert field == f"spec.{path}"
    assert said in text


def test_a_package_reaches_another_process_by_its_path(site: Path) -> None:
    """As the environment of a Ray cluster does it."""
    code = "from shared.settings import MODELS, installed_names; print(*installed_names(MODELS))"
    environment = {**os.environ, "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}
    reported = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert "two-branches" in reported.stdout.split()


def test_all_that_is_installed_is_known_by_name() -> None:
    assert {"two-branches", "no-model"} <= set(installed_names(MODELS))
    assert {"focal", "mean-squares", "crooked"} <= set(installed_names(LOSSES))
    assert {"mixup", "plain", "broken"} <= set(installed_names(TRAINING_STEPS))
    assert build_model(TWO_BRANCHES)(torch.zeros(ROWS, WIDTH)).shape == (ROWS, CLASSES)


def test_without_the_package_its_names_are_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(site)])

    field, text = refusal(replace(SPEC, model=TWO_BRANCHES))

    assert (field, "mlp" in text, "millrace.models" in text) == ("spec.model.builder", True, True)
