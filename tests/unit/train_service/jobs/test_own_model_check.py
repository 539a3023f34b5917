"""What a user's own model is found to be, and why one is refused.

A service looks at it in a child process, which takes seconds to import torch. So what the child finds is tried here in
this process, and some of it in a child: a model that is taken, one that FSDP shards, and code that answers itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shared.errors import FailedPrecondition, InvalidArgument
from shared.jobs import Jobs, JobState
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.support.code_folders import write_files
from tests.support.own_models import NET, code_of_this_process, own, spec_of
from tests.support.own_steps import CLASSIFIER, GAN
from tests.unit.train_service.learners import CLASSES, NUMBERS, SPEC, WIDTH, commit_table
from train_service.domain.spec import (
    FLOAT16,
    FSDP,
    OWN,
    EarlyStopping,
    LossSpec,
    OptimizerSpec,
    OwnModelFacts,
    Placement,
    TrainingSpec,
    settled,
)
from train_service.jobs.own_code import ProgramCheck
from train_service.jobs.own_model_child import inspect_model
from train_service.jobs.training_jobs import TrainingJobs
from train_service.records.event_log import TRAIN_KIND

OWN_LOSS = """
class WithLoss(Net):
    def loss(self, outputs, labels):
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    def metrics(self, outputs, labels):
        return {"margin": outputs.max(1).values, "share": (outputs.argmax(1) == 0).float().mean()}
"""


CLASS = "\nclass A(Net):\n    {}\n"


@pytest.fixture
def jobs(store: ObjectStore) -> TrainingJobs:
    commit_table(store)
    return TrainingJobs(store, programs=ProgramCheck(store, OwnCode(is_trusted=True)))


def refusal(jobs: TrainingJobs, spec: TrainingSpec) -> tuple[str, str]:
    """The field and what is said of it."""
    with pytest.raises(InvalidArgument) as refused:
        jobs.checked(spec)
    ((path, text),) = refused.value.fields
    return path, text


def test_omitted_model_loss_and_optimizer_are_filled_from_the_version_and_the_code(
    jobs: TrainingJobs, store: ObjectStore
) -> None:
    found = jobs.checked(own(store, SPEC))

    assert (found.model.in_channels, found.model.num_classes) == (WIDTH, CLASSES)
    assert (found.loss.name, found.optimizer.name, found.metrics) == ("cross_entropy", "AdamW", ("accuracy",))


@pytest.mark.usefixtures("checked_here")
def test_a_loss_and_metrics_of_the_model_take_the_place_of_the_specifications(
    jobs: TrainingJobs, store: ObjectStore
) -> None:
    spec = own(store, SPEC, NET + OWN_LOSS, "net:WithLoss", kwargs={"width": 4})
    stopping = EarlyStopping(metric="validation_margin", maximize=True, patience=2)

    found = jobs.checked(replace(spec, early_stopping=stopping))

    assert (found.loss.name, found.metrics) == (OWN, ("accuracy", "margin", "share"))
    assert jobs.checked(found) == found


def test_numbers_are_learnt_by_a_model_with_as_many_outputs(tmp_path: Path) -> None:
    facts = looked_at(tmp_path, NET, "net:build", base=NUMBERS, kwargs={"classes": 1})["facts"]
    spec = spec_of(f"codeBundles/{'0' * 64}", NUMBERS, "net:build")

    found = settled(spec, OwnModelFacts.from_config(facts), (WIDTH,))

    assert (found.model.num_classes, found.loss.name, found.metrics) == (1, "mse", ("mae",))


def test_code_that_the_meta_device_does_not_stand_is_tried_on_the_cpu(tmp_path: Path) -> None:
    source = (
        NET
        + """
import numpy as np


class Scaled(Net):
    def forward(self, inputs):
        return self.body(inputs * torch.from_numpy(np.ones(6, np.float32)))
"""
    )
    assert looked_at(tmp_path, source, "net:Scaled")["facts"]["num_classes"] == CLASSES
    sharded = looked_at(tmp_path, source, "net:Scaled", placement=Placement(parallel=FSDP), num_workers=2)
    assert (sharded["field"], "meta device" in sharded["problem"]) == ("spec.placement.parallel", True)


def test_a_model_that_fsdp_can_shard_is_taken(jobs: TrainingJobs, store: ObjectStore) -> None:
    spec = replace(own(store, SPEC), placement=Placement(parallel=FSDP), num_workers=2)

    assert jobs.checked(spec).placement.parallel == FSDP


@pytest.fixture
def no_group_left() -> Iterator[None]:
    """The process group that a child would end with is destroyed."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group_left")
