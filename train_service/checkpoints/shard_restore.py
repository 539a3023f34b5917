"""A sharded model goes on from a checkpoint: each rank reads its own rows of weights and optimizer state.

The bytes go from the store right into the shards, a few ranges at a time, so nothing is whole on any rank. The
checkpoint may have whole tensors or shards of any number of ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.checkpoint import Checkpoint, CheckpointContent, CheckpointEntry, load_checkpoint
from shared.checkpoint.format import OPTIMIZER, WEIGHTS
from shared.checkpoint.reading import Readable, StoredTensor, Wanted, read_index, read_rows
from shared.models.loaded import TORCH_DTYPES, memory_of
from shared.storage import ObjectStore
from train_service.checkpoints.tensor_files import NEST, nested
from train_service.learning.sharding import local_rows

logger = logging.getLogger(__name__)

# Rows for a device, or for memory that is not in the order of the file, are read into as much host memory at a time.
STAGED_BYTES = 64 * 2**20


class NotByRows(Exception):
    """The checkpoint cannot be read shard by shard, only whole."""


def restore_shards(
    store: ObjectStore,
    entry: CheckpointEntry,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    touched: Callable[[], None] = lambda: None,
) -> tuple[CheckpointContent, dict[str, Any]]:
    """Load this rank's rows of the checkpoint into the sharded model and its optimizer.

    Returns the content and the rest of the state. No rank needs another one for it. Raises `NotByRows` before anything
    is loaded if the state does not lie by rows, and `DataLoss`.
    """
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    state_tensors, metadata = read_index(store, checkpoint.stored(OPTIMIZER))
    state = nested(json.loads(metadata[NEST]), state_tensors)
    plan = _optimizer_plan(model, optimizer, state["optimizer"])
    wanted = [*_weights_plan(store, checkpoint, model), *plan.wanted]
    read_into(store, wanted, touched)
    plan.put(optimizer)
    rest = {name: _read_all(store, value) for name, value in state.items() if name != "optimizer"}
    return checkpoint.content, rest


def _weights_plan(store: Readable, checkpoint: Checkpoint, model: nn.Module) -> Iterator[tuple[StoredTensor, Tensor]]:
    tensors, _ = read_index(store, checkpoint.stored(WEIGHTS))
    own = model.state_dict()
    if tensors.keys() != own.keys():
        raise NotByRows(f"the weights are not those of the model: {', '.join(sorted(tensors.keys() ^ own.keys()))}")
    for name, tensor in own.items():
        _check_same(name, tensors[name], tensor)
        yield tensors[name], tensor


class _OptimizerPlan:
    """The state to read, and where it goes."""

    def __init__(self) -> None:
        self.wanted: list[tuple[StoredTensor, Tensor]] = []
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.update(self.state)
        for group, values in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(values)


def _optimizer_plan(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> _OptimizerPlan:
    from torch.distributed.tensor import DTensor

    plan = _OptimizerPlan()
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    counted_on_device: set[str] = set()
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        if sorted(names[id(param)] for param in group["params"]) != sorted(map(str, values["params"])):
            raise NotByRows("the optimizer's groups have other parameters")
        plan.groups.append({key: value for key, value in values.items() if key != "params"})
        if any(isinstance(value, StoredTensor) for value in plan.groups[-1].values()):
            raise NotByRows("a group of the optimizer has tensors of its own")
        if values.get("fused") or values.get("capturable"):
            counted_on_device.update(map(str, values["params"]))
    for name, values in saved["state"].items():
        parameter = parameters[name]
        state = plan.state[parameter] = {}
        for key, value in values.items():
            if not isinstance(value, StoredTensor):
                state[key] = value
                continue
            kind = TORCH_DTYPES[value.dtype]
            if isinstance(parameter, DTensor) and value.shape == tuple(parameter.shape):
                local = torch.empty_like(local_rows(parameter)[1], dtype=kind)
                state[key] = DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                    run_check=False,
                )
            elif not value.shape:
                # As `Optimizer.load_state_dict`: the count of steps stays in host memory, unless a kernel reads it.
                is_in_host_memory = key == "step" and name not in counted_on_device
                state[key] = torch.empty((), dtype=kind, device="cpu" if is_in_host_memory else parameter.device)
            else:
                raise NotByRows(f"{key} of {name} has the shape {value.shape}")
            plan.wanted.append((value, state[key]))
    return plan


def read_into(
    store: Readable, wanted: Sequence[tuple[StoredTensor, Tensor]], touched: Callable[[], None] = lambda: None
) -> None:
    """Fill this rank's rows of each tensor."""
    direct: list[Wanted] = []
    staged: list[tuple[Wanted, Tensor, Tensor]] = []
    for stored, tensor in wanted:
        rows, own = local_rows(tensor)
        first = rows.start or 0
        if own.device.type == "cpu" and own.is_contiguous():
            direct.append(Wanted(stored, first, memory_of(own)))
        else:
            staged.append((Wanted(stored, first, memoryview(b"")), own, tensor))
    read_rows(store, direct, touched)
    while staged:
        batch: list[tuple[Wanted, Tensor, Tensor]] = []
        size = 0
        while staged and (not batch or size + staged[0][1].nbytes <= STAGED_BYTES):
            batch.append(staged.pop(0))
            size += batch[-1][1].nbytes
        # Without digests of blocks each call reads whole files.
        if not all(piece.file.blocks for one, _, _ in batch for piece in one.tensor.pieces):
            batch, staged = [*batch, *staged], []
        copies = [torch.empty(own.shape, dtype=own.dtype) for _, own, _ in batch]
        parts = zip(batch, copies, strict=True)
        read_rows(store, [Wanted(one.tensor, one.first, memory_of(copy)) for (one, _, _), copy in parts], touched)
        for (_, own, _), copy in zip(batch, copies, strict=True):
            with torch.no_grad():
                own.copy_(copy)


def _read_all(store: Readable, value: Any) -> Any:
    """Return a nested value with its tensors read. The schedule and the scaler have small ones."""
    if isinstance(value, StoredTensor):
        tensor = torch.empty(value.shape, dtype=TORCH_DTYPES[value.dtype])
        read_rows(store, [Wanted(value, 0, memory_of(tensor))])
        return tensor
    if isinstance(value, dict):
        return {key: _read_all(store, one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_read_all(store, one) for one in value)
    return value


def _check_same(name: str, stored: StoredTensor, tensor: Tensor) -> None:
    if stored.shape != tuple(tensor.shape) or TORCH_DTYPES[stored.dtype] != tensor.dtype:
        raise NotByRows(f"{name} is {stored.dtype} {stored.shape} and not {tensor.dtype} {tuple(tensor.shape)}")
