"""A model sharded over ranks (FSDP): its start, its sharding, and conversion of unsharded weights and optimizer state.

torch's FSDP modules take longer to import than torch itself, so they are imported only if a model is sharded.

Some modules of a model are units: each is gathered whole for its own calls, then freed. The blocks of a model are
units: the children of a ModuleList, ModuleDict or Sequential. A large child of the model is a unit, too. All other
parameters belong to the unit around them, in the end to the model itself, which is gathered for the whole step. A
parameter must be in one unit and be used only while that unit's `forward` runs; a unit that breaks this is dissolved
into the one around it.

At the start a sharded model is built without memory, and each rank keeps its shards of the first weights alone.
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
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shared.errors import first_line
from shared.model_spec import ModelSpec
from shared.models import build_model, load_weights
from shared.models.inputs import zero_inputs
from shared.transforms.records import RowShape
from train_service.domain.spec import FSDP

# --- Sharded weights and state ---


def shard(model: nn.Module, device_type: str, world_size: int, units: Iterable[str] | None = None) -> nn.Module:
    """Shard the model's parameters and gradients in place, unit by unit, and return it.

    Build its optimizer after that. `units` come from `find_units`; by default they are the units that it finds without
    calling the model.

    Raises `ShardingError` that names the module that cannot be sharded.

    Activations and dropouts no longer act in place, which computes the same: the input of a sharded layer is a view
    made by a function of torch's own, and torch refuses to change such a view in place.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    mesh = init_device_mesh(device_type, (world_size,))
    for name in [*(find_units(model) if units is None else units), ""]:
        try:
            fully_shard(model.get_submodule(name), mesh=mesh)
        except (ValueError, NotImplementedError, AssertionError) as error:  # from torch; the text names the parameter
            raise ShardingError(name, first_line(error)) from error
    return model


class ShardingError(ValueError):
    """Error for a module that torch cannot shard. The name `""` is the model itself."""

    def __init__(self, module: str, problem: str) -> None:
        super().__init__(f"FSDP cannot shard {module or 'the model'}: {problem}")
        self.module = module
        self.problem = problem


def sharded(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


@torch.no_grad()
def local_rows(tensor: Tensor) -> tuple[slice, Tensor]:
    """Return which rows of a tensor this rank has, and its part: all of a tensor that is not sharded.

    The part shares the tensor's memory. Raises `NotImplementedError` for a tensor that is not sharded by rows.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return slice(None), tensor
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        return slice(None), tensor
    if all(placement == Replicate() for placement in tensor.placements):
        return slice(None), tensor.to_local()
    if tuple(tensor.placements) != (Shard(0),):
        raise NotImplementedError(f"a tensor is sharded by {tensor.placements}")
    own = tensor.to_local()
    each = -(-tensor.shape[0] // tensor.device_mesh.size())
    first = min(each * tensor.device_mesh.get_local_rank(), tensor.shape[0])
    return slice(first, first + own.shape[0]), own


def whole_weights(model: nn.Module, note_progress: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Return unsharded weights and buffers. They are a copy only if the model is sharded.

    Every rank must call it for a sharded model; only rank 0 receives the weights, in host memory. `note_progress` is
    called with each tensor that is gathered, because a large model takes long.
    """
    if not sharded(model):
        return dict(model.state_dict())
    from torch.distributed.checkpoint import state_dict

    return _gathered(state_dict.get_model_state_dict(model), note_progress)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load unsharded weights, given on every rank in any order."""
    if not sharded(model):
        return load_weights(model, weights)
    if weights.keys() != (there := model.state_dict().keys()):
        wrong = ", ".join(sorted(weights.keys() ^ there))
        raise RuntimeError(f"the weights are not those of the model: {wrong}")
    return put_some_weights(model, weights)


def put_some_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load unsharded weights for some tensors of the model. The others keep their values.

    Every rank passes the weights, in any order.
    """
    if not sharded(model):
        own = model.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        return
    from torch.distributed.checkpoint import state_dict

    # A tensor may have several names in the model. torch finds it only by the first of them.
    names = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    first = set(names.values())
    once = {name: tensor for name, tensor in weights.items() if name in first}
    state_dict.set_model_state_dict(model, _in_one_order(once), options=_whole(strict=False))


def whole_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, parallel: str, note_progress: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Return the unsharded state of the optimizer, as `whole_weights` does.

    With FSDP it is keyed by names of parameters, on any number of ranks, so that a run may resume on another number.
    """
    if parallel != FSDP:
        return optimizer.state_dict()
    from torch.distributed.checkpoint import state_dict

    return _gathered(state_dict.get_optimizer_state_dict(model, optimizer), note_progress)


def sharded_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state as `whole_optimizer_state` does, keyed by names, with the sharded tensors themselves."""
    from torch.distributed.checkpoint import state_dict

    return dict(state_dict.get_optimizer_state_dict(model, optimizer))


def put_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], parallel: str
) -> None:
    """Load the result of `whole_optimizer_state`, on every rank."""
    if parallel != FSDP:
        return optimizer.load_state_dict(state)
    if not state["state"]:
        # torch cannot load an empty state. It holds only the groups' values, in their order.
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        return None
    from torch.distributed.checkpoint import state_dict

    # Not strict: a parameter that never had a gradient has no state.
    state_dict.set_optimizer_state_dict(model, optimizer, state, options=_whole(strict=False))
    return None


