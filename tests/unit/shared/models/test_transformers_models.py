"""Models of texts, from a configuration alone: what they take, and what is refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.models import build_model, import_builder, input_dimensions
from shared.models.transformers_models import CAUSAL_LM, NO_TOKEN, SEQUENCE_CLASSIFICATION, split_tokens

LENGTH, CLASSES = 32, 3
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
KINDS: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "distilbert": {"vocab_size": 300, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "roberta": {**SMALL, **ENDS, "pad_token_id": 0},
    "gpt2": {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, **ENDS},
    "llama": {**SMALL, "num_key_value_heads": 2},
}


def spec(model_type: str = "bert", **changes: Any) -> ModelSpec:
    kwargs = {"model_type": model_type, **KINDS.get(model_type, SMALL), **changes}
    return ModelSpec(builder=SEQUENCE_CLASSIFICATION, in_channels=2 * LENGTH, num_classes=CLASSES, kwargs=kwargs)


def tokens(*lengths: int) -> Tensor:
    """Rows of so many tokens, and padding."""
    ids = torch.randint(4, 300, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
    return torch.cat([ids * mask, mask], 1).float()


@pytest.mark.parametrize("model_type", KINDS)
def test_a_row_has_the_same_answer_however_much_padding_its_batch_has(model_type: str) -> None:
    torch.manual_seed(0)
    model = build_model(spec(model_type)).eval()
    rows = tokens(5, 12, 1)

    with torch.inference_mode():
        answers = model(rows)
        with_a_long_row = model(torch.cat([rows, tokens(LENGTH)]))[:3]

    assert answers.shape == (3, CLASSES)
    assert answers.dtype == torch.float32
    assert torch.allclose(answers, with_a_long_row, atol=1e-5)
    assert not torch.allclose(answers[0], answers[1], atol=1e-5)


@pytest.mark.parametrize("model_type", KINDS)
def test_the_shapes_of_a_text_model_need_no_memory(model_type: str) -> None:
    with torch.device("meta"):
        assert build_model(spec(model_type))(torch.zeros(2, 2 * LENGTH)).shape == (2, CLASSES)
    assert input_dimensions(SEQUENCE_CLASSIFICATION) == 1


@pytest.mark.parametrize(("multiple", "width"), [(8, 16), (1, 9), (64, LENGTH)])
def test_padding_is_cut_to_a_multiple_of_the_longest_row(multiple: int, width: int) -> None:
    rows = tokens(3, 9)

    ids, mask = split_tokens(rows, multiple)

    assert ids.shape == mask.shape == (2, width)
    assert torch.equal(ids, rows[:, :width].long())
    assert mask.sum(1).tolist() == [3, 9]


def test_padding_before_the_tokens_stays() -> None:
    rows = tokens(3, 9)
    turned = torch.cat([rows[:, :LENGTH].flip(1), rows[:, LENGTH:].flip(1)], 1)

    assert split_tokens(turned, 8)[0].shape == (2, LENGTH)


@pytest.mark.parametrize("model_type", KINDS)
def test_a_row_without_a_token_has_a_finite_answer(model_type: str) -> None:
    with torch.inference_mode():
        assert build_model(spec(model_type)).eval()(tokens(0, 4)).isfinite().all()
        assert build_model(spec(model_type)).eval()(tokens(0)).isfinite().all()


def test_parameters_have_the_names_of_the_library() -> None:
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**{**SMALL, "num_labels": CLASSES}))

    ours = build_model(spec())

    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    rows = tokens(7)
    with torch.inference_mode():
        expected = theirs.train(False)(input_ids=rows[:, :8].long(), attention_mask=rows[:, LENGTH : LENGTH + 8].long())
        assert torch.equal(ours.eval()(rows), expected.logits)


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"model_type": "nothing"}, "model_type", "such as bert"),
        ({"model_type": "vit"}, "model_type", "none of it for transformers.sequence_classification"),
        ({"hiden_size": 16}, "hiden_size", "hidden_size"),
        ({"num_labels": 7}, "num_labels", "the job's own fields"),
        ({"hidden_size": 15}, "kwargs", "refuse"),
        ({"padding_multiple": 0}, "padding_multiple", "1 to 8,192"),
        ({"attention": "hub/kernel"}, "attention", "sdpa or eager"),
        ({"vocab_size": 2**25}, "vocab_size", "16,777,216"),
        ({"pad_token_id": 300}, "pad_token_id", "0 to 299"),
        ({"lora": {"r": 4}}, "lora", "target_modules"),
        ({"lora": {"r": 4, "target_modules": ["nothing"]}}, "lora", "peft refuses"),
        ({"lora": {"r": 4, "target_modules": "(a+)+b"}}, "lora.target_modules", "all-linear"),
        ({"lora": {"r": 4, "target_modules": []}}, "lora.target_modules", "1 to 1,000 names"),
        ({"lora": {"r": 4, "target_modules": ["query", 7]}}, "lora.target_modules", "1 to 1,000 names"),
        ({"lora": {"r": 4, "target_modules": ["q" * 201]}}, "lora.target_modules", "200 characters"),
        ({"lora": {"r": 0, "target_modules": ["query"]}}, "lora.r", "1 to 8,192"),
        ({"lora": {"r": 2**40, "target_modules": ["query"]}}, "lora.r", "1 to 8,192"),
        ({"lora": {"r": True, "target_modules": ["query"]}}, "lora.r", "1 to 8,192"),
        ({"max_position_embeddings": 16}, "max_position_embeddings", "16 tokens, and a row has 32"),
        (
            {"model_type": "roberta", "max_position_embeddings": 33, "pad_token_id": 1},
            "max_position_embeddings",
            "31 tokens",
        ),
    ],
)
def test_a_bad_argument_is_refused_by_name(changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as refused, torch.device("meta"):
        build_model(spec(**changes), "spec.model")

    assert field in refused.value.message.split(":")[0]
    assert says in refused.value.message


def test_adapters_may_go_into_all_linear_layers() -> None:
    lora = {"r": 4, "target_modules": "all-linear"}

    adapted = [name for name in build_model(spec(lora=lora)).state_dict() if "lora_A" in name]

    assert any("query" in name for name in adapted)
    assert any("intermediate" in name for name in adapted)


def test_a_model_of_no_such_builder_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"spec\.model\.builder.*transformers\.sequence_classification"):
        import_builder("transformers.bert", "spec.model.builder")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(InvalidArgument, match="install the extra `huggingface`"):
        build_model(spec())


# --- Causal language models ---


def language_model(model_type: str = "gpt2", **changes: Any) -> ModelSpec:
    kwargs = {"model_type": model_type, **KINDS[model_type], **changes}
    return ModelSpec(builder=CAUSAL_LM, in_channels=2 * LENGTH, num_classes=LENGTH, kwargs=kwargs)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bert"])
def test_a_token_is_predicted_from_those_before_it_alone(model_type: str) -> None:
    torch.manual_seed(0)
    model = build_model(language_model(model_type)).eval()
    rows = tokens(12)
    changed = rows.clone()
    changed[0, 9] = 250.0 if rows[0, 9] != 250 else 249.0

    with torch.inference_mode():
        first, other = model(rows), model(changed)

    assert first.shape == (1, LENGTH)
    assert torch.allclose(first[0, :9], other[0, :9], atol=1e-5)
    assert not torch.allclose(first[0, 9:12], other[0, 9:12], atol=1e-5)


def test_a_surprise_is_that_of_the_library_and_padding_has_none() -> None:
    torch.manual_seed(0)
    model = build_model(language_model()).eval()
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**KINDS["gpt2"])).train(False)
    theirs.load_state_dict(model.state_dict())
    rows = tokens(5, 1, 0, LENGTH)

    with torch.inference_mode():
        found = model(rows)
        ids = rows[:1, :5].long()
        logits = theirs(input_ids=ids).logits
        expected = -logits.log_softmax(2)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]

    assert torch.allclose(found[0, 1:5], expected, atol=1e-5)
    assert (found[0, 5:] == NO_TOKEN).all()
    assert found[0, 0] == NO_TOKEN
    assert (found[1:3] == NO_TOKEN).all()
    assert (found[3, 1:] >= 0).all()


def test_a_language_model_has_an_output_for_each_token() -> None:
    wrong = ModelSpec(**{**language_model().as_config(), "num_classes": 7})

    with pytest.raises(InvalidArgument, match=r"num_classes: 7: use 32"):
        build_model(wrong)
    with torch.device("meta"):
        assert build_model(language_model())(torch.zeros(2, 2 * LENGTH)).shape == (2, LENGTH)
