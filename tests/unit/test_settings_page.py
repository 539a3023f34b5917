"""docs/settings.md has each variable that the code reads, once, and none that it does not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
PACKAGES = ("data_service", "train_service", "inference_service", "shared", "client", "protos/millrace", "benchmarks")
OTHER_PLACES = ("deploy", ".ci", "Makefile", "docker-compose.yml", "pyproject.toml")
# Texts about the code.
DOCUMENTS = {".md", ".lock", ".pyc"}
# A name that ends in _ stands for several, as in `MILLRACE_S3_*`.
VARIABLE = re.compile(r"MILLRACE_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_])")
COLUMNS = 5


def named_in(*places: str) -> set[str]:
    """The variables that these files name, and those in these folders."""
    names: set[str] = set()
    for place in places:
        path = ROOT / place
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        assert files, f"{place} has no files"
        for file in files:
            if file.suffix not in DOCUMENTS and file != Path(__file__):
                names.update(VARIABLE.findall(file.read_text(errors="replace")))
    return names


def rows() -> list[list[str]]:
    """Of all tables with the five columns: variable, type, default, read by, meaning."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `MILLRACE_")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def documented() -> list[str]:
    return [row[0].strip("`") for row in rows()]


def test_each_variable_that_the_code_names_has_a_row() -> None:
    missing = named_in(*PACKAGES, *OTHER_PLACES) - set(documented())
    assert not missing, f"docs/settings.md has no row for {sorted(missing)}"


def test_no_row_is_of_a_variable_that_nothing_names() -> None:
    stale = set(documented()) - named_in(*PACKAGES, *OTHER_PLACES, "tests")
    assert not stale, f"docs/settings.md has rows for {sorted(stale)}, which no code names"


def test_each_variable_has_one_row_and_each_row_is_complete() -> None:
    names = documented()
    assert len(names) == len(set(names))
    for row in rows():
        assert len(row) == COLUMNS, row
        assert all(row), row
