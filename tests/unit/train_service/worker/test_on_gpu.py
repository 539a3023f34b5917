"""What other tests show on a CPU, on a GPU: texts, adapters, and the optimizers' fused kernels on shards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import nn

from inference_service.domain.signature import RAW, Rows
from inference_service.serve.served_model import ServedModel
from shared.checkpoint import CheckpointRegistry, load_checkpoint
from shared.model_spec import ModelSpec
from shared.models.transformers_models import CAUSAL_LM
from shared.storage import ObjectStore
from tests.support.gpu import needs_gpu
from tests.support.transforming import commit_tables, transform_here
from tests.unit.train_service.learning.test_device_settings import settings_of_torch
from tests.unit.train_service.worker.test_loop import config_of, entries, lose_and_begin, new_job, saved
from tests.unit.train_service.worker.test_text_model import CONCAT, MODEL, TOKENIZE, settled, weights_of
from train_service.domain.spec import (
    BFLOAT16,
    FASTEST,
    FLOAT32,
    REGRESSION,
    Acceleration,
    CheckpointPolicy,
    LossSpec,
    OptimizerSpec,
    TrainingSpec,
)
from train_service.learning.optimizers import build_optimizer
from train_service.learning.ranks import Ranks, set_up_device
from train_service.learning.sharding import shard
from train_service.worker.loop import Run

__all__ = ["settings_of_torch"]

pytestmark = needs_gpu

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# Attention over fewer tokens is one block of a fused kernel, whose sums have one order anyway.
LENGTH = 512
WORDS = ("film", "actor", "scene", "music", "story")
ENCODER = replace(
    MODEL,
    in_channels=2 * LENGTH,
    kwargs={**MODEL.kwargs, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": LENGTH},
)
DECODER = ModelSpec(
    builder=CAUSAL_LM,
    in_channels=2 * LENGTH,
    num_classes=LENGTH,
    kwargs={
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": LENGTH,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
WHOLE, RESUMED = "trainingJobs/whole", "trainingJobs/resumed"


def texts(rows: int, seed: int) -> pa.Table:
    """Long texts, labelled by whether they are about a good film."""
    generator = np.random.default_rng(seed)
    good = generator.random(rows) < 0.5
    written = []
    for one in good:
        words = generator.choice(WORDS, generator.integers(50, 450))
        written.append(" ".join(("good" if one else "bad", *words)))
    return pa.table({"text": written, "label": good.astype(np.int64)})


@pytest.fixture
def version(store: ObjectStore) -> str:
    commit_tables(store, {"train": texts(96, 1), "validation": texts(24, 2)})
    return transform_here(store, [{**TOKENIZE, "tokenize": {"vocabularySize": 300, "maxLength": LENGTH}}]).name


def spec_of(version: str, model: ModelSpec = ENCODER, **changes: Any) -> TrainingSpec:
    spec = TrainingSpec(
        dataset_version=version,
        validation_split="validation",
        input_column="x",
        transform={"steps": [CONCAT]},
        model=model,
        optimizer=OptimizerSpec(name="AdamW", learning_rate=0.002),
        epochs=4,
        global_batch_size=24,
    )
    if model.builder == CAUSAL_LM:
        loss = LossSpec(name="next_token")
        kept = CheckpointPolicy(best_metric="validation_perplexity", maximize=False)
        spec = replace(
            spec, task=REGRESSION, label_column="input_ids", loss=loss, metrics=("perplexity",), checkpoints=kept
        )
    return replace(spec, **changes)


def run(store: ObjectStore, name: str, spec: TrainingSpec, attempt: int = 1) -> None:
    set_up_device(GPU, spec)
    Run(config_of(store, name, attempt, spec), Ranks(0, 1, GPU)).run()


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("model", [ENCODER, DECODER], ids=["encoder", "decoder"])
def test_a_model_of_texts_is_resumed_bit_for_bit(
    store: ObjectStore, version: str, model: ModelSpec, precision: str
) -> None:
    spec = settled(store, spec_of(version, model, precision=precision))
    new_job(store, WHOLE, spec)
    run(store, WHOLE, spec)
    whole = entries(store, WHOLE)
    new_job(store, RESUMED, spec)
    CheckpointRegistry(store, RESUMED).commit(replace(whole[4], name=f"{RESUMED}/checkpoints/step-00000004", attempt=1))
    lose_and_begin(store, RESUMED)

    run(store, RESUMED, spec, attempt=2)

    again = entries(store, RESUMED)
    assert sorted(again) == [4, 8, 12, 16]
    assert [step for step in again if saved(store, again[step]) != saved(store, whole[step])] == []
    assert whole[16].metrics["validation_loss"] < whole[4].metrics["validation_loss"]


def test_the_fastest_algorithms_learn_from_texts_too(store: ObjectStore, version: str) -> None:
    fastest = Acceleration(algorithms=FASTEST)
    spec = settled(store, spec_of(version, precision=BFLOAT16, acceleration=fastest))
    new_job(store, WHOLE, spec)

    run(store, WHOLE, spec)

    whole = entries(store, WHOLE)
    assert whole[16].metrics["validation_loss"] < whole[4].metrics["validation_loss"]


def test_a_model_of_texts_answers_as_on_a_cpu(store: ObjectStore, version: str) -> None:
    spec = settled(store, spec_of(version, epochs=1))
    new_job(store, WHOLE, spec)
    run(store, WHOLE, spec)
    entry = entries(store, WHOLE)[4]
    rows = Rows(RAW, {"text": np.asarray([one.encode() for one in texts(12, 5)["text"].to_pylist()], object)})

    answers = [
        ServedModel(load_checkpoint(store, entry.folder, entry.manifest_sha256), device=device).forward(rows).arrays
        for device in (CPU, GPU)
    ]

    np.testing.assert_allclose(answers[1][0], answers[0][0], rtol=0, atol=1e-4)


def test_adapters_are_trained_and_the_weights_around_them_stay(store: ObjectStore, version: str) -> None:
    base = settled(store, spec_of(version, epochs=1))
    new_job(store, WHOLE, base)
    run(store, WHOLE, base)
    entry = entries(store, WHOLE)[4]
    before = weights_of(store, entry)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["query", "value"]}
    adapted = replace(base.model, kwargs={**base.model.kwargs, "lora": lora})
    tuned = settled(store, spec_of(version, model=adapted, initial_checkpoint=entry.name, epochs=1, precision=BFLOAT16))
    new_job(store, RESUMED, tuned)

    run(store, RESUMED, tuned)

    after = weights_of(store, entries(store, RESUMED)[4])
    kept = {name: name.replace(".base_layer.", ".") for name in after if "lora_" not in name}
    assert {name for name, plain in kept.items() if not torch.equal(after[name], before[plain])} == {
        "classifier.weight",
        "classifier.bias",
    }
    assert after["bert.encoder.layer.0.attention.self.query.lora_B.default.weight"].abs().sum() > 0


# --- Shards ---


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, device_id=GPU)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_fused_optimizer_steps_shards_as_whole_weights(name: str) -> None:
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(GPU)
    learned = []
    for model in (copy.deepcopy(whole), shard(whole, "cuda", 1)):
        optimizer = build_optimizer(OptimizerSpec(name=name, learning_rate=0.1), model)
        assert optimizer.defaults["fused"]
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((5, 6), float(step), device=GPU)).square().sum().backward()
            optimizer.step()
        learned.append([getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()])

    assert all(torch.equal(one, other) for one, other in zip(*learned, strict=True))
