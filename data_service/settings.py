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
    """Read the settings; raise `SettingsError` naming the variable."""
    roots = tuple(PurePosixPath(root) for root in environ.get("MILLRACE_IMPORT_ROOTS", "").split(os.pathsep) if root)
    for root in roots:
        if not root.is_absolute() or ".." in root.parts:
            raise SettingsError(f"MILLRACE_IMPORT_ROOTS: {str(root)!r}: use absolute folders without '..'")
    reader_limits(environ)  # read where files are, and refused here where they are wrong
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


# --- Limits of the processes that read files ---

READER_MEMORY, READER_TIMEOUT = "MILLRACE_READER_MEMORY_MIB", "MILLRACE_READER_TIMEOUT_S"


@dataclass(frozen=True)
class ReaderLimits:
    """Limits of a process that reads files of others.

    `memory_bytes` is what a call may take beyond the process's own program. `timeout_s` is the time within which it
    must read, decode or ask for something; the time in which it waits for an answer does not count.
    """

    memory_bytes: int = 4 * 1024**3
    timeout_s: float = 300.0


def reader_limits(environ: Mapping[str, str]) -> ReaderLimits:
    """Read the limits; raise `SettingsError` naming the variable."""
    usual = ReaderLimits()
    memory_mib = _number(environ, READER_MEMORY, usual.memory_bytes >> 20, 256, 1024**2)
    return ReaderLimits(int(memory_mib) << 20, _number(environ, READER_TIMEOUT, usual.timeout_s, 10, 86_400))


def _number(environ: Mapping[str, str], name: str, default: float, least: int, most: int) -> float:
    text = environ.get(name, "")
    try:
        number = float(text or default)
    except ValueError:
        number = -1.0
    if not least <= number <= most:
        raise SettingsError(f"{name}: {text!r}: use a number from {least} to {most}")
    return number
