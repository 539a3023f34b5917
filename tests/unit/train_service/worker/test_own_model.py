"""A model of a user's own code in Millrace's loop: it is resumed bit for bit, and its checkpoints name its code."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.checkpoint import CheckpointRegistry, load_checkpoint, resolve
from shared.checkpoint.format import FORMAT_OWN_MODEL, MANIFEST
from shared.errors import FailedPrecondition, Internal, MillraceError
from shared.models import build_model
from shared.models.loaded import LoadedModel
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.own_models import NET, code_of_this_process, own
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.learners import (
    CLASSES,
    STEPS,
    WIDTH,
    batch,
    commit_table,
    learner,
    resumed,
    trained,
    vectors,
)
from tests.unit.train_service.learners import SPEC as TABLE
from tests.unit.train_service.worker.test_loop import config_of, entries, lose_and_begin, new_job, run_of, saved
from train_service.domain.spec import FSDP, OptimizerSpec, OwnModelFacts, Placement, TrainingSpec, settled
from train_service.learning.ranks import Ranks
from train_service.records.logs import LogShipper
from train_service.worker.heartbeat import HeartbeatSender
from train_service.worker.loop import train_loop, watch_memory

# A loss and a metric of its own, noise of three generators, and frozen layers.
SOURCE = (
    NET
    + """
import random

import numpy as np


class Noisy(Net):
    def __init__(self, width=16):
        super().__init__(width, dropout=0.2)
        for parameter in self.body[0].parameters():
            parameter.requires_grad = False

    def forward(self, inputs):
        noise = 0.01 * (random.random() + float(np.random.rand())) if self.training else 0.0
        return super().forward(inputs + noise)

    def loss(self, outputs, labels):
        return nn.functional.cross_entropy(outputs, labels, reduction="none") + 0.01 * outputs.square().mean(1)

    def metrics(self, outputs, labels):
        return {"margin": outputs.max(1).values - outputs.min(1).values}
