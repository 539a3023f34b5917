"""What a test needs of its machine: an S3 server, Node.js, the data beside the clone, a small disk.

A laptop may lack any of them, and `make test` works there all the same: the tests in question are skipped, and each
says what is not there and what to do about it. Wherever the variable that they name is set, they fail instead; CI sets
those of everything that it installs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

import pytest


class Missing(Exception):
    """The text says what is not there, and the remedy; `required` whether the environment demands it by `variable`."""

    def __init__(self, text: str, variable: str, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(text)
        self.required = demanded(variable, environ)
        self._variable = variable

    def end_test(self) -> NoReturn:
        """Skip the test, or fail it."""
        if self.required:
            pytest.fail(f"{self} ({self._variable} is set)", pytrace=False)
        pytest.skip(f"{self} (or set {self._variable}=1, and this fails)")


def demanded(variable: str, environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(variable, "") not in ("", "0")
