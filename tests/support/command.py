"""The `millrace` command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def stack_environment(home: Path) -> dict[str, str]:
    """The environment without what would lead a command away from the stack in `home`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    environment.pop("RAY_ADDRESS", None)
    return {**environment, "MILLRACE_HOME": str(home)}


def run_millrace(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with the stack in `home` and further `variables` in its environment."""
    command = (sys.executable, "-m", "millrace_client.cli", *arguments)
    environment = {**stack_environment(home), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
