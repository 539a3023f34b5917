"""What a test needs of the machine that it runs on.

A test that cannot run is skipped with the remedy, so that `make test` works on a laptop; where the variable that it
names is set it fails instead, as CI demands of everything that it can have.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

import pytest


def demanded(variable: str, environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(variable, "") not in ("", "0")


def missing(what: str, *, required: bool) -> NoReturn:
    """Ends the test: `what` is not there, and what to do about it."""
    if required:
        pytest.fail(what, pytrace=False)
    pytest.skip(what)
