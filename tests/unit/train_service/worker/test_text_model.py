"""Models of texts in Millrace's loop: they learn, are resumed bit for bit, and are served on texts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from safetensors.torch import load as load_tensors

import millrace_client as mc
import millrace_client.errors
from inference_service.domain.signature import RAW, Rows
from inference_service.serve.served_model import ServedModel
from millrace_client import steps
from millrace_client.train import TrainClient
from shared.checkpoint import CheckpointEntry, CheckpointRegistry, load_checkpoint, resolve
from shared.dataset_version import load_version
from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.models.transformers_models import CAUSAL_LM, NO_TOKEN, SEQUENCE_CLASSIFICATION
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.transforms.records import only_tensor
from tests.support.train_server import with_client
from tests.support.transforming import commit_tables, transform_here
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.worker.test_loop import entries, lose_and_begin, new_job, run_of, saved
from train_service.checkpoints.fine_tuning import check_fits
from train_service.convert_specs import spec_from_proto
from train_service.domain.spec import DDP, FSDP, LossSpec, OptimizerSpec, Placement, TrainingSpec
from train_service.jobs.model_check import check_model
from train_service.learning.learner import Learner
from train_service.learning.ranks import Ranks
from train_service.loading.loader import LoaderFactory
from train_service.loading.preprocessing import check_padding, fitted

LENGTH = 16
TRAIN_ROWS = 96
TOKENIZE: dict[str, Any] = {"column": "text", "tokenize": {"vocabularySize": 300, "maxLength": LENGTH}}
CONCAT: dict[str, Any] = {"concat": {"columns": ["input_ids", "attention_mask"], "into": "x"}}
MODEL = ModelSpec(
    builder=SEQUENCE_CLASSIFICATION,
    in_channels=2 * LENGTH,
    num_classes=2,
    kwargs={
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": LENGTH,
    },
)


def texts(rows: int, seed: int) -> pa.Table:
    """Texts of unequal lengths, labelled by whether they are about a good film."""
    generator = np.random.default_rng(seed)
    good, lengths = generator.random(rows) < 0.5, generator.integers(0, 9, rows)
    written = [f"{'good' if one else 'bad'}{' film' * length}" for one, length in zip(good, lengths, strict=True)]
    return pa.table({"text": written, "label": good.astype(np.int64)})


@pytest.fixture
def version(store: ObjectStore) -> str:
    """Of tokens, with the tokenizer that its training split taught."""
    commit_tables(store, {"train": texts(TRAIN_ROWS, 1), "validation": texts(40, 2)})
    return transform_here(store, [TOKENIZE]).name


def spec_of(version: str, **changes: Any) -> TrainingSpec:
    spec = TrainingSpec(
        dataset_version=version,
        input_column="x",
        transform={"steps": [CONCAT]},
        model=MODEL,
        optimizer=OptimizerSpec(learning_rate=0.02),
        epochs=6,
        global_batch_size=24,
        num_workers=2,
    )
    return replace(spec, **changes)


def settled(store: ObjectStore, spec: TrainingSpec) -> TrainingSpec:
    """The specification of a job that the service accepts."""
    spec, _, model_input = fitted(store, spec)
    check_model(spec, only_tensor(model_input))
    return spec


def test_the_vocabulary_is_that_of_the_tokenizer(store: ObjectStore, version: str) -> None:
    spec = settled(store, spec_of(version))

    assert spec.model.kwargs["vocab_size"] == 260 + len(set(tokenizer_merges(store, version)))
    assert spec.model.kwargs["pad_token_id"] == 0


def tokenizer_merges(store: ObjectStore, version: str) -> list[str]:
    (transform,) = load_version(store, version).manifest.transforms
    return ["".join(pair) for pair in json.loads(transform["steps"][0]["tokenize"]["tokenizer"])["model"]["merges"]]


def test_a_vocabulary_that_is_too_small_is_refused(store: ObjectStore, version: str) -> None:
    small = replace(MODEL, kwargs={**MODEL.kwargs, "vocab_size": 260})

    with pytest.raises(InvalidArgument, match=r"spec\.model\.kwargs\.vocab_size: 260: the tokenizer has ids up to"):
        fitted(store, spec_of(version, model=small))


def test_mask_and_ids_in_the_wrong_order_are_refused(store: ObjectStore, version: str) -> None:
    turned = {"concat": {"columns": ["attention_mask", "input_ids"], "into": "x"}}

    with pytest.raises(InvalidArgument, match=r"steps\[0\]\.concat\.columns.*use input_ids,attention_mask"):
        fitted(store, spec_of(version, transform={"steps": [turned]}))


def test_a_text_model_learns_is_resumed_bit_for_bit_and_is_served(store: ObjectStore, version: str) -> None:
    spec = settled(store, spec_of(version))
    new_job(store, "trainingJobs/whole", spec)
    run_of(store, "trainingJobs/whole", spec=spec).run()
    whole = entries(store, "trainingJobs/whole")
    name = "trainingJobs/resumed"
    new_job(store, name, spec)
    entry = replace(whole[8], name=f"{name}/checkpoints/step-00000008", attempt=1)
    CheckpointRegistry(store, name).commit(entry)
    lose_and_begin(store, name)

    run_of(store, name, attempt=2, spec=spec).run()

    again = entries(store, name)
    assert sorted(again) == [8, 12, 16, 20, 24]
    assert all(saved(store, again[step]) == saved(store, whole[step]) for step in again)
    assert whole[24].metrics["validation_accuracy"] > 0.9

    checkpoint = load_checkpoint(store, whole[24].folder, whole[24].manifest_sha256)
    served = ServedModel(checkpoint)
    assert [(one.name, str(one)) for one in served.signature.raw] == [("text", "BYTES [-1]")]
    asked = [b"good film", b"bad film film", b"\xff", b"", b"bad" + 10_000_000 * b" film"]
    answered = served.forward(Rows(RAW, {"text": np.asarray(asked, object)}))
    assert list(answered.refused) == [2]
    assert answered.arrays[2][[0, 1, 4]].tolist() == [1, 0, 0]
    assert np.isfinite(answered.arrays[0][[0, 1, 3, 4]]).all()


def test_training_and_serving_prepare_the_same_bits(store: ObjectStore, version: str) -> None:
    spec = settled(store, spec_of(version, epochs=1))
    new_job(store, "trainingJobs/j", spec)
    run_of(store, "trainingJobs/j", spec=spec).run()
    entry = entries(store, "trainingJobs/j")[4]
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    served = ServedModel(checkpoint)
    written = texts(TRAIN_ROWS, 1)["text"].to_pylist()
    loader = LoaderFactory(store, load_version(store, version), spec).loader(0, 1)

    for batch in loader.batches(0):
        rows = np.asarray([written[row].encode() for row in batch.row_ids.tolist()], object)
        prepared, refused, _ = served.preprocessing.prepare(Rows(RAW, {"text": rows}))
        assert not refused
        assert prepared.tobytes() == batch.inputs.tobytes()


def test_adapters_start_from_a_checkpoint_and_leave_its_weights_as_they_are(store: ObjectStore, version: str) -> None:
    base = settled(store, spec_of(version, epochs=3))
    new_job(store, "trainingJobs/base", base)
    run_of(store, "trainingJobs/base", spec=base).run()
    before = weights_of(store, entries(store, "trainingJobs/base")[12])
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["query", "value"]}
    adapted = replace(base.model, kwargs={**base.model.kwargs, "lora": lora})
    entry = entries(store, "trainingJobs/base")[12]
    tuned = settled(store, spec_of(version, model=adapted, initial_checkpoint=entry.name, epochs=1))
    check_fits(store, entry, tuned.model)
    new_job(store, "trainingJobs/tuned", tuned)

    run_of(store, "trainingJobs/tuned", spec=tuned).run()

    after = weights_of(store, entries(store, "trainingJobs/tuned")[4])
    query = "bert.encoder.layer.0.attention.self.query"
    kept = {name: name.replace(".base_layer.", ".") for name in after if "lora_" not in name}
    changed = {name for name, plain in kept.items() if not torch.equal(after[name], before[plain])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert after[f"{query}.lora_B.default.weight"].abs().sum() > 0
    assert f"{query}.base_layer.weight" in after
    checkpoint = load_checkpoint(store, *folder_of(store, "trainingJobs/tuned", 4))
    served = ServedModel(checkpoint)
    answered = served.forward(Rows(RAW, {"text": np.asarray([b"good film", b"bad film"], object)}))
    assert answered.arrays[0].shape == (2, 2)


def folder_of(store: ObjectStore, job: str, step: int) -> tuple[str, str]:
    entry = entries(store, job)[step]
    return entry.folder, entry.manifest_sha256


def weights_of(store: ObjectStore, entry: CheckpointEntry) -> dict[str, torch.Tensor]:
    return load_tensors(saved(store, entry)[0])


def test_an_import_has_the_vocabulary_and_the_order_of_its_versions_tokenizer(
    store: ObjectStore, version: str, tmp_path: Path
) -> None:
    (tmp_path / "weights.pt").write_bytes(b"no weights")

    def bring_in(train: TrainClient, columns: list[str], **kwargs: Any) -> None:
        spec = mc.import_spec(
            model=SEQUENCE_CLASSIFICATION,
            in_channels=2 * LENGTH,
            num_classes=2,
            model_kwargs={**MODEL.kwargs, **kwargs},
            dataset_version=version,
            input_column="x",
            transform=[steps.concat(columns, into="x")],
        )
        train.import_checkpoint("base", tmp_path / "weights.pt", spec)

    with pytest.raises(mc.errors.InvalidArgument, match="use input_ids,attention_mask"):
        with_client(store, lambda train: bring_in(train, ["attention_mask", "input_ids"]))
    with pytest.raises(mc.errors.InvalidArgument, match="the tokenizer has ids up to"):
        with_client(store, lambda train: bring_in(train, ["input_ids", "attention_mask"], vocab_size=5))


def test_an_import_of_a_decoder_without_a_tokenizer_names_the_id_that_pads(store: ObjectStore, tmp_path: Path) -> None:
    """The library finds the last token of a text by it. Encoders find it by the mask."""
    (tmp_path / "weights.pt").write_bytes(b"no weights")

    def bring_in(train: TrainClient, kwargs: dict[str, Any]) -> None:
        spec = mc.import_spec(
            model=SEQUENCE_CLASSIFICATION,
            in_channels=2 * LENGTH,
            num_classes=2,
            model_kwargs={"vocab_size": 300, **kwargs},
            input_shape=[2 * LENGTH],
        )
        train.import_checkpoint("base", tmp_path / "weights.pt", spec, validate_only=True)

    decoder = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    with pytest.raises(mc.errors.InvalidArgument, match="name the id that its tokenizer pads with") as refused:
        with_client(store, lambda train: bring_in(train, decoder))
    assert [one.field for one in refused.value.field_violations] == ["spec.model.kwargs.pad_token_id"]
    version_free = spec_of("", model=replace(MODEL, kwargs={**decoder, "vocab_size": 300, "pad_token_id": 3}))
    check_padding(version_free)
    check_padding(replace(version_free, model=MODEL))
    check_padding(replace(version_free, model=replace(version_free.model, builder=CAUSAL_LM, kwargs=decoder)))


# The service reads the folder in a child, which imports the library again.
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hugging_face_folder_answers_as_the_library_does_and_can_be_tuned(
    store: ObjectStore, version: str, tmp_path: Path
) -> None:
    kwargs = {**MODEL.kwargs, "vocab_size": 300}
    shape = {name: value for name, value in kwargs.items() if name != "model_type"}
    config = transformers.BertConfig(**{**shape, "num_labels": 2})
    theirs = transformers.BertForSequenceClassification(config).train(False)
    theirs.save_pretrained(tmp_path / "folder")

    def bring_in(train: TrainClient) -> str:
        spec = mc.import_spec(
            model=SEQUENCE_CLASSIFICATION,
            in_channels=2 * LENGTH,
            num_classes=2,
            model_kwargs=kwargs,
            dataset_version=version,
            input_column="x",
            transform=[steps.concat(["input_ids", "attention_mask"], into="x")],
        )
        return str(train.import_checkpoint("base", tmp_path / "folder", spec).checkpoint.name)

    name = with_client(store, bring_in)

    entry = resolve(store, "checkpoint", name)
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    served = ServedModel(checkpoint)
    rows = Rows(RAW, {"text": np.asarray([b"good film", b"bad"], object)})
    prepared = torch.from_numpy(served.preprocessing.prepare(rows)[0])
    with torch.inference_mode():
        expected = theirs(input_ids=prepared[:, :8].long(), attention_mask=prepared[:, LENGTH : LENGTH + 8].long())
    assert np.array_equal(served.forward(rows).arrays[0], expected.logits.numpy())
    tuned = settled(store, spec_of(version, model=replace(MODEL, kwargs=kwargs), initial_checkpoint=name, epochs=1))
    check_fits(store, entry, tuned.model)
    new_job(store, "trainingJobs/tuned", tuned)
    run_of(store, "trainingJobs/tuned", spec=tuned).run()
    assert set(entries(store, "trainingJobs/tuned")) == {4}


def on_ranks(ranks: Ranks, settings: StoreSettings, spec: TrainingSpec) -> dict[str, Any]:
    """The weights after the first steps, for each way of being parallel."""
    store = open_store(settings)
    given = LoaderFactory(store, load_version(store, spec.dataset_version), spec)
    made = {}
    for parallel in (DDP, FSDP):
        learner = Learner(
            replace(spec, placement=Placement(parallel=parallel)), ranks, given.preprocessing.output, 4, 8
        )
        learner.prepare()
        for batch in islice(given.loader(ranks.rank, ranks.world_size).batches(0), 4):
            learner.step(batch)
        made[parallel] = learner.weights()
    return made


# Each rank imports the library.
@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_ranks_whole_or_sharded_learn_what_one_learns(store: ObjectStore, version: str, tmp_path: Path) -> None:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = replace(MODEL, kwargs={**MODEL.kwargs, **quiet})
    optimizer = OptimizerSpec(name="SGD", learning_rate=0.1)
    spec = settled(store, spec_of(version, model=model, optimizer=optimizer, group_by_length="attention_mask"))

    alone = on_ranks(Ranks(0, 1, torch.device("cpu")), store.settings, spec)[DDP]
    (first, _) = in_ranks(2, on_ranks, tmp_path, store.settings, spec)

    for parallel in (DDP, FSDP):
        assert alone.keys() == first[parallel].keys()
        assert all(torch.allclose(alone[name], first[parallel][name], atol=1e-5) for name in alone), parallel


# --- Causal language models ---


def language_spec(version: str, **changes: Any) -> TrainingSpec:
    """As a client asks for it: task, label, loss and metric follow from the model."""
    kwargs = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    wanted = mc.training_spec(
        version,
        model=CAUSAL_LM,
        in_channels=2 * LENGTH,
        num_classes=LENGTH,
        model_kwargs={**kwargs, "bos_token_id": 1, "eos_token_id": 2},
        transform=[steps.concat(["input_ids", "attention_mask"], into="x")],
        input_column="x",
        epochs=6,
        global_batch_size=24,
        optimizer=mc.optimizer("AdamW", 0.02),
        group_by_length="attention_mask",
        num_workers=2,
    )
    return replace(spec_from_proto(wanted, ()), **changes)


def test_a_language_model_learns_is_resumed_bit_for_bit_and_scores_texts(store: ObjectStore, version: str) -> None:
    spec = settled(store, language_spec(version))
    assert (spec.task, spec.label_column, spec.loss.name, spec.metrics) == (
        "REGRESSION",
        "input_ids",
        "next_token",
        ("perplexity",),
    )
    new_job(store, "trainingJobs/whole", spec)
    run_of(store, "trainingJobs/whole", spec=spec).run()
    whole = entries(store, "trainingJobs/whole")
    name = "trainingJobs/resumed"
    new_job(store, name, spec)
    CheckpointRegistry(store, name).commit(replace(whole[12], name=f"{name}/checkpoints/step-00000012", attempt=1))
    lose_and_begin(store, name)

    run_of(store, name, attempt=2, spec=spec).run()

    again = entries(store, name)
    assert all(saved(store, again[step]) == saved(store, whole[step]) for step in (16, 20, 24))
    perplexities = [whole[step].metrics["validation_perplexity"] for step in sorted(whole)]
    assert perplexities[-1] < perplexities[0] / 4

    checkpoint = load_checkpoint(store, whole[24].folder, whole[24].manifest_sha256)
    served = ServedModel(checkpoint)
    answered = served.forward(Rows(RAW, {"text": np.asarray([b"good film film", b"film good bad"], object)}))
    likely, unlikely = ([one for one in row.tolist() if one != NO_TOKEN] for row in answered.arrays[0])
    assert np.mean(likely) < np.mean(unlikely)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"label_column": "label"}, "spec.label_column"),
        ({"task": "CLASSIFICATION"}, "spec.task"),
        ({"loss": LossSpec(name="mse")}, "spec.loss.name"),
        ({"metrics": ("mae",)}, "spec.metrics"),
        ({"target_scaling": "STANDARD"}, "spec.target_scaling"),
    ],
)
def test_an_option_that_a_language_model_cannot_have_is_refused_by_name(
    store: ObjectStore, version: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        fitted(store, language_spec(version, **changes))

    assert field in refused.value.message


def test_only_a_language_model_has_its_loss_and_metric(store: ObjectStore, version: str) -> None:
    with pytest.raises(InvalidArgument, match=r"spec\.loss\.name: 'next_token'"):
        fitted(store, spec_of(version, loss=LossSpec(name="next_token")))
    with pytest.raises(InvalidArgument, match=r"spec\.metrics: 'perplexity'"):
        fitted(store, spec_of(version, metrics=("perplexity",)))
