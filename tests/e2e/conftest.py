"""One stack for all end-to-end tests, started and stopped as a user would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_client.stack.record import family, read_record
from tests.support.command import run_millrace, stack_environment
from tests.support.patterns import write_mnist_like

README = Path(__file__).parents[2] / "README.md"


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


@pytest.fixture(scope="package")
def tour(home: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The Python of the README's tour, run to its end; what it made stays in the stack for other tests to read."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    root, folder = home / "import" / "mnist", tmp_path_factory.mktemp("tour")
    write_mnist_like(root / "MNIST" / "raw")
    script = folder / "tour.py"
    script.write_text("\n".join(blocks))
    return subprocess.run(
        (sys.executable, script),
        env={**stack_environment(home), "MNIST_ROOT": str(root)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
