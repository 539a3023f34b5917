"""A model of several inputs in Millrace's loop: the tensors that it gets, resumed bit for bit, and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shared.checkpoint import CheckpointRegistry, load_checkpoint, resolve
from shared.checkpoint.format import FORMAT_SEVERAL_INPUTS, MANIFEST
from shared.code_bundle_registry import load_code
from shared.dataset_version import load_version
from shared.errors import InvalidArgument
from shared.models.inputs import arrays_of
from shared.models.loaded import LoadedModel
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.transforms import batch_of
from shared.transforms.records import model_input
from tests.support.own_models import code_of_this_process
from tests.support.several_inputs import (
    FACTS,
    INPUTS,
    ROWS,
    TOKENS,
    VALIDATION_ROWS,
    VERSION,
    arrays,
    asked,
    commit_rows,
    logits_of,
    spec_of_four,
    table,
)
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.worker.test_loop import entries, events, lose_and_begin, new_job, run_of, saved
from train_service.domain.spec import FSDP, OptimizerSpec, Placement, TrainingSpec, settled
from train_service.learning.learner import Learner
from train_service.learning.ranks import Ranks
from train_service.loading.loader import Batch, LoaderFactory
from train_service.records.event_log import EventKind
from train_service.torch_dataset import TrainingBatches

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def here(store: ObjectStore) -> Iterator[None]:
    commit_rows(store)
    with code_of_this_process():
        yield


def first_batches(store: ObjectStore, spec: TrainingSpec, ranks: Ranks = ALONE, steps: int = 5) -> list[Batch]:
    batches = LoaderFactory(store, load_version(store, VERSION), spec)
    given = batches.loader(ranks.rank, ranks.world_size).batches(0)
    try:
        return [next(given) for _ in range(steps)]
    finally:
        given.close()


def test_each_input_of_a_batch_is_a_tensor_of_the_rows_in_their_order(store: ObjectStore) -> None:
    (batch, *_) = first_batches(store, spec_of_four(store))
    inputs = arrays_of(batch.inputs)

    assert isinstance(inputs, dict)
    assert {name: (one.dtype.name, one.shape) for name, one in inputs.items()} == {
        "image": ("float32", (14, 1, 6, 6)),
        "age": ("float32", (14,)),
        "smokes": ("bool", (14,)),
        "tokens": ("int64", (14, TOKENS)),
    }
    rows = batch_of(table(ROWS).take(batch.row_ids.tolist()))
    assert np.array_equal(inputs["image"][:, 0], rows["image"].astype(np.float32) / 255)
    assert np.array_equal(inputs["tokens"], rows["tokens"])
    assert np.array_equal(inputs["age"], rows["age"].to_numpy().astype(np.float32))
    assert inputs["smokes"].tolist() == rows["smokes"].to_pylist()


def test_a_loop_of_ones_own_gets_the_same_dict(store: ObjectStore) -> None:
    spec = spec_of_four(store)
    (batch, *_) = first_batches(store, spec)
    loader = LoaderFactory(store, load_version(store, VERSION), spec).loader(0, 1)

    inputs, labels = next(iter(DataLoader(TrainingBatches(loader), batch_size=None)))

    assert list(inputs) == list(INPUTS)
    assert all(np.array_equal(inputs[name].numpy(), batch.inputs[name]) for name in INPUTS)
    assert np.array_equal(labels.numpy(), batch.labels)


def run_whole_and_resumed(store: ObjectStore, spec: TrainingSpec, at: int) -> None:
    """A run from its beginning, and one that goes on from a checkpoint of it, end with the same bytes."""
    new_job(store, "trainingJobs/whole", spec)
    run_of(store, "trainingJobs/whole", spec=spec).run()
    whole, name = entries(store, "trainingJobs/whole"), "trainingJobs/resumed"
    new_job(store, name, spec)
    CheckpointRegistry(store, name).commit(replace(whole[at], name=f"{name}/checkpoints/step-{at:08d}", attempt=1))
    lose_and_begin(store, name)
    run_of(store, name, attempt=2, spec=spec).run()
    again = entries(store, name)
    assert sorted(again) == [step for step in sorted(whole) if step >= at]
    assert all(saved(store, again[step]) == saved(store, whole[step]) for step in again)


def test_a_run_that_is_resumed_ends_with_bit_for_bit_the_same_weights_and_state(store: ObjectStore) -> None:
    spec = spec_of_four(store, accumulation_steps=2)

    run_whole_and_resumed(store, spec, at=6)

    (first, *_) = events(store, "trainingJobs/whole", EventKind.VALIDATED)
    assert first.payload["row_count"] == VALIDATION_ROWS


def test_a_training_step_gets_the_same_dict_and_is_resumed_bit_for_bit(store: ObjectStore) -> None:
    facts = replace(FACTS, is_step=True)
    spec = settled(asked(store, "net:Trained"), facts, ())

    run_whole_and_resumed(store, spec, at=3)

    first, _ = events(store, "trainingJobs/whole", EventKind.VALIDATED)
    assert first.payload["row_count"] == VALIDATION_ROWS


def test_a_checkpoint_names_the_inputs_and_its_model_answers_as_in_training(store: ObjectStore) -> None:
    spec = spec_of_four(store)
    new_job(store, "trainingJobs/j", spec)
    run = run_of(store, "trainingJobs/j", spec=spec)
    run.run()

    entry = resolve(store, "checkpoint", "trainingJobs/j")
    manifest = json.loads(store.get(f"{entry.folder}/{MANIFEST}"))
    assert (manifest["format"], manifest["input_columns"]) == (FORMAT_SEVERAL_INPUTS, list(INPUTS))
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    content = checkpoint.content
    rows = table(9, seed=5).drop_columns("label")
    made = content.serving()(batch_of(rows))
    row = content.model_input(content.serving().output(content.ingested_schema))
    assert row is not None
    logits: Any = LoadedModel(checkpoint)(model_input(made, row, "input"))[0]
    np.testing.assert_allclose(logits, logits_of(run._learner.model.eval(), arrays(rows)), atol=1e-5)


def learner_of(spec: TrainingSpec, ranks: Ranks, store: ObjectStore) -> Learner:
    batches = LoaderFactory(store, load_version(store, VERSION), spec)
    return Learner(spec, ranks, batches.preprocessing.output, 5, 10)


def trained(spec: TrainingSpec, ranks: Ranks, store: ObjectStore, *, resumed: bool = False) -> Mapping[str, Tensor]:
    """The weights after some steps; `resumed`: a new learner takes the later ones."""
    made = learner_of(spec, ranks, store)
    made.prepare()
    for number, batch in enumerate(first_batches(store, spec, ranks)):
        if resumed and number == 2:
            weights, state = ranks.share((made.weights(), made.state()))
            made = learner_of(spec, ranks, store)
            made.load(weights, state)
            made.prepare()
        made.step(batch)
    return made.weights()


def on_two_ranks(ranks: Ranks, settings: StoreSettings, spec: TrainingSpec) -> dict[str, Any]:
    store = open_store(settings)
    load_code(store, spec.model.code_bundle)
    sharded = replace(spec, placement=Placement(parallel=FSDP))
    return {
        "whole": trained(spec, ranks, store),
        "resumed": trained(spec, ranks, store, resumed=True),
        "sharded": trained(sharded, ranks, store),
    }


def test_two_ranks_and_shards_learn_as_one_rank_and_are_resumed_bit_for_bit(store: ObjectStore, tmp_path: Path) -> None:
    # Without noise and BatchNorm, which are of a rank.
    plain = OptimizerSpec(name="SGD", learning_rate=0.05)
    spec = spec_of_four(store, kwargs={"dropout": 0.0, "norm": False}, optimizer=plain)
    folder = tmp_path / "ranks"
    folder.mkdir()
    load_code(store, spec.model.code_bundle)

    result, _ = in_ranks(2, on_two_ranks, folder, store.settings, spec)

    alone = trained(spec, ALONE, store)
    for name, tensor in result["whole"].items():
        assert torch.equal(result["resumed"][name], tensor)
        torch.testing.assert_close(result["sharded"][name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone[name], tensor, rtol=1e-4, atol=1e-5)


def test_pieces_of_ray_data_hold_the_same_records(store: ObjectStore) -> None:
    from train_service.loading.cluster_loader import _Piece  # ray.data takes seconds to import

    spec = spec_of_four(store)
    (batch, *_) = first_batches(store, spec)
    table_of_piece = _Piece(batch.inputs, batch.labels, batch.row_ids).table()
    row = LoaderFactory(store, load_version(store, VERSION), spec).preprocessing.output

    again = _Piece.from_table(table_of_piece.slice(3), row)

    assert np.array_equal(again.inputs, batch.inputs[3:])
    assert np.array_equal(again.row_ids, batch.row_ids[3:])


def test_a_null_that_no_step_fills_is_refused_with_its_row_and_column(store: ObjectStore) -> None:
    from tests.support.transforming import commit_tables  # imports Ray, which ranks do not need

    rows = table(ROWS)
    ages = rows["age"].to_pylist()
    ages[11] = None
    at = rows.schema.get_field_index("age")
    name = "datasets/nulls/versions/v1"
    commit_tables(store, {"train": rows.set_column(at, "age", [ages])}, name)
    spec = spec_of_four(store, dataset_version=name, validation_split="")
    batches = LoaderFactory(store, load_version(store, name), spec)

    with pytest.raises(InvalidArgument) as refused:
        list(batches.loader(0, 1).batches(0))

    assert refused.value.metadata["row_id"] == "11"
    assert refused.value.message.startswith("spec.input_columns: row 11 of datasets/nulls/versions/v1: column 'age'")
