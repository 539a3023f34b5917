"""Tokenizes texts to ids, all rows of one length; and learns byte pairs.

B = rows of the batch, L = `max_length`. The library `tokenizers` is an extra, imported only where a step needs it.

Learning byte pairs repeatedly merges the most frequent pair of neighbouring symbols (Sennrich, Haddow and Birch, 2016).
The library can learn them, too, but only from texts and in one process. This module learns from counts of words, which
several processes can take and add. A tie goes to the pair that is first in the order of code points, so the same counts
give the same pairs.
"""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from millrace.common.v1 import transform_pb2
from shared.errors import first_line, shown
from shared.transforms.batch import (
    Array,
    Batch,
    Column,
    ColumnType,
    FitAccumulator,
    Names,
    RowProblem,
    Schema,
    Step,
    StepError,
    StepKeys,
    TensorType,
    first_failing_row,
    known,
    scalar,
)
from shared.transforms.steps.fitted import ValueCounts

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# --- Tokenizing ---

MIN_LENGTH, MAX_LENGTH = 8, 8_192
MAX_VOCABULARY = 65_536
MAX_TOKENIZER_BYTES = 8 * 1024 * 1024
# The characters read per token. With this limit, 10 MB of text cost no more than a page.
CHARACTERS_A_TOKEN = 64
# Special tokens of a learned tokenizer, in the order of their ids from 0.
PAD, CLS, SEP, MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, CLS, SEP, MASK)
BYTES = 256
# Padding tokens of a given tokenizer that does not name its own.
PADS = (PAD, "<pad>", "<|pad|>")
# Learning keeps each distinct word. Longer words, such as encoded images, are ignored.
MAX_WORDS = 1_000_000
MAX_WORD = 256
WORDS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Tokenize(Step):
    """Tokenizes a column of texts.

    `tokenizer` is its JSON; empty: still to be learned, with at most `vocabulary_size` tokens.
    """

    op: ClassVar[str] = "tokenize"
    takes_column: ClassVar[bool] = True
    column: str
    max_length: int
    ids_column: str = "input_ids"
    mask_column: str = "attention_mask"
    tokenizer: str = ""
    vocabulary_size: int = 0
    lowercase: bool = False

    @classmethod
    def from_message(cls, message: transform_pb2.Tokenize, column: str) -> Self:
        if not MIN_LENGTH <= message.max_length <= MAX_LENGTH:
            raise StepError(
                f"{message.max_length} is none of {MIN_LENGTH} to {MAX_LENGTH:,} tokens", "tokenize.max_length"
            )
        least = len(SPECIAL) + BYTES + 1
        if not message.tokenizer and not least <= message.vocabulary_size <= MAX_VOCABULARY:
            raise StepError(
                f"{message.vocabulary_size} is none of {least} to {MAX_VOCABULARY:,} tokens to learn; set it, or bring "
                "a tokenizer",
                "tokenize.vocabulary_size",
            )
        if (size := len(message.tokenizer.encode())) > MAX_TOKENIZER_BYTES:
            raise StepError(f"its {size:,} bytes are over {MAX_TOKENIZER_BYTES:,}", "tokenize.tokenizer")
        step = cls(
            column,
            message.max_length,
            message.ids_column or cls.ids_column,
            message.mask_column or cls.mask_column,
            message.tokenizer,
            message.vocabulary_size,
            message.lowercase,
        )
        if step.ids_column == step.mask_column:
            raise StepError(f"{shown(step.mask_column)} is the name of both new columns", "tokenize.mask_column")
        if step.tokenizer:
            _loaded(step.tokenizer, step.max_length)
        else:
            _library()
        return step

    def to_proto(self) -> transform_pb2.TransformStep:
        message = transform_pb2.Tokenize(
            tokenizer=self.tokenizer,
            vocabulary_size=self.vocabulary_size,
            max_length=self.max_length,
            lowercase=self.lowercase,
            ids_column=self.ids_column,
            mask_column=self.mask_column,
        )
        return transform_pb2.TransformStep(column=self.column, tokenize=message)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def fitted(self) -> bool:
        return bool(self.tokenizer)

    def accumulator(self, column_type: ColumnType) -> FitAccumulator:
        return _WordsAccumulator(self)

    def output(self, schema: Schema) -> Schema:
        known(schema, [self.column], "column")
        column = scalar(schema[self.column], "tokenize needs texts")
        if not (_is_text(column.arrow_type) or _is_bytes(column.arrow_type)):
            raise StepError(f"tokenize needs strings, or bytes in UTF-8, not {column}; cast it first")
        made: dict[str, ColumnType] = dict.fromkeys(self._new_columns, TensorType("int64", (self.max_length,)))
        for name, at in zip(self._new_columns, ("ids_column", "mask_column"), strict=True):
            if name in schema and name != self.column:
                raise StepError(f"there is a column {shown(name)} already; choose another name", f"tokenize.{at}")
        return self._in_place(schema, made)

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        encoded = self._encoded(self.texts(batch[self.column]))
        ids = _matrix([one.ids for one in encoded], self.max_length)
        mask = _matrix([one.attention_mask for one in encoded], self.max_length)
        return self._in_place(batch, dict(zip(self._new_columns, (ids, mask), strict=True)))

    def sources(self, needed: Names, schema: Schema) -> Names:
        made = frozenset(self._new_columns)
        return (needed - made) | {self.column} if needed & made else needed

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        # Both columns are made; the pipeline drops the one that is not needed.
        return self if needed & frozenset(self._new_columns) else None

    def _encoded(self, texts: list[str]) -> list[Any]:
        """Encode texts. Raises `RowProblem` for a text for which the tokenizer has no tokens."""
        tokenizer = _loaded(self.tokenizer, self.max_length)
        try:
            return list(tokenizer.encode_batch_fast(texts))
        except Exception as error:
            row = first_failing_row(len(texts), lambda start, end: _encodes(tokenizer, texts[start:end]))
            raise RowProblem(row, f"{self.column!r} does not become tokens: {first_line(error)}") from None

    @property
    def vocabulary(self) -> tuple[int, int]:
        """How many ids a fitted step has, counted from 0, and the id that it pads with."""
        tokenizer = _loaded(self.tokenizer, self.max_length)
        padding = tokenizer.padding or {}
        return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1, int(padding["pad_id"])

    @property
    def _new_columns(self) -> tuple[str, str]:
        return (self.ids_column, self.mask_column)

    def _in_place(self, columns: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        """Return `columns` with `made` in place of the text."""
        out: dict[str, Any] = {}
        for name, column in columns.items():
            out.update(made if name == self.column else {name: column})
        return out

    def texts(self, column: Column) -> list[str]:
        """Return the part of each row's text that is read, (B).

        Raises `RowProblem` for nulls and for bytes that are not UTF-8.
        """
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise RowProblem(
                row, f"{self.column!r} is null, and holds no text; use fill_nulls, or filter such rows out"
            )
        if not _is_text(column.type):
            column = _decoded(column, self.column)
        looked_at = self.max_length * CHARACTERS_A_TOKEN
        keeps_end = bool(self.tokenizer) and _cuts_beginnings(_loaded(self.tokenizer, self.max_length))
        cut = (
            pc.utf8_slice_codeunits(column, -looked_at) if keeps_end else pc.utf8_slice_codeunits(column, 0, looked_at)
        )
        texts: list[str] = cut.to_pylist()
        return texts


class _WordsAccumulator:
    """Counts the words of texts.

    The counts are exact, so the tokenizer depends on neither the order nor the cut of the rows.
    """

    def __init__(self, step: Tokenize) -> None:
        self._step = step
        self._counts = ValueCounts(pa.string(), MAX_WORDS, "tokenize, which counts words,")

    def update(self, column: Column) -> None:
        splitter, words = _blank(self._step.lowercase), []
        for text in self._step.texts(column):
            normal = splitter.normalizer.normalize_str(text) if splitter.normalizer else text
            words += [word for word, _ in splitter.pre_tokenizer.pre_tokenize_str(normal) if len(word) <= MAX_WORD]
            if len(words) > WORDS_AT_ONCE:
                self._counts.add(pa.array(words, pa.string()))
                words = []
        self._counts.add(pa.array(words, pa.string()))

    def merge(self, other: _WordsAccumulator) -> None:
        self._counts.merge(other._counts)

    def fitted_step(self) -> Tokenize:
        words, counts = self._counts.ordered()
        if not len(words):
            raise StepError(f"{self._step.column!r} has no word in the training rows to learn tokens from")
        return replace(self._step, tokenizer=_fit_tokenizer(words.to_pylist(), counts.tolist(), self._step))


def _fit_tokenizer(words: list[str], counts: list[int], step: Tokenize) -> str:
    """Return the JSON of a byte-pair tokenizer."""
    from tokenizers import models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = [*SPECIAL, *alphabet]
    merges = fit_merges(words, counts, step.vocabulary_size - len(first))
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys([*first, *map("".join, merges)]))}
    tokenizer = _blank(step.lowercase)
    tokenizer.model = models.BPE(vocab=vocabulary, merges=merges)
    tokenizer.add_special_tokens(list(SPECIAL))
    ends = [(token, vocabulary[token]) for token in (CLS, SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{CLS} $A {SEP}", special_tokens=ends)
    tokenizer.enable_padding(pad_id=vocabulary[PAD], pad_token=PAD)
    text: str = tokenizer.to_str()
    return text


def _blank(lowercase: bool) -> Any:
    """Make an untrained tokenizer, which cuts texts into words of bytes."""
    tokenizers = _library()
    blank = tokenizers.Tokenizer(tokenizers.models.BPE())
    blank.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    blank.decoder = tokenizers.decoders.ByteLevel()
    if lowercase:
        blank.normalizer = tokenizers.normalizers.Lowercase()
    return blank


# A step is pickled by its JSON, so each process parses a tokenizer once.
@lru_cache(maxsize=8)
def _loaded(text: str, max_length: int) -> Tokenizer:
    """Load a tokenizer that gives exactly `max_length` tokens per text. Raises `StepError`."""
    tokenizers = _library()
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
        padding, truncation = tokenizer.padding or {}, tokenizer.truncation or {}
        tokenizer.enable_truncation(max_length, direction=truncation.get("direction", "right"))
    except BaseException as error:  # the library's panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise StepError(f"the library reads no tokenizer in it: {first_line(error)}", "tokenize.tokenizer") from None
    if (ends := tokenizer.num_special_tokens_to_add(False)) >= max_length:
        raise StepError(f"it adds {ends} tokens to a text, and {max_length} are all", "tokenize.max_length")
    token = padding.get("pad_token") or next((one for one in PADS if tokenizer.token_to_id(one) is not None), "")
    place = tokenizer.token_to_id(token)
    if place is None:
        raise StepError(
            f"it has no token to pad with; enable its padding with one, or add one of {', '.join(PADS)}",
            "tokenize.tokenizer",
        )
    tokenizer.enable_padding(
        length=max_length, pad_id=place, pad_token=token, direction=padding.get("direction", "right")
    )
    # A special token inside a text is plain text, and must not end it.
    tokenizer.encode_special_tokens = True
    return tokenizer  # type: ignore[no-any-return]


def _encodes(tokenizer: Tokenizer, texts: list[str]) -> bool:
    try:
        tokenizer.encode_batch_fast(texts)
    except Exception:
        return False
    return True


def _cuts_beginnings(tokenizer: Tokenizer) -> bool:
    return (tokenizer.truncation or {}).get("direction") == "left"


def _library() -> Any:
    """Import the library. Raises `StepError` if it is not installed."""
    # Several processes already work on batches, and the library's threads do not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
    except ImportError:
        raise StepError(
            "the package `tokenizers` is not installed here; install the extra `huggingface` on services and nodes"
        ) from None
    return tokenizers


def _matrix(rows: list[list[int]], length: int) -> Array:
    """Make an int64 (B, L) array."""
    return np.array(rows, np.int64).reshape(len(rows), length)


def _decoded(column: Column, name: str) -> Column:
    try:
        return column.cast(pa.large_string() if kinds.is_large_binary(column.type) else pa.string())
    except pa.ArrowInvalid:
        for row, value in enumerate(column):
            try:
                value.as_py().decode()
            except UnicodeDecodeError as error:
                raise RowProblem(row, f"{name!r} is no UTF-8: byte {error.start} begins no character") from None
        raise


def _is_text(arrow_type: pa.DataType) -> bool:
    return bool(kinds.is_string(arrow_type) or kinds.is_large_string(arrow_type))


def _is_bytes(arrow_type: pa.DataType) -> bool:
    return bool(kinds.is_binary(arrow_type) or kinds.is_large_binary(arrow_type))


# --- Byte pairs ---

Pair = tuple[str, str]

# Rarer pairs carry no information.
MIN_COUNT = 2


def fit_merges(words: Sequence[str], counts: Sequence[int], limit: int) -> list[Pair]:
    """Learn at most `limit` pairs of symbols, in the order in which they are merged.

    Symbols are strings, at first single characters. `counts` says how often each of the distinct words occurs. The
    result does not depend on the order of the words.
    """
    texts = _Texts(words, counts)
    merges: list[Pair] = []
    while len(merges) < limit and (pair := texts.most_frequent()) is not None:
        texts.merge(pair)
        merges.append(pair)
    return merges


class _Texts:
    """The words as symbols, with the count of each neighbouring pair and the words that may contain it."""

    def __init__(self, words: Sequence[str], counts: Sequence[int]) -> None:
        self._symbols = [list(word) for word in words]
        self._times = list(counts)
        self._counts: defaultdict[Pair, int] = defaultdict(int)
        # A word stays here even when it no longer has the pair.
        self._where: defaultdict[Pair, set[int]] = defaultdict(set)
        for index, symbols in enumerate(self._symbols):
            for pair in pairwise(symbols):
                self._counts[pair] += self._times[index]
                self._where[pair].add(index)
        # Each pair has an entry with its present count or with an earlier, higher one.
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def most_frequent(self) -> Pair | None:
        """Return the most frequent pair; None if no pair occurs often enough."""
        while self._heap:
            negative, pair = heapq.heappop(self._heap)
            count = self._counts[pair]
            if count == -negative:
                return pair if count >= MIN_COUNT else None
            if MIN_COUNT <= count < -negative:
                heapq.heappush(self._heap, (-count, pair))
        return None

    def merge(self, pair: Pair) -> None:
        """Replace each occurrence of the pair by one symbol, from the left."""
        risen: set[Pair] = set()
        for index in self._where.pop(pair):
            risen |= self._merge_in_word(index, pair)
        for one in risen:
            heapq.heappush(self._heap, (-self._counts[one], one))

    def _merge_in_word(self, index: int, pair: Pair) -> set[Pair]:
        """Merge the pair in one word. Return the pairs that occur more often than before."""
        symbols, times, counts = self._symbols[index], self._times[index], self._counts
        merged: list[str] = []
        risen: set[Pair] = set()
        place, end = 0, len(symbols)
        while place < end:
            if place + 1 == end or symbols[place] != pair[0] or symbols[place + 1] != pair[1]:
                merged.append(symbols[place])
                place += 1
                continue
            counts[pair] -= times
            symbol = pair[0] + pair[1]
            if merged:
                counts[merged[-1], pair[0]] -= times
                counts[merged[-1], symbol] += times
                risen.add((merged[-1], symbol))
            if place + 2 < end:
                counts[pair[1], symbols[place + 2]] -= times
                counts[symbol, symbols[place + 2]] += times
                risen.add((symbol, symbols[place + 2]))
            merged.append(symbol)
            place += 2
        self._symbols[index] = merged
        for one in risen:
            self._where[one].add(index)
        return risen
