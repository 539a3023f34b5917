"""Which functions the operator allows in `custom` transform steps; whoever takes a client's transform asks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from shared.errors import FailedPrecondition
from shared.settings import SettingsError

VARIABLE = "MILLRACE_CUSTOM_TRANSFORMS"
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def allowed_functions(environ: Mapping[str, str]) -> frozenset[str]:
    """`module:function` each; none where the variable is not set. Raises `SettingsError` naming it."""
    functions = [one.strip() for one in environ.get(VARIABLE, "").split(",") if one.strip()]
    for function in functions:
        if not _FUNCTION.fullmatch(function):
            raise SettingsError(f"{VARIABLE}: {function!r}: use module:function, separated by commas")
    return frozenset(functions)


def check_functions(transforms: Iterable[Mapping[str, Any]], allowed: Collection[str], where: str) -> None:
    """Whoever can write a checkpoint must not be able to have any function called.

    `transforms` are a checkpoint's, `where` says whose environment allows. Raises `FailedPrecondition` naming the
    first function that is not `allowed`.
    """
    for transform in transforms:
        for step in transform.get("steps", []):
            function = step.get("custom", {}).get("function")
            if function and function not in allowed:
                raise FailedPrecondition(
                    f"the checkpoint's preprocessing calls {function}, which {VARIABLE} does not allow {where}; "
                    "set it there",
                    reason="CUSTOM_FUNCTION_NOT_ALLOWED",
                    metadata={"function": function},
                )
