"""Starting a run with the weights of another job's checkpoint.

The run takes the tensors whose name and shape match, and initializes the others. A service checks this when a job is
created, and imports torch only then.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared import names
from shared.checkpoint import CheckpointEntry, load_checkpoint, resolve
from shared.checkpoint.format import WEIGHTS
from shared.checkpoint.reading import read_index
from shared.checkpoint.references import NAME_PATTERN
from shared.errors import DataLoss, FailedPrecondition, NotFound, invalid_field
from shared.model_spec import NONE, TargetScaling
from shared.storage import ObjectMissing, ObjectStore

if TYPE_CHECKING:
    from torch import nn

    from shared.model_spec import ModelSpec
    from train_service.domain.spec import TrainingSpec

FIELD = "spec.initial_checkpoint"
SHOWN = 8
# What peft puts into the names of the weights of an adapted layer.
ADAPTED = ".base_layer."

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Fit:
    """Names of tensors by how they match.

    `taken` come from the checkpoint. `anew` are only in the model, `unused` only in the checkpoint.
    """

    taken: tuple[str, ...]
    anew: tuple[str, ...]
    unused: tuple[str, ...]

    def left_out(self) -> str:
        """Return in words which tensors do not match. The text is empty if all do."""
        parts = [("start anew", self.anew), ("are not used", self.unused)]
        return "; ".join(f"{_listed(one)} {what}" for what, one in parts if one)


def fit(model: Shapes, checkpoint: Shapes) -> Fit:
    """Return which tensors match in name and shape.

    A layer with an adapter also takes the weights of the same layer without one.
    """
    sources = {name: source_name(name, checkpoint) for name in model}
    taken = {
        name
        for name, shape in model.items()
        if (source := sources[name]) in checkpoint and tuple(checkpoint[source]) == tuple(shape)
    }
    used = {sources[name] for name in taken}
    return Fit(
        tuple(name for name in model if name in taken),
        tuple(name for name in model if name not in taken),
        tuple(name for name in checkpoint if name not in used),
    )


def source_name(name: str, checkpoint: Container[str]) -> str:
    """Return the checkpoint's name of a tensor of the model. It may lack the part that an adapter adds."""
    return name if name in checkpoint else name.replace(ADAPTED, ".")


def check_name(name: str) -> None:
    """Raise `InvalidArgument` unless `name` is a checkpoint's. A job's name alone is ambiguous."""
    names.parse(FIELD, name, NAME_PATTERN)


def check_fits(store: ObjectStore, entry: CheckpointEntry, model: ModelSpec) -> None:
    """Raise `InvalidArgument` if no parameter matches.

    At least one parameter of the model must be in the checkpoint. Raises `FailedPrecondition` for a damaged checkpoint.
    Imports torch.
    """
    import torch

    from shared.models import build_model

    with torch.device("meta"):
        built = build_model(model, "spec.model")
    shapes = {name: tuple(one.shape) for name, one in built.named_parameters()}
    found = fit(shapes, weight_shapes(store, entry))
    if not found.taken:
        raise invalid_field(FIELD, entry.name, f"no weights of it fit a {model.builder}; use one of the same model")


def check_scaling(store: ObjectStore, entry: CheckpointEntry, spec: TrainingSpec) -> None:
    """Raise `InvalidArgument` if only the checkpoint is scaled.

    Its target was scaled, but the run's target is not. The model's last layer would otherwise begin in the unit of the
    scaled target.
    """
    if spec.target_scaling == NONE and kept_scaling(store, entry, spec.model) is not None:
        remedy = f"the target of {entry.name} was scaled, and its last layer answers so; use TARGET_SCALING_STANDARD"
        raise invalid_field("spec.target_scaling", spec.target_scaling, remedy)


def kept_scaling(store: ObjectStore, entry: CheckpointEntry, model: ModelSpec) -> TargetScaling | None:
    """Return the checkpoint's target scaling.

    Its last layer was trained in that scale. None if there is none, or if the layer is initialized anew because it has
    another number of outputs.
    """
    scaling = load_checkpoint(store, entry.folder, entry.manifest_sha256).content.target_scaling
    return scaling if scaling is not None and len(scaling.mean) == model.num_classes else None


def weight_shapes(store: ObjectStore, entry: CheckpointEntry) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's weights.

    They come from the file's header; the weights are not read. Raises `FailedPrecondition` for a damaged checkpoint.
    """
    try:
        checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
        tensors, _ = read_index(store, checkpoint.stored(WEIGHTS))
        return {name: tensor.shape for name, tensor in tensors.items()}
    except (DataLoss, ObjectMissing, ValueError) as error:
        raise FailedPrecondition(
            f"{FIELD}: {entry.name} is damaged: {error}; use another",
            reason="CHECKPOINT_DAMAGED",
            metadata={"resource": entry.name},
            fields=[(FIELD, "is damaged")],
        ) from None


def load_initial(store: ObjectStore, name: str, model: nn.Module) -> tuple[CheckpointEntry, Fit]:
    """Load the matching tensors of the checkpoint into `model`.

    Every rank does this itself, and all read the same bytes.

    Raises `FailedPrecondition` if the checkpoint is missing or damaged, because another attempt would find the same.
    """
    import safetensors.torch

    from shared.models.loaded import TORCH_DTYPES
    from train_service.checkpoints.tensor_files import read_into
    from train_service.learning.sharding import put_some_weights

    own = model.state_dict()
    try:
        entry = resolve(store, FIELD, name)
        checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
        tensors, _ = read_index(store, checkpoint.stored(WEIGHTS))
        found = fit(
            {key: one.shape for key, one in own.items()}, {key: tensor.shape for key, tensor in tensors.items()}
        )
        sources = {key: source_name(key, tensors) for key in found.taken}
        if all(TORCH_DTYPES[tensors[source].dtype] == own[key].dtype for key, source in sources.items()):
            # Each rank reads its own rows, right into the model.
            read_into(store, [(tensors[source], own[key]) for key, source in sources.items()])
            return entry, found
        weights = safetensors.torch.load(checkpoint.read(WEIGHTS))
    except (NotFound, DataLoss) as error:
        raise FailedPrecondition(
            f"{FIELD}: {error.message}; start a new job from another",
            reason="INITIAL_CHECKPOINT_LOST",
            metadata={"resource": name},
            fields=[(FIELD, error.message)],
        ) from None
    put_some_weights(model, {key: weights[sources[key]] for key in found.taken})
    return entry, found


def _listed(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
    return ", ".join(tensors[:SHOWN]) + more
