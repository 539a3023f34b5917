"""What the build of the documents cannot check: that none is left out, that names in them exist, that code in them is
Python, and that links of files outside docs/ lead somewhere."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millrace_client

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
# `make docs` makes them of the protos, one for each package.
CONTRACTS = DOCS / "contracts"
PAGES = sorted(page for page in DOCS.rglob("*.md") if CONTRACTS not in page.parents)
# They are no pages of the site, so its build does not read them.
OUTSIDE = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "deploy/README.md"))]
# Of these pages all Python is run, as the client's user would; others have parts of a module.
RUN = [README, DOCS / "tutorial.md", DOCS / "how-to" / "tables.md"]
MAX_LINES_OF_THE_README = 149
# Files and folders of the repository that a text names, as `train_service/worker/loop.py`.
NAMED_PATH = re.compile(
    r"`((?:data_service|train_service|inference_service|shared|client|tests|benchmarks|deploy|protos/millrace)/[\w./-]*)`"
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def pages_of_navigation(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages_of_navigation(value)


def packages_of_protos() -> set[str]:
    protos = [proto for folder in ("millrace", "inference") for proto in (ROOT / "protos" / folder).rglob("*.proto")]
    found = {re.search(r"^package ([\w.]+);$", proto.read_text(), re.MULTILINE) for proto in protos}
    return {match[1] for match in found if match}


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as code hosts and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_LINES_OF_THE_README


def test_the_navigation_has_each_page_once() -> None:
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    contracts = [f"contracts/{package}.md" for package in ("index", *packages_of_protos())]
    expected = [*(str(page.relative_to(DOCS)) for page in PAGES), *contracts]
    assert sorted(pages_of_navigation(navigation)) == sorted(expected)


def test_the_index_of_the_decisions_has_each_decision_once() -> None:
    listed = re.findall(r"\]\((\d{4}[\w-]*\.md)\)", (DOCS / "decisions" / "index.md").read_text())
    assert listed == sorted(page.name for page in (DOCS / "decisions").glob("[0-9]*.md"))


@pytest.mark.parametrize("page", OUTSIDE, ids=relative)
def test_links_outside_the_site_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{relative(page)}: {link} is not there"
        assert not anchor or anchor in anchors(target), f"{relative(page)}: {link} has no such heading"


@pytest.mark.parametrize("page", [DOCS / "architecture.md", ROOT / "CONTRIBUTING.md"], ids=relative)
def test_files_that_a_walk_names_are_there(page: Path) -> None:
    paths = NAMED_PATH.findall(page.read_text())
    assert len(paths) >= 10
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"{relative(page)} names {missing}"


@pytest.mark.parametrize("page", [README, *PAGES], ids=relative)
def test_python_in_the_documents_is_python(page: Path) -> None:
    for block in python_blocks(page):
        ast.parse(block)


@pytest.mark.parametrize("page", RUN, ids=relative)
def test_names_that_examples_import_from_the_client_exist(page: Path) -> None:
    tree = ast.parse("\n".join(python_blocks(page)))
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    assert used
    for node in used:
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if owner == "mc":
            assert hasattr(millrace_client, node.attr), node.attr
        elif owner in ("steps", "checks"):
            assert hasattr(importlib.import_module(f"millrace_client.{owner}"), node.attr), node.attr


def test_each_line_of_the_tutorial_names_a_test_that_exists() -> None:
    rows = [line for line in (DOCS / "ray-train.md").read_text().splitlines() if line.startswith("| ")]
    tables = "\n".join(rows).split("| the tutorial | in Millrace | test |")[1:]
    lines = [line for table in tables for line in table.splitlines() if line]
    assert len(lines) > 35
    there = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE))
    for line in lines:
        named = re.findall(r"`(test_\w+)`", line.rsplit(" | ", 1)[1])
        assert named, f"docs/ray-train.md names no test in: {line}"
        missing = sorted(set(named) - there)
        assert not missing, f"docs/ray-train.md names {missing}"


def test_each_attack_that_was_tried_names_a_test_file_that_exists() -> None:
    page = (DOCS / "decisions" / "0024-own-code.md").read_text()
    _, _, table = page.partition("| what a bundle does | how it ends | test |\n|---|---|---|\n")
    lines = table.partition("\n\n")[0].splitlines()
    assert len(lines) > 15
    for line in lines:
        named = line.rsplit(" | ", 1)[1].removesuffix(" |")
        files = re.findall(r"`([^`]+)`", named)
        assert files or named == "the same", f"0024-own-code.md names no test in: {line}"
        missing = [file for file in files if not (ROOT / "tests" / file).is_file()]
        assert not missing, f"0024-own-code.md names {missing}"


def test_each_verb_of_make_is_below_a_heading() -> None:
    makefile = (ROOT / "Makefile").read_text().splitlines()
    verbs = [number for number, line in enumerate(makefile) if re.match(r"[a-z0-9-]+:.*## ", line)]
    headings = [number for number, line in enumerate(makefile) if re.match(r"# --- .* -+$", line)]
    assert len(headings) > 5
    # `help` itself stands before all of them.
    assert [makefile[number] for number in verbs if number < headings[0]] == ["help: ## show this list"]
