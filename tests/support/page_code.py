"""The Python of a page of the documents, run as its reader would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.command import stack_environment
from tests.support.patterns import write_mnist_like

ROOT = Path(__file__).parents[2]


def run_python_of(page: str, home: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run all Python of a page, top to bottom, as one program in `folder`, against the stack in `home`."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} has no Python"
    root = home / "import" / "mnist"
    if not root.exists():
        write_mnist_like(root / "MNIST" / "raw")
    script = folder / "page.py"
    script.write_text("\n".join(blocks))
    return subprocess.run(
        (sys.executable, script),
        env={**stack_environment(home), "MNIST_ROOT": str(root)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
    )
