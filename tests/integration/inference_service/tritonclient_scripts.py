"""The real `tritonclient`, in a process of its own: it registers the protocol's messages too, and they would clash.

No module of this folder may be named `triton`: scripts of it put the folder on the path, Ray passes that on to its
workers, and torch would import it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_triton_script(script: str, *arguments: str, timeout_s: float = 360) -> Any:
    """Run a script of this folder and return the JSON object that it prints."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
