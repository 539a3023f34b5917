"""When the absence of Node.js is a failure, and what is installed is not installed again."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.support.needs import Missing
from tests.support.node_client import installed_packages

# A stand-in for npm, which makes the folder that it is told to.
NPM = """#!/bin/sh
while [ "$1" != --prefix ]; do shift; done
mkdir -p "$2/node_modules"
echo once >> "$HERE/installs"
"""


def install_program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(stat.S_IRWXU)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "MILLRACE_CACHE": str(tmp_path / "cache"), "HERE": str(tmp_path)}


def test_packages_are_installed_once(environ: dict[str, str], tmp_path: Path) -> None:
    install_program(tmp_path, "node")
    install_program(tmp_path, "npm", NPM)
    folders = {installed_packages(environ) for _ in range(2)}
    assert [folder.is_dir() for folder in folders] == [True]
    assert (tmp_path / "installs").read_text() == "once\n"


@pytest.mark.parametrize(("demand", "required"), [("", False), ("0", False), ("1", True)])
def test_without_node_the_environment_decides(tmp_path: Path, demand: str, required: bool) -> None:
    with pytest.raises(Missing, match=r"no node on the PATH: install Node\.js 18 or newer") as absent:
        installed_packages({"PATH": str(tmp_path), "MILLRACE_REQUIRE_NODE": demand})
    assert absent.value.required is required


def test_packages_that_cannot_be_fetched_leave_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    install_program(tmp_path, "node")
    install_program(tmp_path, "npm", "#!/bin/sh\necho no network >&2\nexit 1\n")
    with pytest.raises(Missing, match="no network"):
        installed_packages(environ)
    assert list((tmp_path / "cache").iterdir()) == []