def test_a_model_that_fsdp_cannot_shard_is_refused_with_a_remedy(tmp_path: Path) -> None:
    source = (
        NET
        + """
class Scalar(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.body(inputs) * self.scale
"""
    )

    answer = looked_at(tmp_path, source, "net:Scalar", placement=Placement(parallel=FSDP), num_workers=2)

    assert (answer["field"], "use DDP" in answer["problem"]) == ("spec.placement.parallel", True)


@pytest.mark.parametrize(
    ("path", "said", "source", "change"),
    [
        ("model.entry", "net.py:18: TypeError", "", {"kwargs": {"depth": 3}}),
        ("model.entry", "must make a torch.nn.Module", "def made(config): return 3", {"entry": "net:made"}),
        ("model.entry", "no parameter", "def made(): return nn.Flatten()", {"entry": "net:made"}),
        ("model.entry", "does not take inputs of (2, 6)", "def made(): return nn.Linear(5, 3)", {"entry": "net:made"}),
        ("model.entry", "(rows, classes or numbers)", "def made(): return nn.LSTM(6, 3)", {"entry": "net:made"}),
        ("model.num_classes", "output is (rows, 3)", "", {"num_classes": 4}),
        ("model.num_classes", "one output", "", {"kwargs": {"classes": 1}}),
        ("optimizer.name", "torch.optim", "", {"optimizer": OptimizerSpec(name="Adams")}),
        (
            "model.entry",
            "shape (3,) for 2 rows",
            CLASS.format("def loss(self, outputs, labels): return torch.zeros(3)"),
            {},
        ),
        ("model.entry", "net.py:21: ZeroDivisionError", CLASS.format("def loss(self, outputs, labels): 1 / 0"), {}),
        ("model.entry", "name of Millrace's", CLASS.format("def metrics(self, a, b): return {'accuracy': b}"), {}),
        ("model.entry", "each an identifier", CLASS.format("def metrics(self, a, b): return {'a b': b}"), {}),
    ],
)
def test_a_faulty_own_model_is_refused_by_its_field(
    tmp_path: Path, path: str, said: str, source: str, change: dict[str, Any]
) -> None:
    entry = change.get("entry", "net:A" if "class A" in source else "net:build")

    answer = looked_at(tmp_path, NET + source, entry, **{key: one for key, one in change.items() if key != "entry"})

    assert answer["field"] == f"spec.{path}"
    assert said in answer["problem"]


@pytest.mark.usefixtures("checked_here")
def test_an_option_that_needs_a_measured_metric_is_refused_without_one(jobs: TrainingJobs, store: ObjectStore) -> None:
    stopping = EarlyStopping(metric="validation_margin", maximize=True, patience=2)

    path, text = refusal(jobs, replace(own(store, SPEC), early_stopping=stopping))

    assert (path, "validation_accuracy" in text) == ("spec.early_stopping.metric", True)
    assert "has no module 'other'" in refusal(jobs, own(store, SPEC, entry="other:build"))[1]


def test_without_trust_no_code_is_looked_at(store: ObjectStore) -> None:
    commit_table(store)

    with pytest.raises(FailedPrecondition) as refused:
        TrainingJobs(store).checked(own(store, SPEC))

    assert refused.value.specific_reason == "OWN_CODE_OFF"


def test_a_specification_names_a_builder_or_an_entry(jobs: TrainingJobs, store: ObjectStore) -> None:
    spec = own(store, SPEC)

    both = refusal(jobs, replace(spec, model=replace(spec.model, builder="mlp")))
    with pytest.raises(InvalidArgument) as neither:
        jobs.checked(replace(spec, model=replace(spec.model, entry="")))
    no_bundle = refusal(jobs, replace(spec, model=replace(spec.model, code_bundle="codeBundles/x")))

    assert both[0] == "spec.model.builder"
    assert "spec.model.entry" in [field for field, _ in neither.value.fields]
    assert no_bundle[0] == "spec.model.code_bundle"


def looked_at(tmp_path: Path, source: str, entry: str, base: TrainingSpec = SPEC, **change: Any) -> dict[str, Any]:
    """What the child says of it, in this process."""
    write_files(tmp_path, {"net.py": source})
    spec = spec_of(f"codeBundles/{'0' * 64}", base, entry, **change)
    with code_of_this_process():
        sys.path.append(str(tmp_path))
        return inspect_model({"spec": spec.as_config(), "row_shape": [WIDTH], "total_steps": 10}, str(tmp_path))


