"""The start of a sharded model: it is built without memory, and each rank keeps its shards of the first weights alone.

The seed draws the same weights as for a model that is built whole. The builder runs once on fake tensors, which have
shapes and no memory, and each operation on them is noted. The model itself is built on the meta device and sharded.
Then the operations run in the same order on real tensors, so that they draw the same numbers. A tensor exists from its
first operation whose result is still read to its last one; then its rows go to the shard, and it is freed. So a rank
holds one tensor, and its shard.

A builder that looks at the values that it draws, or that computes them with something else than torch, cannot be noted.
`start_sharded` then builds the model whole on every rank, as earlier releases did.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from shared.errors import first_line
from train_service.learning.sharding import local_rows, shard

logger = logging.getLogger(__name__)

# A parameter of glibc's `mallopt`, and its value here.
M_MMAP_THRESHOLD = -3
RETURNED_FROM_BYTES = 1024 * 1024
TRUNC_NORMAL: Any = nn.init._no_grad_trunc_normal_
# Operations that give their first argument new values, whatever it had before.
OVERWRITES = {
    "trunc_normal_",
    "uniform_",
    "normal_",
    "fill_",
    "zero_",
    "bernoulli_",
    "random_",
    "exponential_",
    "log_normal_",
    "cauchy_",
}


def start_sharded(
    build: Callable[[], nn.Module],
    seed: Callable[[], None],
    device: torch.device,
    world_size: int,
    units: Iterable[str] | None,
) -> nn.Module:
    """Return the sharded model with the first weights that `seed` draws, on `device`."""
    if device.type == "cpu":
        return_freed_memory()
    seed()
    try:
        recorded = record(build)
    except Exception as error:  # a user's own builder may do anything
        logger.info("the model is built whole on each rank before it is sharded: %s", first_line(error))
        seed()
        return shard(build().to(device), device.type, world_size, units)
    seed()
    with torch.device("meta"):
        model = build()
    shard(model, device.type, world_size, units)
    model.to_empty(device=device)
    _tie_again(model, recorded)
    seed()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in recorded.values():
            rows, own = local_rows(tensors[name])
            own.copy_(value[rows] if value.dim() else value)
    return model


def return_freed_memory() -> None:
    """Let glibc return large blocks to the system as soon as they are freed.

    By default it keeps what FSDP gathers for a layer and frees again: after a step a rank held twice its shard.
    """
    with suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, RETURNED_FROM_BYTES)


@dataclass(frozen=True)
class _View:
    """A tensor as a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int


@dataclass(frozen=True)
class _Operation:
    function: Any
    # Arguments with a `_View` for each fake tensor, and how they are nested.
    leaves: Sequence[Any]
    nesting: Any
    # The storages that it makes, by their place among its results.
    made: Sequence[tuple[int, int]]
    overwrites: int | None

    @property
    def storages(self) -> set[int]:
        return {leave.storage for leave in self.leaves if isinstance(leave, _View)} | {
            storage for _, storage in self.made
        }


