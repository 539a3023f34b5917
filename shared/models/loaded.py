"""A checkpoint's model, loaded for inference: the same code for requests and for whole dataset versions.

The module imports torch, which takes seconds, so only processes that run models import it. It also scales a
regression's target, and scales the model's outputs back to the target's own unit.
"""

from __future__ import annotations

import copy
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from shared.checkpoint import CheckpointContent
from shared.checkpoint.format import WEIGHTS, Checkpoint
from shared.checkpoint.reading import Wanted
from shared.code_bundle_registry import entry_failed
from shared.errors import FailedPrecondition, InvalidArgument
from shared.model_spec import REGRESSION, ModelSpec, TargetScaling
from shared.models import build_model, load_weights
from shared.models.inputs import Inputs, arrays_of

# The types of tensors by their names in files of safetensors.
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# --- Loaded ---

Outputs = list[NDArray[np.generic]]


class LoadedModel:
    """A model that is ready for inference. Not thread-safe.

    Raises `FailedPrecondition` if the weights do not fit the model, `DataLoss` if they are damaged, and `Unavailable`.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        """Build the checkpoint's model, and read its weights right into it.

        So a process holds the model and a few ranges of the file, and never the file beside the model.
        """
        content = checkpoint.content
        try:
            self.module = build_model(content.model)
            read_weights(self.module, checkpoint)
        except (InvalidArgument, RuntimeError, SafetensorError, ValueError) as error:
            raise does_not_load(content, error) from error
        self.module.eval()
        self.module.to(device)
        self._device = device
        self._task = content.model.task
        # A user's own model may return anything.
        self._own = content.model if content.model.is_own else None
        self._target_scaling = content.target_scaling
        self._layout = torch.contiguous_format

    def channels_last(self) -> LoadedModel:
        """Return the same model for inputs (B, C, H, W) with the channels last in memory.

        Its answers differ from this model's by rounding, because other kernels add in another order. Both models share
        the parameters that need no conversion.
        """
        other = copy.copy(self)
        other._layout = torch.channels_last
        shared = {id(one): one for one in chain(self.module.parameters(), self.module.buffers()) if one.dim() != 4}
        other.module = copy.deepcopy(self.module, shared).to(memory_format=torch.channels_last)
        return other

    def __call__(self, prepared: NDArray[np.generic]) -> Outputs:
        """Run the model on the prepared input of B rows, float32 (B, *shape), or records (B,) of several inputs.

        A classifier returns logits (B, classes) float32, probabilities (B, classes) float32 and labels (B,) int64. A
        regression returns values (B, numbers) float32 in the target's own unit, whatever its scaling in training.
        """
        # torch needs writable memory, and rows from the wire are read-only.
        arrays = arrays_of(prepared)
        with torch.inference_mode():
            moved: Inputs
            if isinstance(arrays, dict):
                moved = {name: torch.from_numpy(one).to(self._device) for name, one in arrays.items()}
            else:
                inputs = torch.from_numpy(np.require(arrays, np.float32, ["C", "W"]))
                moved = inputs.to(self._device, memory_format=self._layout)
            rows = len(prepared)
            given = self.module(moved) if self._own is None else _run_own_module(self.module, moved, rows, self._own)
            if self._task == REGRESSION:
                return [undo_scaling(self._target_scaling, given).cpu().numpy()]
            outputs = (given, given.softmax(dim=1), given.argmax(dim=1))
        return [output.cpu().numpy() for output in outputs]


def read_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Read the checkpoint's weights and buffers right into a model that was built for them.

    A tensor of another dtype, device or memory order is read beside the model and copied. The whole file is read beside
    it if blocks of the file have no digests, as in small ones and those of earlier releases, and if names or shapes
    differ: whether the weights fit then is up to the model. Raises `RuntimeError` if they do not.
    """
    if not all(file.blocks for file in checkpoint.stored(WEIGHTS)):
        load_weights(model, load_safetensors(checkpoint.read(WEIGHTS)))
        return
    stored, own = checkpoint.tensors(WEIGHTS), model.state_dict()
    if stored.keys() != own.keys() or any(_shape(own[name]) != tensor.shape for name, tensor in stored.items()):
        load_weights(model, load_safetensors(checkpoint.read(WEIGHTS)))
        return
    weights: dict[str, Tensor] = {}
    wanted: list[Wanted] = []
    for name, tensor in stored.items():
        there, dtype = own[name], TORCH_DTYPES[tensor.dtype]
        if there.dtype != dtype or there.device.type != "cpu" or not there.is_contiguous():
            there = torch.empty(tensor.shape, dtype=dtype)
        weights[name] = there
        wanted.append(Wanted(tensor, 0, memory_of(there)))
    checkpoint.fill(wanted)
    load_weights(model, weights)


def _shape(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the shape, None for a parameter that gets its shape from the first batch."""
    return None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in host memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _run_own_module(module: nn.Module, inputs: Inputs, rows: int, model: ModelSpec) -> torch.Tensor:
    """Run a user's own module.

    Raises `FailedPrecondition` with the line of its code, or for an output of another shape.
    """
    try:
        given: object = module(inputs)
    except Exception as error:  # a user's code may raise anything
        raise entry_failed(model.code_bundle, model.entry, error) from error
    shape = (rows, model.num_classes)
    found = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
    if not isinstance(given, torch.Tensor) or found != shape:
        raise FailedPrecondition(
            f"the model's forward gives {found} for {shape[0]} rows and not a tensor of {shape}: it can be trained, "
            "and not be served or predicted with",
            reason="MODEL_DOES_NOT_SERVE",
        )
    return given


def does_not_load(content: CheckpointContent, error: Exception) -> FailedPrecondition:
    return FailedPrecondition(
        f"the model of {content.training_job} does not load: {error}", reason="MODEL_DOES_NOT_LOAD"
    )


# --- Scaled target ---


def scale_target(scaling: TargetScaling | None, labels: Tensor) -> Tensor:
    """Scale labels (B, K) from their own unit to what the model learns, of the same dtype.

    Without a scaling they stay unchanged.
    """
    if scaling is None:
        return labels
    exact = labels.double()
    return ((exact - exact.new_tensor(scaling.mean)) / exact.new_tensor(scaling.deviation)).to(labels.dtype)


def undo_scaling(scaling: TargetScaling | None, outputs: Tensor) -> Tensor:
    """Scale outputs (B, K) back to the target's own unit, float32 (B, K).

    Without a scaling they stay unchanged.
    """
    if scaling is None:
        return outputs
    exact = outputs.double()
    return (exact * exact.new_tensor(scaling.deviation) + exact.new_tensor(scaling.mean)).float()
