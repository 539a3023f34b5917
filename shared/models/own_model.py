"""A model that a user's own code makes: called by its entry, in a process that has loaded the code."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from shared.code_loading import entry_failed, find_entry
from shared.errors import MillraceError, invalid_field
from shared.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn


def build_own(spec: ModelSpec, path: str) -> nn.Module:
    """Fresh weights, by what `spec.entry` names: a function of `spec.kwargs`, or of nothing; or a class, to which they
    are keyword arguments.

    Raises `InvalidArgument` naming `path`.entry where it makes no `nn.Module`, and `FailedPrecondition` with the line
    of the user's code where that raises, or where this process has not loaded the code.
    """
    from torch import nn

    made = called(find_entry(spec.code_bundle, spec.entry), spec)
    if not isinstance(made, nn.Module):
        remedy = f"it made a {type(made).__name__}; it must make a torch.nn.Module"
        raise invalid_field(f"{path}.entry", spec.entry, remedy)
    return made


def called(found: Any, spec: ModelSpec) -> Any:
    """What the entry makes of `spec.kwargs`. Raises `FailedPrecondition` for whatever it raises."""
    try:
        if isinstance(found, type):
            return found(**spec.kwargs)
        return found(dict(spec.kwargs)) if inspect.signature(found).parameters else found()
    except MillraceError:
        raise
    except Exception as error:  # whatever a user's code raises
        raise entry_failed(spec.code_bundle, spec.entry, error) from error


def own_method(module: object, name: str) -> Any:
    """The bound method of that name that a user's class defines, or None. An attribute of the instance alone, such as a
    layer, is none; nor is what Lightning's base class has under the name."""
    found = inspect.getattr_static(type(module), name, None)
    defined_in = str(getattr(found, "__module__", ""))
    if found is None or defined_in.partition(".")[0] in ("torch", "lightning", "pytorch_lightning"):
        return None
    method = getattr(module, name)
    return method if callable(method) else None