class Recorded:
    """The operations that make a model's first values, and where its parameters and buffers lie."""

    def __init__(self, operations: Sequence[_Operation], views: dict[str, _View], ties: dict[str, str]) -> None:
        self._operations = operations
        self._views = views
        # Other names of tensors, each with the name in `views`.
        self.ties = ties

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Run the operations. Yield each parameter and buffer by name, once, as soon as it has its last value."""
        # By storage, its operations and whether each gives it new values altogether; the last one first.
        accesses: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        for number, operation in reversed(list(enumerate(self._operations))):
            for storage in operation.storages:
                accesses[storage].append((number, operation.overwrites == storage))
        names: dict[int, list[str]] = defaultdict(list)
        for name, view in self._views.items():
            names[view.storage].append(name)
        memory: dict[int, torch.UntypedStorage] = {}
        for operation in self._operations:
            self._run(operation, memory)
            for storage in operation.storages:
                accesses[storage].pop()
                if not accesses[storage]:
                    for name in names[storage]:
                        yield name, _tensor(self._views[name], memory)
                if not accesses[storage] or accesses[storage][-1][1]:
                    del memory[storage]

    def _run(self, operation: _Operation, memory: dict[int, torch.UntypedStorage]) -> None:
        leaves = []
        for leave in operation.leaves:
            if isinstance(leave, _View):
                if leave.storage == operation.overwrites and leave.storage not in memory:
                    memory[leave.storage] = torch.empty(leave.storage_bytes, dtype=torch.uint8).untyped_storage()
                leaves.append(_tensor(leave, memory))
            else:
                leaves.append(leave.clone() if isinstance(leave, Tensor) else leave)
        arguments, keywords = tree_unflatten(leaves, operation.nesting)
        results, _ = tree_flatten(operation.function(*arguments, **keywords))
        for place, storage in operation.made:
            memory[storage] = results[place].untyped_storage()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        # Kept, so that no storage gets the number of another.
        self.kept: list[Any] = []
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        leaves, nesting = tree_flatten((args, kwargs or {}))
        noted: list[Any] = []
        for one in leaves:
            if isinstance(one, FakeTensor):
                noted.append(_view(one))
                if noted[-1].storage not in self.known:
                    raise _NotRecorded(f"{func} takes a tensor of unknown origin")
            else:
                noted.append(_copied(one) if isinstance(one, Tensor) else one)
        result = func(*args, **(kwargs or {}))
        results, _ = tree_flatten(result)
        made = []
        for place, one in enumerate(results):
            if isinstance(one, FakeTensor) and (storage := _view(one).storage) not in self.known:
                self.known.add(storage)
                made.append((place, storage))
        self.kept.append((leaves, results))
        self.operations.append(
            _Operation(func, noted, nesting, made, _overwritten(func.overloadpacket.__name__, noted))
        )
        return result

    def trunc_normal(self, tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Note `trunc_normal_` as one operation: it draws again what lies outside, so it looks at values."""
        leaves, nesting = tree_flatten(((tensor, *arguments), keywords))
        noted = [_view(leave) if leave is tensor else leave for leave in leaves]
        self.operations.append(_Operation(TRUNC_NORMAL, noted, nesting, (), _overwritten("trunc_normal_", noted)))
        return tensor


class _NotRecorded(Exception):
    """An operation cannot be repeated."""


def record(build: Callable[[], nn.Module]) -> Recorded:
    """Run the builder on fake tensors. Raises what a builder raises that needs values."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    recorder = _Recorder()
    with mock.patch.object(nn.init, "_no_grad_trunc_normal_", recorder.trunc_normal), FakeTensorMode(), recorder:
        model = build()
    views: dict[str, _View] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if not isinstance(tensor, FakeTensor) or _view(tensor).storage not in recorder.known:
            raise _NotRecorded(f"{name} is no tensor that the builder made with torch")
        if id(tensor) in first:
            ties[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            views[name] = _view(tensor)
    return Recorded(recorder.operations, views, ties)


def _copied(tensor: Tensor) -> Tensor:
    """Return a real copy of a real tensor, in the midst of fake ones."""
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch():
        return tensor.clone()


def _tie_again(model: nn.Module, recorded: Recorded) -> None:
    """Give tied parameters one tensor again: `to_empty` makes one for each name."""
    for name, first in recorded.ties.items():
        module, _, attribute = name.rpartition(".")
        source, _, original = first.rpartition(".")
        setattr(model.get_submodule(module), attribute, getattr(model.get_submodule(source), original))


def _overwritten(name: str, noted: Sequence[Any]) -> int | None:
    """Return the storage of which the operation replaces all values without reading one."""
    if name not in OVERWRITES or not isinstance(noted[0], _View):
        return None
    view = noted[0]
    is_all = view.offset == 0 and math.prod(view.size) * view.dtype.itemsize == view.storage_bytes
    return view.storage if is_all and not any(isinstance(one, _View) for one in noted[1:]) else None


def _view(tensor: Tensor) -> _View:
    return _View(
        tensor.untyped_storage()._cdata,
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.untyped_storage().nbytes(),
    )


def _tensor(view: _View, memory: dict[int, torch.UntypedStorage]) -> Tensor:
    return torch.empty(0, dtype=view.dtype).set_(memory[view.storage], view.offset, view.size, view.stride)
