"""What is gone went by itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector does not run in here: what is part of a cycle stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
