"""A disk that is soon full: a tmpfs of a few MiB. Mounting one needs rights that not every machine gives to tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.needs import Missing

# Set where tests may mount.
REQUIRED = "MILLRACE_REQUIRE_MOUNT"


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """Skip the test where it cannot be mounted, or fail it where MILLRACE_REQUIRE_MOUNT is set."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        Missing("there is no mount program, so no small disk to fill: install mount", REQUIRED).end_test()
    if done.returncode:
        text = f"a tmpfs cannot be mounted, so there is no small disk to fill: run as root ({done.stderr.strip()})"
        Missing(text, REQUIRED).end_test()
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
