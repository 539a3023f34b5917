"""A sweep over the configuration of a user's own model: its trials have what follows from the code, and keep it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.code_bundle_registry import CodeBundles
from shared.errors import FailedPrecondition, InvalidArgument
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.support.own_models import code_of_this_process, own
from tests.unit.train_service.learners import CLASSES, WIDTH, commit_table
from tests.unit.train_service.learners import SPEC as TABLE
from tests.unit.train_service.sweeps.conftest import RATE
from tests.unit.train_service.worker.test_loop import begin, entries, run_of
from train_service.domain.spec import OwnModelFacts, TrainingSpec, settled, settled_base
from train_service.domain.sweep import GRID, Domain, SweepSpec
from train_service.jobs.deletion import Deletions
from train_service.jobs.own_code import ProgramCheck
from train_service.jobs.training_jobs import TrainingJobs
from train_service.sweeps.sweeps import SweepDeletions, Sweeps, Trials

WIDTHS = {"model.kwargs.width": Domain(kind=GRID, values=(4, 8)), RATE: Domain(kind=GRID, values=(0.02,))}


def sweeps_of(store: ObjectStore) -> Sweeps:
    commit_table(store)
    training = TrainingJobs(store, programs=ProgramCheck(store, OwnCode(is_trusted=True)))
    return Sweeps(store, training, SweepDeletions(store, Deletions(store)))


@pytest.mark.usefixtures("checked_here")
def test_each_trial_trains_the_model_of_its_own_configuration(store: ObjectStore) -> None:
    sweeps = sweeps_of(store)
    base = own(store, replace(TABLE, epochs=1, global_batch_size=70))

    view = sweeps.create("s", SweepSpec(base=base, parameters=WIDTHS), "", "digest", validate_only=False)
    trials = Trials(store, view.record)
    jobs = [trials.make(number) for number in (0, 1)]

    specs = [TrainingSpec.from_config(job.spec["training"]) for job in jobs]
    assert [(one.model.kwargs, one.optimizer.learning_rate) for one in specs] == [
        ({"width": 4}, 0.02),
        ({"width": 8}, 0.02),
    ]
    assert all((one.model.in_channels, one.model.num_classes) == (WIDTH, CLASSES) for one in specs)
    assert all((one.optimizer.name, one.loss.name) == ("AdamW", "cross_entropy") for one in specs)
    with code_of_this_process():
        begin(store, jobs[1].name)
        run_of(store, jobs[1].name, spec=specs[1]).run()
    assert entries(store, jobs[1].name)[10].code_bundle == base.model.code_bundle
    with pytest.raises(FailedPrecondition, match="delete the jobs first"):
        CodeBundles(store).delete(base.model.code_bundle)


def test_trials_whose_models_cannot_be_compared_are_refused(store: ObjectStore) -> None:
    base = own(store, TABLE)
    trials = [settled(base, OwnModelFacts(num_classes=classes), (WIDTH,)) for classes in (3, 4)]

    with pytest.raises(InvalidArgument, match="must have the same outputs"):
        settled_base(base, trials)
