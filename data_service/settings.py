"""The settings of the data service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from shared.settings import ServiceSettings, SettingsError, allowed_functions, service_settings, standby_attempt

DEFAULT_LISTEN = "127.0.0.1:50051"
DEFAULT_SWEEP_INTERVAL_S = 300.0


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    service: ServiceSettings
    # The folders allowed for file:// sources; none: file:// is refused.
    import_roots: tuple[PurePosixPath, ...] = ()
    # The functions that custom transform steps may name, as `module:function`; none: custom steps are refused.
    custom_transforms: frozenset[str] = frozenset()
    # How often unreferenced objects are swept, in seconds.
    sweep_interval_s: float = DEFAULT_SWEEP_INTERVAL_S
    # Whether an idle process waits for the next import or transform, to save its start-up time.
    standby_attempt: bool = True


def data_settings(environ: Mapping[str, str]) -> DataSettings:
    """Reads the settings; raises `SettingsError` naming the variable."""
    roots = tuple(PurePosixPath(root) for root in environ.get("MILLRACE_IMPORT_ROOTS", "").split(os.pathsep) if root)
    for root in roots:
        if not root.is_absolute() or ".." in root.parts:
            raise SettingsError(f"MILLRACE_IMPORT_ROOTS: {str(root)!r}: use absolute folders without '..'")
    return DataSettings(
        service=service_settings(environ, DEFAULT_LISTEN),
        import_roots=roots,
        custom_transforms=allowed_functions(environ),
        sweep_interval_s=_interval(environ.get("MILLRACE_SWEEP_INTERVAL_S", "")),
        standby_attempt=standby_attempt(environ),
    )


def _interval(text: str) -> float:
    try:
        seconds = float(text or DEFAULT_SWEEP_INTERVAL_S)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86_400.0:
        raise SettingsError(f"MILLRACE_SWEEP_INTERVAL_S: {text!r}: use 1 to 86400 seconds")
    return seconds