@pytest.mark.usefixtures("checked_here")
def test_a_training_step_brings_its_optimizers_and_measures_what_it_logs(
    jobs: TrainingJobs, store: ObjectStore
) -> None:
    spec = own(store, SPEC, CLASSIFIER, "net:Classifier", kwargs={"width": 8})

    found = jobs.checked(replace(spec, early_stopping=EarlyStopping(metric="val_f1", maximize=True, patience=1)))

    assert (found.model.num_classes, found.model.is_step, found.metrics) == (CLASSES, True, ())
    assert (found.loss.name, found.optimizer.name) == (OWN, OWN)


def test_of_a_gan_the_classes_must_be_said(tmp_path: Path) -> None:
    path, said = (looked_at(tmp_path, GAN, "net:GAN")[key] for key in ("field", "problem"))
    facts = looked_at(tmp_path, GAN, "net:GAN", num_classes=CLASSES)["facts"]

    assert (path, "set it" in said) == ("spec.model.num_classes", True)
    assert (facts["is_step"], facts["is_manual"], facts["has_optimizers"]) == (True, True, True)


@pytest.mark.parametrize(
    ("path", "said", "source", "change"),
    [
        ("loss.name", "training_step of its own", "", {"loss": LossSpec(name="cross_entropy")}),
        ("metrics", "logs its own", "", {"metrics": ("f1",)}),
        ("optimizer.name", "configure_optimizers", "", {"optimizer": OptimizerSpec(name="SGD")}),
        ("precision", "optimizes by hand", "self.automatic_optimization = False", {"precision": FLOAT16}),
        ("accumulation_steps", "optimizes by hand", "self.automatic_optimization = False", {"accumulation_steps": 2}),
        (
            "placement.parallel",
            "optimizes by hand",
            "self.automatic_optimization = False",
            {"placement": Placement(parallel=FSDP)},
        ),
    ],
)
def test_an_option_that_excludes_a_training_step_is_refused_by_its_field(
    tmp_path: Path, path: str, said: str, source: str, change: dict[str, Any]
) -> None:
    text = CLASSIFIER.replace("self.epochs = 0", f"self.epochs = 0\n        {source}")

    answer = looked_at(tmp_path, text, "net:Classifier", **change)

    assert answer["field"] == f"spec.{path}"
    assert said in answer["problem"]


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ("optimizer_step would never be called", "def optimizer_step(self, *arguments): pass"),
        ("gives NoneType", "def configure_optimizers(self): pass"),
        ("several optimizers", "def configure_optimizers(self): return [torch.optim.SGD(self.parameters())] * 2"),
        ("net.py:58: AttributeError", "def configure_optimizers(self): return self.nothing"),
        (
            "ReduceLROnPlateau without monitor",
            "def configure_optimizers(self):\n"
            "        one = torch.optim.SGD(self.parameters())\n"
            "        return [one], [torch.optim.lr_scheduler.ReduceLROnPlateau(one)]",
        ),
    ],
)
def test_a_method_that_a_training_step_may_not_have_is_refused(tmp_path: Path, said: str, method: str) -> None:
    answer = looked_at(tmp_path, CLASSIFIER + f"\n\nclass A(Classifier):\n    {method}\n", "net:A")

    assert answer["field"] == "spec.model.entry"
    assert said in answer["problem"]


# Answers in place of the check, by the descriptor that the child keeps open.
FORGED = """
import json, os, stat

for number in range(3, 64):
    try:
        if stat.S_ISFIFO(os.fstat(number).st_mode):
            os.write(number, json.dumps({"problem": "", "facts": FACTS}).encode())
    except OSError:
        pass
os._exit(0)
"""


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ('{"num_classes": "many", "metrics": []}', "spec.model.entry"),
        ('{"num_classes": 10000000, "metrics": []}', "spec.model.num_classes"),
        ('{"num_classes": 3, "metrics": ["../x"]}', "spec.model.entry"),
    ],
)
def test_code_that_answers_its_check_itself_gets_no_job_of_nonsense(
    jobs: TrainingJobs, store: ObjectStore, facts: str, field: str
) -> None:
    spec = own(store, SPEC, FORGED.replace("FACTS", facts), "net:build")

    assert refusal(jobs, spec)[0] == field


@pytest.mark.usefixtures("checked_here")
def test_a_job_does_not_go_on_where_no_code_of_callers_runs_any_more(jobs: TrainingJobs, store: ObjectStore) -> None:
    made = jobs.create("j", own(store, SPEC), "", "digest", validate_only=False)
    Jobs(store, TRAIN_KIND).transition(made.record.name, lambda job: replace(job, state=JobState.FAILED))

    with pytest.raises(FailedPrecondition) as refused:
        TrainingJobs(store).resume(made.record.name, "")

    assert refused.value.specific_reason == "OWN_CODE_OFF"
    assert jobs.resume(made.record.name, "").record.state is JobState.RECOVERING