"""
)
FACTS = OwnModelFacts(num_classes=CLASSES, has_loss=True, metrics=("margin",))
SPEC = replace(TABLE, epochs=2, global_batch_size=70, checkpoint_every_steps=4, num_workers=2)


@pytest.fixture(autouse=True)
def here(store: ObjectStore) -> Iterator[None]:
    commit_table(store)
    with code_of_this_process():
        yield


def noisy(store: ObjectStore, **change: Any) -> TrainingSpec:
    return settled(own(store, replace(SPEC, **change), SOURCE, "net:Noisy"), FACTS, (WIDTH,))


def test_a_run_that_is_resumed_ends_with_bit_for_bit_the_same_weights_and_state(store: ObjectStore) -> None:
    spec = noisy(store)
    new_job(store, "trainingJobs/whole", spec)
    run_of(store, "trainingJobs/whole", spec=spec).run()
    whole = entries(store, "trainingJobs/whole")
    name = "trainingJobs/resumed"
    new_job(store, name, spec)
    entry = replace(whole[12], name=f"{name}/checkpoints/step-00000012", attempt=1)
    CheckpointRegistry(store, name).commit(entry)
    lose_and_begin(store, name)

    run_of(store, name, attempt=2, spec=spec).run()

    again = entries(store, name)
    assert sorted(again) == [step for step in sorted(whole) if step >= 12]
    assert all(saved(store, again[step]) == saved(store, whole[step]) for step in again)
    assert whole[20].metrics["validation_margin"] > 0


def test_a_checkpoint_names_the_code_and_only_a_process_that_loaded_it_builds_the_model(store: ObjectStore) -> None:
    spec = noisy(store, epochs=1)
    new_job(store, "trainingJobs/j", spec)
    run_of(store, "trainingJobs/j", spec=spec).run()

    entry = resolve(store, "checkpoint", "trainingJobs/j")
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    assert (entry.code_bundle, entry.model_entry) == (spec.model.code_bundle, "net:Noisy")
    assert checkpoint.content.model == spec.model
    assert FORMAT_OWN_MODEL.encode() in store.get(f"{entry.folder}/{MANIFEST}")
    model = LoadedModel(checkpoint)
    rows = vectors(5).astype(np.float32)
    logits, probabilities, _ = model(rows)
    assert np.array_equal(logits, model.module(torch.from_numpy(rows)).detach().numpy())
    assert probabilities.sum(1) == pytest.approx(np.ones(5), abs=1e-5)
    with code_of_this_process(), pytest.raises(FailedPrecondition) as refused:
        build_model(checkpoint.content.model)
    assert refused.value.specific_reason == "CODE_NOT_LOADED"


def test_an_error_of_the_models_code_is_reported_with_the_rank_and_the_line(store: ObjectStore) -> None:
    source = (
        NET + "class Broken(Net):\n    def forward(self, inputs):\n        return self.body(inputs) / inputs.nothing\n"
    )
    spec = settled(own(store, SPEC, source, "net:Broken"), replace(FACTS, has_loss=False, metrics=()), (WIDTH,))
    new_job(store, "trainingJobs/j", spec)

    with pytest.raises(Internal) as raised:
        train_loop(config_of(store, "trainingJobs/j", spec=spec), Ranks(0, 1, torch.device("cpu")))

    assert "AttributeError on rank 0 at step 0 at net.py:21" in raised.value.message


def on_two_ranks(ranks: Ranks, settings: StoreSettings, spec: TrainingSpec) -> dict[str, Any]:
    from shared.code_bundle_registry import load_code

    load_code(open_store(settings), spec.model.code_bundle)
    sharded = replace(spec, placement=Placement(parallel=FSDP))
    made = learner(spec, ranks)
    return {
        "whole": trained(spec, range(STEPS), ranks).weights(),
        "resumed": resumed(spec, ranks),
        "sharded": trained(sharded, range(STEPS), ranks).weights(),
        "sharded, resumed": resumed(sharded, ranks),
        "described": made.describe(ranks.add(made.step(batch(ranks))).result()),
    }


def test_on_two_ranks_it_learns_as_on_one_and_is_resumed_bit_for_bit(store: ObjectStore, tmp_path: Path) -> None:
    # Without noise and BatchNorm, which are of a rank.
    source = (
        SOURCE.replace("nn.BatchNorm1d(width), ", "").replace("0.2)", "0.0)").replace("0.01 * (random", "0 * (random")
    )
    spec = settled(own(store, TABLE, source, "net:Noisy"), FACTS, (WIDTH,))
    spec = replace(spec, optimizer=OptimizerSpec(name="SGD", learning_rate=0.05))
    folder = tmp_path / "ranks"
    folder.mkdir()
    results, _ = in_ranks(2, on_two_ranks, folder, store.settings, spec)
    alone = on_two_ranks(Ranks(0, 1, torch.device("cpu")), store.settings, spec)

    for name, tensor in results["whole"].items():
        assert torch.equal(results["resumed"][name], tensor)
        assert torch.equal(results["sharded, resumed"][name], results["sharded"][name])
        torch.testing.assert_close(results["sharded"][name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone["whole"][name], tensor, rtol=1e-4, atol=1e-5)
    assert results["described"] == pytest.approx(alone["described"], rel=1e-4)
    assert set(results["described"]) == {"loss", "accuracy", "margin"}
    # Frozen layers stay as the seed drew them.
    torch.manual_seed(spec.seed)
    drawn = build_model(spec.model).state_dict()
    assert torch.equal(results["whole"]["body.0.weight"], drawn["body.0.weight"])
    assert not torch.equal(results["whole"]["body.3.weight"], drawn["body.3.weight"])


def test_a_model_that_fills_the_memory_ends_its_process_with_the_reason(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = Placement(resources_per_worker={"memory": 1.0})  # what this process is over from the first moment
    spec = noisy(store, placement=placement)
    ends, killed = queue.SimpleQueue[MillraceError](), queue.SimpleQueue[int]()
    monkeypatch.setattr(os, "kill", lambda _, number: killed.put(number))
    with (
        LogShipper(store, "trainingJobs/a", 1, 3) as shipper,
        HeartbeatSender(3) as heartbeat,
        watch_memory(spec, 3, 1, heartbeat, shipper, ends.put),
    ):
        error = ends.get(timeout=60)
        assert killed.get(timeout=60) == signal.SIGKILL
    assert error.specific_reason == "WORKER_MEMORY"
    assert error.message.startswith("rank 3 has ")
    assert "the limit of 0 MiB that placement.resources_per_worker[memory] sets" in error.message
    logged = b"".join(store.get(one.key) for one in store.list("trainingJobs/a/logs"))
    assert b"more than the limit of 0 MiB" in logged
