"""The code cells of Ray Train's tutorial, taken word for word from the document beside the project."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.support.needs import Missing

DOCUMENT = Path(__file__).parents[3] / "shared" / "seeds" / "002_20d1ad771a7640b8.txt"


def tutorial_code(*names: str) -> str:
    """The cell with the imports, and the first cell that defines each of these functions, as a module. A test that
    needs the document is skipped without it, or fails where MILLRACE_REQUIRE_DATA is set."""
    cells = _cells()
    found = [next(cell for cell in cells if "from ray.train.torch import TorchTrainer" in cell)]
    found += [next(cell for cell in cells if f"def {name}(" in cell) for name in names]
    return "\n\n".join(found)


@cache
def _cells() -> tuple[str, ...]:
    if not DOCUMENT.exists():
        Missing(f"{DOCUMENT} is not there", "MILLRACE_REQUIRE_DATA").end_test()
    return tuple(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
