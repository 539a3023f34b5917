"""Fits a text model to the tokenizer of its input: its vocabulary, its padding and the order of its two columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shared.dataset_version import DatasetVersion
from shared.errors import invalid_field
from shared.models import TRANSFORMERS
from shared.models.texts import lacks_padding_id
from shared.transforms import Pipeline
from shared.transforms.batch import Step
from shared.transforms.steps.columns import Concat
from shared.transforms.steps.tokenizing import Tokenize
from train_service.domain.spec import CAUSAL_LM, TrainingSpec

FIELD = "spec.transform"
SIZE, PAD = "vocab_size", "pad_token_id"


def with_vocabulary(spec: TrainingSpec, version: DatasetVersion) -> TrainingSpec:
    """Set `vocab_size` and `pad_token_id` of a text model where the specification leaves them out.

    They are those of the tokenizer that makes the input, in the job's transform or in one of the version's. Tokens that
    the version brings without a tokenizer are not checked. Raises `InvalidArgument` for a vocabulary that is too small,
    and for columns in another order than ids, mask.
    """
    if not spec.model.builder.startswith(TRANSFORMERS):
        return spec
    own = Pipeline.from_config(spec.transform, spec.input_column, FIELD).steps
    joins = [(place, step) for place, step in enumerate(own) if isinstance(step, Concat)]
    joined = next(((place, step) for place, step in reversed(joins) if step.into == spec.input_column), None)
    if joined is None:
        return spec
    place, concat = joined
    found = [step for step in (*_of_version(version), *own) if isinstance(step, Tokenize)]
    tokenize = next((step for step in reversed(found) if step.ids_column in concat.columns), None)
    if tokenize is None:
        return spec
    columns = (tokenize.ids_column, tokenize.mask_column)
    if tuple(concat.columns) != columns:
        path = f"{FIELD}.steps[{place}].concat.columns"
        raise invalid_field(path, ",".join(concat.columns), f"the model takes ids and mask; use {','.join(columns)}")
    # An import needs no label column.
    if spec.model.builder == CAUSAL_LM and spec.label_column not in ("", tokenize.ids_column):
        remedy = f"a causal language model predicts the tokens of its input; use {tokenize.ids_column}"
        raise invalid_field("spec.label_column", spec.label_column, remedy)
    size, pad = tokenize.vocabulary
    kwargs = {SIZE: size, PAD: pad, **spec.model.kwargs}
    if isinstance(kwargs[SIZE], int) and kwargs[SIZE] < size:
        path = f"spec.model.kwargs.{SIZE}"
        raise invalid_field(path, kwargs[SIZE], f"the tokenizer has ids up to {size - 1:,}; use {size:,} or more")
    return replace(spec, model=replace(spec.model, kwargs=kwargs))


def check_padding(spec: TrainingSpec) -> None:
    """Raise `InvalidArgument` for trained weights that would find the end of a text by an id that is only assumed."""
    if lacks_padding_id(spec.model):
        remedy = "name the id that its tokenizer pads with: the model takes the last token before it for a text's end"
        raise invalid_field(f"spec.model.kwargs.{PAD}", None, remedy)


def _of_version(version: DatasetVersion) -> Iterator[Step]:
    for transform in version.manifest.transforms:
        for step in transform.get("steps", ()):
            if "tokenize" in step:
                yield from Pipeline.from_config({"steps": [step]}, field=f"{version.name}.transforms").steps
