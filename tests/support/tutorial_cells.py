"""The code cells of Ray Train's tutorials, taken word for word from the documents beside the project."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.support.needs import Missing

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
DOCUMENT = SEEDS / "002_20d1ad771a7640b8.txt"
INTRODUCTION = SEEDS / "001_89bffee7eeb34ca3.txt"
# The cells of a module begin with their numbers, from 01; what installs packages has 00, and asides have none.
NUMBER = re.compile(r"# (\d\d)\.")


def tutorial_code(*names: str) -> str:
    """The cell with the imports, and the first cell that defines each of these functions, as a module. A test that
    needs the document is skipped without it, or fails where MILLRACE_REQUIRE_DATA is set."""
    cells = _cells()
    found = [next(cell for cell in cells if "from ray.train.torch import TorchTrainer" in cell)]
    found += [next(cell for cell in cells if f"def {name}(" in cell) for name in names]
    return "\n\n".join(found)


def tutorial_script(*parts: tuple[int, int, int]) -> str:
    """A script of numbered cells: of each part (module, first, last), modules and cells counted from 1."""
    wanted = [(module, number) for module, first, last in parts for number in range(first, last + 1)]
    found = _numbered()
    return "\n\n".join(found[one] for one in wanted)


def introduction_script(first: str, last: str) -> str:
    """A script of the introduction's imports and its cells from the one with the text `first` to that with `last`."""
    cells = _cells(INTRODUCTION)
    begin = next(number for number, cell in enumerate(cells) if first in cell)
    end = next(number for number, cell in enumerate(cells) if last in cell and number >= begin)
    return "\n\n".join((cells[0], *cells[begin : end + 1]))


@cache
def _numbered() -> dict[tuple[int, int], str]:
    found: dict[tuple[int, int], str] = {}
    module = before = 1
    for cell in _cells():
        matched = NUMBER.match(cell)
        number = int(matched[1]) if matched else 0
        if not number:
            continue
        module += number < before
        before = number
        found[module, number] = cell
    return found


@cache
def _cells(document: Path = DOCUMENT) -> tuple[str, ...]:
    if not document.exists():
        Missing(f"{document} is not there", "MILLRACE_REQUIRE_DATA").end_test()
    return tuple(re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL))
