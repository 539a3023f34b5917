"""One stack for all end-to-end tests, started and stopped as a user would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_client.stack.processes import family
from millrace_client.stack.record import read_record
from tests.support.command import run_millrace


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running stack; its home. Stopped at the end, and nothing of it is left."""
    home = tmp_path_factory.mktemp("home")
    up = run_millrace(home, "up", "--json")
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