@torch.no_grad()
def _gathered(state: Mapping[str, Any], note_progress: Callable[[], None]) -> dict[str, Any]:
    """Return `state` with unsharded tensors in host memory, on rank 0, and nothing on other ranks.

    torch's own options do the same, but without a call per tensor that could report progress.
    """
    from torch.distributed.tensor import DTensor

    keeps = not dist.is_initialized() or dist.get_rank() == 0

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: whole(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(whole, value))
        if not isinstance(value, Tensor):
            return value
        note_progress()
        gathered = value.full_tensor() if isinstance(value, DTensor) else value
        return gathered.cpu() if keeps else None

    everything: dict[str, Any] = whole(dict(state))
    return everything if keeps else {}


def _in_one_order(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Sort the weights by name: ranks shard one tensor after another together, but read them in different orders."""
    return dict(sorted(weights.items()))


def _whole(*, strict: bool = True) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, strict=strict)


# --- Units ---

# A smaller child that is not a block stays with the module around it: its own gather would cost more than it saves.
SMALLEST_UNIT_BYTES = 2**20
# A larger unit is searched for smaller units within, because it would be gathered whole.
LARGEST_UNIT_BYTES = 256 * 2**20
ROWS = 2


def units_of(spec: ModelSpec, row_shape: RowShape) -> list[str]:
    """Return `find_units` of the spec's model, built on the meta device, where it takes no memory."""
    with torch.device("meta"):
        model = build_model(spec, "spec.model")
    return find_units(model, row_shape)


def find_units(model: nn.Module, row_shape: RowShape | None = None) -> list[str]:
    """Return the names of the modules to shard, inner ones first, without the model itself.

    With `row_shape`, the shape of one row of the model's input, `model` must be on the meta device. It is called there,
    in training and in validation mode, to find parameters that are used outside their unit.
    """
    units = _Units(model, _candidates(model))
    units.dissolve_shared()
    if row_shape is not None:
        # Dissolving a unit may move parameters to another unit that is not running when they are used.
        while outside := _used_outside(model, units, row_shape):
            for name in outside:
                units.dissolve(name)
            units.dissolve_shared()
    return units.names()


def mixed_unit(model: nn.Module, units: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the first unit whose floating-point parameters differ in dtype, with these dtypes.

    FSDP gathers them in one buffer.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    found = _Units(model, {name: model.get_submodule(name) for name in units})
    owners = found.owners()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            kinds[owners[id(parameter)]].add(str(parameter.dtype))
    return next(((name, sorted(several)) for name, several in kinds.items() if len(several) > 1), None)


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return candidates for units by name, inner ones first."""
    found: dict[str, nn.Module] = {}

    def search(path: str, module: nn.Module, *, takes_large: bool) -> None:
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child, is_block=_is_list(module), takes_large=takes_large)

    def visit(path: str, module: nn.Module, *, is_block: bool, takes_large: bool) -> None:
        size = _bytes_of(module)
        if not size or any(module is one for one in found.values()):
            return None
        too_large = size > LARGEST_UNIT_BYTES
        if _is_list(module):
            return search(path, module, takes_large=takes_large or too_large)
        if too_large or not is_block:
            search(path, module, takes_large=too_large)
        inside = [one for name, one in found.items() if name.startswith(f"{path}.")]
        own = size - _bytes_of(*inside)
        large_enough = own > 0 if is_block else takes_large and own >= SMALLEST_UNIT_BYTES
        if large_enough and type(module).forward is not nn.Module.forward:
            found[path] = module
        return None

    search("", model, takes_large=True)
    return found


class _Units:
    """The remaining units, and the unit of each parameter of `model`. `""` is the model itself."""

    def __init__(self, model: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
        self._order = list(candidates)
        self._names = {id(module): name for name, module in candidates.items()}
        # All paths of a module or parameter that the model has in several places.
        self._modules = {path: id(one) for path, one in model.named_modules(remove_duplicate=False)}
        self._paths: dict[Tensor, list[str]] = defaultdict(list)
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self._paths[parameter].append(path)

    def names(self) -> list[str]:
        left = set(self._names.values())
        return [name for name in self._order if name in left]

    def owners(self) -> dict[int, str]:
        """Return the unit's name by the id of each parameter. Valid once no parameter is shared between units."""
        return {id(parameter): self._owner(paths[0]) for parameter, paths in self._paths.items()}

    def dissolve(self, name: str) -> None:
        self._names = {module: one for module, one in self._names.items() if one != name}

    def dissolve_shared(self) -> None:
        """Dissolve units until every parameter, tied ones too, is in one unit: the innermost around all its places."""
        shared = True
        while shared:
            shared = False
            for paths in self._paths.values():
                owners = {self._owner(path) for path in paths}
                if len(owners) > 1:
                    shared = True
                    self.dissolve(max(owners, key=lambda name: (name.count("."), bool(name))))

    def _owner(self, path: str) -> str:
        while path:
            path = path.rpartition(".")[0]
            if path and self._modules[path] in self._names:
                return self._names[self._modules[path]]
        return ""


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of units whose parameters an operation takes while they do not run."""

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = owners
        self.running: dict[str, int] = defaultdict(int)
        self.outside: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leave in tree_leaves((args, kwargs)):
            if isinstance(leave, Tensor) and (owner := self._owners.get(id(leave))) and not self.running[owner]:
                self.outside.add(owner)
        return func(*args, **(kwargs or {}))


def _used_outside(model: nn.Module, units: _Units, row_shape: RowShape) -> set[str]:
    uses = _Uses(units.owners())
    hooks = []
    for name in units.names():
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: _add(uses.running, name, 1)))
        hooks.append(module.register_forward_hook(lambda *_, name=name: _add(uses.running, name, -1)))
    was_training = model.training
    try:
        for training in (True, False):
            model.train(training)
            with torch.device("meta"), torch.set_grad_enabled(training), uses:
                model(zero_inputs(row_shape, ROWS))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return uses.outside


def _add(counts: dict[str, int], name: str, number: int) -> None:
    counts[name] += number


def _is_list(module: nn.Module) -> bool:
    """Return whether the module's children are blocks.

    A subclass of Sequential is a block itself: its author gave it a name.
    """
    without_forward = type(module).forward is nn.Module.forward
    return type(module) is nn.Sequential or (isinstance(module, nn.ModuleList | nn.ModuleDict) and without_forward)


def _bytes_of(*modules: nn.Module) -> int:
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return sum(one.numel() * one.element_size() for one in parameters.values())


# --- Start ---

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
