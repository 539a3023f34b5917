"""What a reconciler's process imports."""

from __future__ import annotations

import subprocess
import sys


def test_a_reconciler_starts_without_torch() -> None:
    heavy = "sorted({'torch', 'torchvision', 'pandas', 'scipy'} & set(sys.modules))"
    command = [sys.executable, "-c", f"import sys, train_service.reconciler; print({heavy})"]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
