"""The check of `make lint`: where an old name still occurs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.check_words import main

MAP = '[[words]]\nold = "door"\nnew = "load_shedder"\n\n[environment]\nAPP_DOORS = "APP_LOAD_SHEDDERS"\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (tmp_path / "map.toml").write_text(MAP)
    return root


def check(root: Path) -> int:
    return main(["--root", str(root), "--map", str(root.with_name("map.toml"))])


def test_each_old_name_is_listed_with_its_file_line_and_new_name(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "one.py").write_text('x = 1\n\n\nclass Door:\n    text = f"{x}, {door}"\n')
    (root / "x.proto").write_text("\nmessage Door {}\n")
    (root / "compose.yml").write_text("a: 1\nAPP_DOORS: 2\n")
    (root / "door.py").write_text("")
    assert check(root) == 1
    assert capsys.readouterr().err.splitlines() == [
        "compose.yml:2: APP_DOORS is called APP_LOAD_SHEDDERS now",
        "one.py:4: Door is called LoadShedder now",
        "one.py:5: door is called load_shedder now",
        "x.proto:2: Door is called LoadShedder now",
        "door.py:0: door.py is called load_shedder.py now",
        "5 old names; run python tools/rename.py to replace them",
    ]


def test_prose_that_has_an_old_word_passes(root: Path) -> None:
    (root / "one.py").write_text('"""Shuts the door."""\n\nx = "the door"  # a door\n')
    assert check(root) == 0
