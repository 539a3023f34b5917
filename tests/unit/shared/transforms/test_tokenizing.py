"""Texts to tokens: what is learnt, what is brought, and what is cut, padded and refused."""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from shared.errors import InvalidArgument
from shared.transforms import Batch, Pipeline, RowError, ScalarType, Schema, TensorType
from tests.unit.shared.transforms.samples import bits, cut, fitted, joined_bits, pipeline

WORDS = ["the", "film", "was", "good", "bad", "long", "nobody", "liked", "It", "é", "東京", "…"]
RANDOM = np.random.default_rng(0)
TEXTS = [" ".join(RANDOM.choice(WORDS, count)) for count in RANDOM.integers(0, 40, 200)]
MANY: Batch = {"id": pa.array(range(200)), "text": pa.array(TEXTS)}


def learning(**fields: Any) -> Pipeline:
    return pipeline({"column": "text", "tokenize": {"vocabularySize": 320, "maxLength": 16, **fields}})


def brought(max_length: int = 8, **padding: Any) -> dict[str, Any]:
    """A step by a tokenizer that the library itself trained on whole words."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    if padding:
        tokenizer.enable_padding(**padding)
    return {"column": "text", "tokenize": {"tokenizer": tokenizer.to_str(), "maxLength": max_length}}


FITTED = fitted(learning(), MANY)


def tokenizer_of(built: Pipeline) -> Tokenizer:
    return Tokenizer.from_str(built.config["steps"][0]["tokenize"]["tokenizer"])


def ids_of(built: Pipeline, *texts: str | bytes) -> list[list[int]]:
    made: list[list[int]] = built({"text": pa.array(list(texts))})["input_ids"].tolist()
    return made


def test_two_columns_of_one_length_take_the_place_of_the_text() -> None:
    made = FITTED(MANY)

    assert list(made) == ["id", "input_ids", "attention_mask"]
    assert made["input_ids"].shape == made["attention_mask"].shape == (200, 16)
    assert made["input_ids"].dtype == made["attention_mask"].dtype == np.int64
    tensor = TensorType("int64", (16,))
    given: Schema = {"text": ScalarType(pa.string()), "y": ScalarType(pa.int64())}
    assert FITTED.output(given) == {"input_ids": tensor, "attention_mask": tensor, "y": ScalarType(pa.int64())}


def test_ids_stand_for_the_whole_text_between_cls_and_sep() -> None:
    tokenizer = tokenizer_of(FITTED)
    text = "It was é 東京…"
    (ids,) = ids_of(fitted(learning(maxLength=64), MANY), text)
    length = ids.index(0)

    assert (ids[0], ids[length - 1]) == (tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]"))
    assert set(ids[length:]) == {tokenizer.token_to_id("[PAD]")}
    assert decoders.ByteLevel().decode([str(tokenizer.id_to_token(one)) for one in ids[1 : length - 1]]) == text
    assert [tokenizer.id_to_token(one) for one in ids[1:3]] == ["It", "Ġwas"]


def test_the_mask_is_one_for_tokens_and_zero_for_padding() -> None:
    made = FITTED({"text": pa.array(["the film", ""])})

    assert made["attention_mask"].tolist() == (made["input_ids"] != 0).astype(int).tolist()
    assert made["attention_mask"].sum(axis=1).tolist() == [4, 2]


def test_a_long_text_is_cut_behind_its_first_tokens() -> None:
    short, long = ids_of(FITTED, "the film was good", "the film was good" + " bad" * 100)

    assert long[:5] == short[:5]
    assert long[-1] == tokenizer_of(FITTED).token_to_id("[SEP]")


@pytest.mark.parametrize("text", ["x" * 10_000_000, "the film was good. " * 500_000], ids=["one word", "words"])
def test_of_ten_megabytes_the_beginning_counts(text: str) -> None:
    assert ids_of(FITTED, text) == ids_of(FITTED, text[: 64 * 16])


def test_the_learned_tokenizer_depends_on_neither_the_order_nor_the_cut_of_the_rows() -> None:
    built = learning()
    schema: Schema = {"id": ScalarType(pa.int64()), "text": ScalarType(pa.string())}
    parts = cut(MANY, [3, 50, 120])[::-1]
    fitters = [built.fitter(schema) for _ in parts]
    for fitter, part in zip(fitters, parts, strict=True):
        fitter.update(part)
    first, *rest = (pickle.loads(pickle.dumps(one)) for one in fitters)
    for other in rest:
        first.merge(other)

    assert first.fitted().config == FITTED.config


def test_a_learnt_tokenizer_has_the_special_tokens_all_bytes_and_at_most_the_asked_size() -> None:
    assert tokenizer_of(fitted(learning(vocabularySize=280), MANY)).get_vocab_size() == 280
    few = tokenizer_of(fitted(learning(), {"text": pa.array(["ab ab"])}))
    # Of `ab` and ` ab` the pair that occurs twice.
    assert few.get_vocab_size() == 4 + 256 + 1
    assert [few.token_to_id(one) for one in ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "ab")] == [0, 1, 2, 3, 260]


def test_lowercase_is_learnt_and_applied() -> None:
    built = fitted(learning(lowercase=True), MANY)

    assert ids_of(built, "THE Film É") == ids_of(built, "the film é")
    assert ids_of(FITTED, "THE Film") != ids_of(FITTED, "the film")


def test_a_text_does_not_end_itself() -> None:
    (ids,) = ids_of(FITTED, "the [SEP][PAD] film")

    # [CLS], [SEP] and [PAD] are where every text has them.
    assert [one for one in ids if one <= 3] == [1, 2, 0]


def test_bytes_in_utf_8_get_the_ids_of_the_text() -> None:
    binary = FITTED({"text": pa.array([text.encode() for text in TEXTS], pa.binary())})

    assert bits(binary) == bits(FITTED({"text": MANY["text"]}))


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_bytes_that_are_no_utf_8_are_an_error_that_names_the_row(kind: pa.DataType) -> None:
    with pytest.raises(RowError, match=r"'text' is no UTF-8: byte 3 begins no character") as refused:
        FITTED({"text": pa.array([b"good", b"bad\xff", b"\xc3"], kind)})

    assert refused.value.row == 1


def test_a_null_is_an_error_that_names_the_row() -> None:
    with pytest.raises(RowError, match="'text' is null") as refused:
        FITTED({"text": pa.array(["a", None])})

    assert refused.value.row == 1


def test_training_and_serving_get_the_same_bits() -> None:
    schema: Schema = {"id": ScalarType(pa.int64()), "text": ScalarType(pa.string())}
    prepared = FITTED(MANY)
    serving = pickle.loads(pickle.dumps(Pipeline.from_config(FITTED.config).serving(["input_ids"], schema)))
    rows = [serving(part) for part in cut({"text": MANY["text"]}, range(1, 200))]

    assert joined_bits(rows) == bits({"input_ids": prepared["input_ids"]})
    both = FITTED.serving(["attention_mask", "input_ids"], schema)
    assert FITTED.reads(["attention_mask"], schema) == ["text"]
    assert bits(both(MANY)) == bits({name: prepared[name] for name in ("attention_mask", "input_ids")})


def test_a_brought_tokenizer_gives_its_own_ids() -> None:
    step = brought()
    tokenizer = Tokenizer.from_str(step["tokenize"]["tokenizer"])
    (ids,) = ids_of(pipeline(step), "the film was awful")

    words = [tokenizer.token_to_id(one) for one in ("the", "film", "was", "<unk>")]
    assert ids == [*words, *[tokenizer.token_to_id("<pad>")] * 4]


def test_a_brought_tokenizer_pads_and_cuts_at_its_own_side() -> None:
    step = brought(direction="left", pad_id=2, pad_token="</s>")
    asked = json.loads(step["tokenize"]["tokenizer"])
    asked["truncation"] = {"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    step["tokenize"]["tokenizer"] = json.dumps(asked)
    built = pipeline(step)
    short, end, long = ids_of(built, "the film", "good film " * 4, "bad " * 10_000 + "good film " * 4)

    assert short[:6] == [2] * 6
    assert long == end
    assert built.config["steps"][0]["tokenize"]["tokenizer"] == step["tokenize"]["tokenizer"]


@pytest.mark.parametrize(
    ("fields", "at", "text"),
    [
        ({"maxLength": 7}, "max_length", "7 is none of 8 to 8,192 tokens"),
        ({"maxLength": 8193}, "max_length", "8193 is none of"),
        ({"vocabularySize": 260}, "vocabulary_size", "260 is none of 261 to 65,536 tokens to learn"),
        ({"vocabularySize": 65_537}, "vocabulary_size", "65537 is none of"),
        ({"idsColumn": "x", "maskColumn": "x"}, "mask_column", "'x' is the name of both new columns"),
        ({"tokenizer": "{}"}, "tokenizer", "the library reads no tokenizer in it: Model missing"),
        ({"tokenizer": " " * 8_388_609}, "tokenizer", "its 8,388,609 bytes are over 8,388,608"),
    ],
)
def test_invalid_options_of_a_tokenizer_are_refused(fields: dict[str, Any], at: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as refused:
        learning(**fields)

    assert refused.value.fields[0][0] == f"transform.steps[0].tokenize.{at}"


def test_a_brought_tokenizer_without_a_token_to_pad_with_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(InvalidArgument, match="it has no token to pad with; enable its padding"):
        learning(tokenizer=tokenizer.to_str())


def test_a_text_that_a_brought_tokenizer_has_no_tokens_for_is_an_error_that_names_the_row() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "<pad>": 1}, unk_token="<unk>"))
    built = learning(tokenizer=tokenizer.to_str())

    with pytest.raises(RowError, match="'text' does not become tokens: WordLevel error") as refused:
        built({"text": pa.array(["a", "a", "b", "a", "c"])})

    assert refused.value.row == 2


def test_a_brought_tokenizer_that_leaves_no_room_for_a_text_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "<pad>": 1}, unk_token="a"))
    ends = " ".join(["<pad>"] * 8)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {ends}", special_tokens=[("<pad>", 1)])

    with pytest.raises(InvalidArgument, match="it adds 8 tokens to a text, and 8 are all") as refused:
        learning(tokenizer=tokenizer.to_str(), maxLength=8)

    assert refused.value.fields[0][0] == "transform.steps[0].tokenize.max_length"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"text": ScalarType(pa.int64())}, "tokenize needs strings, or bytes in UTF-8, not int64"),
        ({"text": TensorType("uint8", (3,))}, "tokenize needs texts, not uint8"),
        ({"text": ScalarType(pa.string()), "input_ids": ScalarType(pa.int64())}, "a column 'input_ids' already"),
        ({"other": ScalarType(pa.string())}, "there is no column 'text'"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_any_row(given: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        FITTED.output(given)


def test_rows_without_a_word_teach_nothing() -> None:
    with pytest.raises(InvalidArgument, match="'text' has no word in the training rows"):
        fitted(learning(), {"text": pa.array(["", ""])})


def test_a_service_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InvalidArgument, match="package `tokenizers` is not installed here; install the extra"):
        learning()
