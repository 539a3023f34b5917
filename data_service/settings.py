"""What the data service is started with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from shared.settings import ServiceSettings, SettingsError, service_settings

DEFAULT_LISTEN = "127.0.0.1:50051"


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    service: ServiceSettings
    # The folders below which file:// sources may lie; none: file:// is refused.
    import_roots: tuple[PurePosixPath, ...] = ()


def data_settings(environ: Mapping[str, str]) -> DataSettings:
    """Raises `SettingsError` naming the variable."""
    roots = tuple(PurePosixPath(root) for root in environ.get("MILLRACE_IMPORT_ROOTS", "").split(os.pathsep) if root)
    for root in roots:
        if not root.is_absolute() or ".." in root.parts:
            raise SettingsError(f"MILLRACE_IMPORT_ROOTS: {str(root)!r}: use absolute folders without '..'")
    return DataSettings(service=service_settings(environ, DEFAULT_LISTEN), import_roots=roots)
