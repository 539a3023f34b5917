"""The example package, built and installed as any other, into a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "example_package"


def install_example(folder: Path) -> Path:
    """Without network or isolation; put what it returns on `sys.path`. Other processes get it by PYTHONPATH."""
    uv = Path(sys.executable).parent / "uv"
    site = folder / "site"
    arguments = ["pip", "install", "-q", "--offline", "--no-deps", "--no-build-isolation", "--target", str(site)]
    python = ["--python", sys.executable]
    subprocess.run([uv, *arguments, *python, str(SOURCE)], check=True, capture_output=True, timeout=120)
    return site
