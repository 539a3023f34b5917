"""Wheels that a test makes, for uv to install without a network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

OFFLINE = {"UV_NO_INDEX": "1", "UV_OFFLINE": "1"}


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, str | bytes]) -> str:
    """Return the line of a lock for it: the one version, with the wheel's hash."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    content = {path: one.encode() if isinstance(one, str) else one for path, one in files.items()}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = [f"{path},sha256={_digest(one)},{len(one)}\n" for path, one in content.items()]
    content[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, one in content.items():
            archive.writestr(path, one)
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
