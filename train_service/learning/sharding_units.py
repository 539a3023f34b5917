"""Which modules of a model FSDP shards as units of their own: each is gathered whole for its own calls, then freed.

The blocks of a model are its units: the children of a ModuleList, ModuleDict or Sequential. Beside them, a child of the
model is a unit where it is large. All other parameters belong to the unit around them, in the end to the model itself,
which is gathered for the whole step. A parameter must be in one unit and be used only while that unit's `forward` runs;
a unit that breaks this is dissolved into the one around it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.model_spec import ModelSpec
from shared.models import build_model

# Below this a child that is no block stays with the module around it: a gather of its own costs more than it saves.
SMALLEST_UNIT_BYTES = 2**20
# A unit above this is searched for smaller units within, for it would be gathered whole.
LARGEST_UNIT_BYTES = 256 * 2**20
ROWS = 2


def units_of(spec: ModelSpec, row_shape: Sequence[int]) -> list[str]:
    """`find_units` of the model that `spec` describes, built on the meta device: it takes no memory."""
    with torch.device("meta"):
        model = build_model(spec, "spec.model")
    return find_units(model, row_shape)


def find_units(model: nn.Module, row_shape: Sequence[int] | None = None) -> list[str]:
    """Names of the modules to shard, each before those around it, and without the model itself.

    With `row_shape`, the shape of one row of the model's input, `model` must be on the meta device; it is called there,
    as in training and as in validation, to see which parameters are used outside their unit.
    """
    units = _Units(model, _candidates(model))
    units.dissolve_shared()
    if row_shape is not None:
        # What was dissolved may have moved parameters to a unit that is not running either.
        while outside := _used_outside(model, units, row_shape):
            for name in outside:
                units.dissolve(name)
            units.dissolve_shared()
    return units.names()


def mixed_unit(model: nn.Module, units: Sequence[str]) -> tuple[str, list[str]] | None:
    """The first unit whose floating-point parameters are not all of one dtype, and what they are: FSDP gathers them in
    one buffer."""
    kinds: dict[str, set[str]] = defaultdict(set)
    found = _Units(model, {name: model.get_submodule(name) for name in units})
    owners = found.owners()
    for one in model.parameters():
        if one.is_floating_point():
            kinds[owners[id(one)]].add(str(one.dtype))
    return next(((name, sorted(several)) for name, several in kinds.items() if len(several) > 1), None)


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """By name, each before those around it."""
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
    """The units that are left, and which of them each parameter of `model` is in; `""` is the model itself."""

    def __init__(self, model: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
        self._order = list(candidates)
        self._names = {id(module): name for name, module in candidates.items()}
        # With every path to a module or parameter that the model has at several places.
        self._modules = {path: id(one) for path, one in model.named_modules(remove_duplicate=False)}
        self._paths: dict[Tensor, list[str]] = defaultdict(list)
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self._paths[parameter].append(path)

    def names(self) -> list[str]:
        left = set(self._names.values())
        return [name for name in self._order if name in left]

    def owners(self) -> dict[int, str]:
        """By the id of a parameter the name of its unit; once none is shared between units."""
        return {id(parameter): self._owner(paths[0]) for parameter, paths in self._paths.items()}

    def dissolve(self, name: str) -> None:
        self._names = {module: one for module, one in self._names.items() if one != name}

    def dissolve_shared(self) -> None:
        """Until every parameter, tied ones too, is in one unit: the lowest that all its places have in common."""
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
    """Notes the units whose parameters an operation takes while they do not run."""

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = owners
        self.running: dict[str, int] = defaultdict(int)
        self.outside: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor) and (owner := self._owners.get(id(one))) and not self.running[owner]:
                self.outside.add(owner)
        return func(*args, **(kwargs or {}))


def _used_outside(model: nn.Module, units: _Units, row_shape: Sequence[int]) -> set[str]:
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
                model(torch.zeros((ROWS, *row_shape)))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return uses.outside


def _add(counts: dict[str, int], name: str, number: int) -> None:
    counts[name] += number


def _is_list(module: nn.Module) -> bool:
    """Whether its children are blocks. A subclass of Sequential is a block itself: its author gave it a name."""
    without_forward = type(module).forward is nn.Module.forward
    return type(module) is nn.Sequential or (isinstance(module, nn.ModuleList | nn.ModuleDict) and without_forward)


def _bytes_of(*modules: nn.Module) -> int:
    parameters = {id(one): one for module in modules for one in module.parameters()}
    return sum(one.numel() * one.element_size() for one in parameters.values())
