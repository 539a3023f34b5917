"""Models of the library `transformers` that take the tokens of texts.

B = rows, L = tokens of a row, T = tokens that the model computes, K = outputs, V = size of the vocabulary.

One input row is float32 (2·L,): the ids of L tokens, then their attention mask, as `concat` makes it of the two columns
of `tokenize`. float32 holds ids exactly up to 2^24. A model computes no more tokens than the longest row of its batch
needs, rounded up to a multiple.

The weights are fresh: a configuration is enough, and no model hub is asked. The names of parameters are the library's
own, so that a folder of Hugging Face can be imported as a checkpoint.

`transformers.sequence_classification` gives K outputs for a text. `transformers.causal_lm` predicts each token from
those before it, and gives the surprise of each token, -ln of its predicted probability, so K = L.

The library is an extra, and is imported only for such a model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shared.errors import InvalidArgument, first_line, invalid_field
from shared.model_spec import ModelSpec
from shared.models import TRANSFORMERS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SEQUENCE_CLASSIFICATION = "transformers.sequence_classification"
CAUSAL_LM = "transformers.causal_lm"
# The classes of the library that make the models of each builder.
BUILDERS = {
    SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    CAUSAL_LM: "AutoModelForCausalLM",
}
PREFIX = TRANSFORMERS
# The surprise where a row has no token, or none before it. Other surprises are never negative.
NO_TOKEN = -1.0
DEFAULT_MULTIPLE, MAX_MULTIPLE = 8, 8_192
MAX_ID = 2**24
# Arguments of the builder itself; all others are of the model's configuration.
OWN_ARGUMENTS = frozenset({"model_type", "padding_multiple", "attention", "lora"})
LORA_ARGUMENTS = frozenset({"r", "lora_alpha", "lora_dropout", "target_modules"})
ALL_LINEAR = "all-linear"
MAX_RANK, MAX_TARGETS, MAX_TARGET = 8_192, 1_000, 200
ATTENTION = ("sdpa", "eager")
# Parts of a configuration that the training job decides.
DECIDED = frozenset(
    {
        *("num_labels", "id2label", "label2id", "problem_type", "architectures", "transformers_version", "dtype"),
        *("return_dict", "output_attentions", "output_hidden_states", "use_cache", "is_encoder_decoder"),
    }
)
# Named in an error; the library has more.
EXAMPLES = {
    SEQUENCE_CLASSIFICATION: "bert, distilbert, roberta, electra, gpt2, llama, qwen2",
    CAUSAL_LM: "gpt2, llama, qwen2, mistral",
}


# --- Building ---


def is_text_model(builder: str) -> bool:
    return builder.startswith(PREFIX)


def import_library(builder: str, field: str) -> Any:
    """Import `transformers`, which takes seconds.

    Raises `InvalidArgument`, naming `field`, for an unknown builder, or if the library is not installed.
    """
    if builder not in BUILDERS:
        raise invalid_field(field, builder, f"use {' or '.join(BUILDERS)}")
    # Nothing here may wait for a hub. A process that uses one has its own setting.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise invalid_field(
            field,
            builder,
            "the package `transformers` is not installed here; install the extra `huggingface` on services and nodes",
        ) from None
    return transformers


def build_text_model(spec: ModelSpec, path: str) -> nn.Module:
    """Build a model with fresh weights: tokens float32 (B, 2·L) to outputs float32 (B, K).

    `spec.kwargs` are `model_type`, `padding_multiple`, `attention` and arguments of that type's configuration. Raises
    `InvalidArgument`, naming the argument below `path`.
    """
    transformers = import_library(spec.builder, f"{path}.builder")
    if spec.in_channels % 2:
        raise invalid_field(f"{path}.in_channels", spec.in_channels, "use twice the tokens of a row: ids and mask")
    length = spec.in_channels // 2
    if spec.builder == CAUSAL_LM and spec.num_classes != length:
        raise invalid_field(
            f"{path}.num_classes", spec.num_classes, f"use {length}, one output for each token of a row"
        )
    config = _config(transformers, spec, f"{path}.kwargs")
    try:
        model: nn.Module = getattr(transformers, BUILDERS[spec.builder]).from_config(config)
    except InvalidArgument:
        raise
    except Exception as error:  # each model refuses its configuration in its own way
        raise invalid_field(f"{path}.kwargs", spec.kwargs, f"the model refuses them: {first_line(error)}") from None
    _check_positions(model, config, length, path)
    if "lora" in spec.kwargs:
        _adapt(model, spec.kwargs["lora"], f"{path}.kwargs.lora")
    takes = _GivesSurprises if spec.builder == CAUSAL_LM else _TakesTokens
    return taking_tokens(model, _multiple(spec, f"{path}.kwargs"), takes)


def _config(transformers: Any, spec: ModelSpec, path: str) -> PretrainedConfig:
    model_type = spec.kwargs.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        remedy = f"name a model of the library, such as {EXAMPLES[spec.builder]}"
        raise invalid_field(f"{path}.model_type", model_type, remedy)
    kind = transformers.CONFIG_MAPPING[model_type]
    if kind not in getattr(transformers, BUILDERS[spec.builder])._model_mapping:
        remedy = f"the library has none of it for {spec.builder}; use one such as {EXAMPLES[spec.builder]}"
        raise invalid_field(f"{path}.model_type", model_type, remedy)
    known = {*kind().to_dict(), *kind.attribute_map}
    values = {name: value for name, value in spec.kwargs.items() if name not in OWN_ARGUMENTS}
    for name, value in values.items():
        if name in DECIDED:
            raise invalid_field(f"{path}.{name}", value, "leave it out; the job's own fields decide it")
        if name not in known or name.startswith("_"):
            remedy = f"a {model_type} has no such argument; it has {', '.join(_arguments(known))}"
            raise invalid_field(f"{path}.{name}", value, remedy)
    attention = spec.kwargs.get("attention")
    if attention is not None and attention not in ATTENTION:
        raise invalid_field(f"{path}.attention", attention, f"use {' or '.join(ATTENTION)}")
    try:
        labels = {} if spec.builder == CAUSAL_LM else {"num_labels": spec.num_classes}
        config: PretrainedConfig = kind(**{**values, **labels})
    except Exception as error:  # a configuration checks its values in its own way
        raise invalid_field(path, spec.kwargs, f"the configuration refuses them: {first_line(error)}") from None
    if attention is not None:
        config._attn_implementation = attention
    # Keys and values of earlier tokens are kept for generating alone.
    if "use_cache" in known:
        config.use_cache = False
    # Without it a model that may look at all tokens would see the one that it predicts.
    if spec.builder == CAUSAL_LM and "is_decoder" in known:
        config.is_decoder = True
    size = getattr(config, "vocab_size", 0)
    if not isinstance(size, int) or not 1 <= size <= MAX_ID:
        raise invalid_field(f"{path}.vocab_size", size, f"use 1 to {MAX_ID:,}")
    pad = getattr(config, "pad_token_id", None)
    if pad is None:
        # A decoder finds the last token of a text by this id.
        config.pad_token_id = 0
    elif not isinstance(pad, int) or not 0 <= pad < size:
        raise invalid_field(f"{path}.pad_token_id", pad, f"use 0 to {size - 1:,}, an id of the vocabulary")
    return config


def lacks_padding_id(spec: ModelSpec) -> bool:
    """Return whether neither `spec` nor its type says which id pads, where a classifier finds a text's end by that id.

    `spec` is one that `build_text_model` takes. It takes 0 then, which is right only for some tokenizers.
    """
    if spec.builder != SEQUENCE_CLASSIFICATION or spec.kwargs.get("pad_token_id") is not None:
        return False
    kind = import_library(spec.builder, "builder").CONFIG_MAPPING[spec.kwargs["model_type"]]
    return getattr(kind(), "pad_token_id", None) is None


def _arguments(known: set[str]) -> list[str]:
    return sorted(name for name in known - DECIDED if not name.startswith("_") and name != "model_type")


def _multiple(spec: ModelSpec, path: str) -> int:
    multiple = spec.kwargs.get("padding_multiple", DEFAULT_MULTIPLE)
    if not isinstance(multiple, int) or isinstance(multiple, bool) or not 1 <= multiple <= MAX_MULTIPLE:
        raise invalid_field(f"{path}.padding_multiple", multiple, f"use 1 to {MAX_MULTIPLE:,}")
    return multiple


def _adapt(model: nn.Module, lora: Any, path: str) -> None:
    """Put adapters of low rank (LoRA, Hu et al. 2021) into layers of the model, in place.

    Only the adapters and the layers outside the library's base model, such as a classifier's head, are trained. The
    weights of an adapted layer are named `{layer}.base_layer.weight`.
    """
    if not isinstance(lora, dict) or not lora.keys() <= LORA_ARGUMENTS or not {"r", "target_modules"} <= lora.keys():
        remedy = f"use an object with r, target_modules, and of {', '.join(sorted(LORA_ARGUMENTS))} what you need"
        raise invalid_field(path, lora, remedy)
    rank, targets = lora["r"], lora["target_modules"]
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise invalid_field(f"{path}.r", rank, f"use 1 to {MAX_RANK:,}")
    # peft takes any other text as a regular expression, and a costly one would hold up the service that checks it.
    if targets != ALL_LINEAR and not _are_names(targets):
        remedy = f"use a list of 1 to {MAX_TARGETS:,} names of at most {MAX_TARGET} characters, or {ALL_LINEAR!r}"
        raise invalid_field(f"{path}.target_modules", targets, remedy)
    try:
        import peft
    except ImportError:
        remedy = "the package `peft` is not installed here; install the extra `huggingface` on services and nodes"
        raise invalid_field(path, lora, remedy) from None
    try:
        peft.inject_adapter_in_model(peft.LoraConfig(**lora), model)
    except Exception as error:  # peft refuses arguments in its own way
        raise invalid_field(path, lora, f"peft refuses them: {first_line(error)}") from None
    base: str = model.base_model_prefix  # type: ignore[assignment]
    for name, parameter in model.named_parameters():
        if not name.startswith(f"{base}."):
            parameter.requires_grad = True


def _are_names(targets: Any) -> bool:
    if not isinstance(targets, list) or not 1 <= len(targets) <= MAX_TARGETS:
        return False
    return all(isinstance(name, str) and 1 <= len(name) <= MAX_TARGET for name in targets)


def _check_positions(model: nn.Module, config: PretrainedConfig, length: int, path: str) -> None:
    """Raise `InvalidArgument` if the model has fewer positions than a row has tokens."""
    positions = getattr(config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # Such models begin to count behind the position of padding.
            reserved = 0 if module.padding_idx is None else module.padding_idx + 1
            positions = module.num_embeddings - reserved
    if isinstance(positions, int) and 0 < positions < length:
        raise invalid_field(
            f"{path}.kwargs.max_position_embeddings",
            config.max_position_embeddings,
            f"that is enough for {positions} tokens, and a row has {length}; use more, or a smaller max_length of "
            "tokenize",
        )


# --- Tokens ---


def split_tokens(inputs: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, int64 (B, T), of float32 (B, 2·L).

    T is that of the longest row, rounded up to a multiple, and at most L. Only padding that every row has at its end is
    cut. A row without any token attends to its first one, because a softmax over nothing is not a number.
    """
    length = inputs.shape[1] // 2
    ids, mask = inputs[:, :length].long(), inputs[:, length:].long()
    if inputs.is_meta:
        return ids, mask
    used = mask.ne(0).any(0).nonzero()
    needed = int(used[-1]) + 1 if len(used) else 1
    width = min(length, -(-needed // multiple) * multiple)
    ids, mask = ids[:, :width], mask[:, :width]
    first = torch.zeros_like(mask)
    first[:, 0] = 1
    return ids, torch.where(mask.any(1, keepdim=True), mask, first)


def taking_tokens(model: nn.Module, multiple: int, takes: type) -> nn.Module:
    """Return `model`, now called with float32 (B, 2·L) and returning float32 (B, K).

    Its class is replaced by a subclass instead of wrapping it, so that its parameters keep their names.
    """
    theirs = type(model)
    model.__class__ = type(f"Text{theirs.__name__}", (takes, theirs), {})
    model.padding_multiple = multiple  # type: ignore[assignment]
    return model


def surprises(logits: Tensor, ids: Tensor, mask: Tensor, length: int) -> Tensor:
    """Return -ln of the probability of each token given those before it, float32 (B, L).

    `logits` are (B, T, V), `ids` and `mask` (B, T). It is `NO_TOKEN` for padding and for the first token of a row.
    """
    each = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none").clamp(min=0)
    counts = (mask[:, 1:] * mask[:, :-1]).bool()
    found = torch.where(counts, each, each.new_full((), NO_TOKEN))
    return F.pad(found, (1, length - ids.shape[1]), value=NO_TOKEN)


class _TakesTokens:
    # Without annotations: the library evaluates those of its models' subclasses.
    padding_multiple = DEFAULT_MULTIPLE

    def forward(self, inputs: Tensor) -> Tensor:
        ids, mask = split_tokens(inputs, self.padding_multiple)
        with _WithoutValues() if ids.is_meta else nullcontext():
            logits: Tensor = super().forward(input_ids=ids, attention_mask=mask).logits  # type: ignore[misc]
        return self._outputs(logits, ids, mask, inputs.shape[1] // 2)

    def _outputs(self, logits: Tensor, ids: Tensor, mask: Tensor, length: int) -> Tensor:  # noqa: ARG002
        return logits


class _GivesSurprises(_TakesTokens):
    def _outputs(self, logits: Tensor, ids: Tensor, mask: Tensor, length: int) -> Tensor:
        return surprises(logits, ids, mask, length)


class _WithoutValues(TorchFunctionMode):
    """Answers False where the library asks for a value of a tensor on the meta device, which has none.

    It asks whether a mask can be left out.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in (Tensor.__bool__, Tensor.item) and args[0].is_meta:
            return False
        return function(*args, **(kwargs or {}))
