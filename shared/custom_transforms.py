"""Which functions the operator allows in `custom` transform steps; whoever takes a client's transform asks."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
