"""One stack for all end-to-end tests, started and stopped as a user would."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_client.stack.record import family, read_record
from tests.support.command import run_millrace
from tests.support.page_code import run_python_of
from tests.support.ray_head import NONE_WARM


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running stack; its home. Stopped at the end, and nothing of it is left."""
    home = tmp_path_factory.mktemp("home")
    # Workers that would wait for the next run import torch again after each, and tests/contract/jobs has them.
    up = run_millrace(home, "up", "--json", **NONE_WARM)
    assert up.returncode == 0, up.stderr
    record = read_record(home)
    assert record is not None
    roots = [record.supervisor, *record.parts.values()]
    members = family(roots)
    assert len(members) > len(roots), "Ray alone has several processes"
    yield home
    members |= family(roots)
    down = run_millrace(home, "down", "--json")
    assert json.loads(down.stdout) == {"stopped": True}, down.stderr
    assert not any(one.is_alive() for one in members)
    assert not Path(record.ray_folder).exists()


@pytest.fixture(scope="package")
def tour(home: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The Python of docs/tutorial.md, run to its end; what it made stays in the stack for other tests to read."""
    return run_python_of("docs/tutorial.md", home, tmp_path_factory.mktemp("tour"))
