"""A LightningModule as its documents have it, in Millrace's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shared.checkpoint import CheckpointRegistry
from shared.storage import ObjectStore
from tests.support.own_models import code_of_this_process, own
from tests.support.own_steps import LIGHTNING
from tests.unit.train_service.learners import CLASSES, WIDTH, commit_table
from tests.unit.train_service.learners import SPEC as TABLE
from tests.unit.train_service.worker.test_loop import entries, lose_and_begin, new_job, run_of, saved
from train_service.domain.spec import CheckpointPolicy, OwnModelFacts, TrainingSpec, settled
from train_service.records.metrics_log import metrics_page

POLICY = CheckpointPolicy(best_metric="val_loss", maximize=False)
SPEC = replace(TABLE, epochs=3, global_batch_size=70, checkpoint_every_steps=4, checkpoints=POLICY)
FACTS = OwnModelFacts(num_classes=CLASSES, is_step=True, has_optimizers=True)
# Two optimizers by hand, in a LightningModule.
BY_HAND = (
    LIGHTNING
    + """

class ByHand(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        first, last = self.body[0].parameters(), self.body[3].parameters()
        return torch.optim.SGD(first, lr=0.1), torch.optim.Adam(last, lr=0.02)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("train_loss", loss)
        return loss
"""
)


@pytest.fixture(autouse=True)
def here(store: ObjectStore) -> Iterator[None]:
    commit_table(store)
    with code_of_this_process():
        yield


def lit(store: ObjectStore, entry: str = "net:Lit", facts: OwnModelFacts = FACTS, **kwargs: Any) -> TrainingSpec:
    return settled(own(store, SPEC, BY_HAND, entry, kwargs=kwargs), facts, (WIDTH,))


@pytest.mark.parametrize("entry", ["net:Lit", "net:ByHand"])
def test_a_lightning_module_trains_unchanged_and_is_resumed_bit_for_bit(store: ObjectStore, entry: str) -> None:
    spec = lit(store, entry, replace(FACTS, is_manual=entry == "net:ByHand"))
    new_job(store, "trainingJobs/whole", spec)
    run_of(store, "trainingJobs/whole", spec=spec).run()
    whole = entries(store, "trainingJobs/whole")
    for at in (10, 12):
        name = f"trainingJobs/from-{at}"
        new_job(store, name, spec)
        entry_at = replace(whole[at], name=f"{name}/checkpoints/step-{at:08d}", attempt=1)
        CheckpointRegistry(store, name).commit(entry_at)
        lose_and_begin(store, name)
        run_of(store, name, attempt=2, spec=spec).run()
        again = entries(store, name)
        assert all(saved(store, again[step]) == saved(store, whole[step]) for step in again)
    best = CheckpointRegistry(store, "trainingJobs/whole").best()
    assert best is not None
    measured = {step: one.metrics["val_loss"] for step, one in whole.items() if one.metrics}
    assert sorted(measured) == [10, 20, 30]
    assert best.metrics["val_loss"] == min(measured.values()) < measured[10]
    points, _ = metrics_page(store, "trainingJobs/whole", 0, 100, "")
    assert points[0].values["train_loss"] == pytest.approx(points[0].values["loss"], rel=1e-6)


def test_trainer_attributes_that_it_reads_are_those_of_the_run(store: ObjectStore) -> None:
    spec = lit(store)
    new_job(store, "trainingJobs/whole", spec)
    run_of(store, "trainingJobs/whole", spec=spec).run()

    points, _ = metrics_page(store, "trainingJobs/whole", 0, 100, "")

    # `current_epoch` and `global_step`: 10 steps an epoch.
    assert [point.values["at"] for point in points] == [step // 10 + step for step in range(30)]
