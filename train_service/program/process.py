"""Setup of a worker's process before a program's module is imported.

It removes keys from the environment, seeds generators and counts the steps of optimizers.
"""

from __future__ import annotations

import hashlib
import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# Variables of a node's environment that users' code must not see. The attempt has Ray start its ranks with these set to
# empty, whatever the node's environment.
HIDDEN_VARIABLES = (
    "MILLRACE_S3_ACCESS_KEY",
    "MILLRACE_S3_SECRET_KEY",
    "MILLRACE_TOKEN_FILE",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)


def drop_hidden_variables() -> None:
    """Remove hidden variables that are empty: cloud libraries would read an empty key as a wrong one."""
    for name in HIDDEN_VARIABLES:
        if not os.environ.get(name):
            os.environ.pop(name, None)


def seed_everything(job_seed: int, report: int, rank: int) -> None:
    """Seed torch, NumPy and `random` by the attempt's start, so that another attempt from there draws the same."""
    digest = hashlib.sha256(f"{job_seed}/{report}/{rank}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class OptimizerSteps:
    """Counter of the steps of all torch optimizers in the process. Each step is a sign of progress."""

    def __init__(self, first: int, stepped: Callable[[int], None]) -> None:
        """Count from `first`. `stepped` is called with each new count."""
        self.count = first
        self._stepped = stepped
        self._handle = register_optimizer_step_post_hook(self._note)

    def _note(self, *_: object) -> None:
        self.count += 1
        self._stepped(self.count)

    def remove(self) -> None:
        self._handle.remove()


def line_of(error: BaseException, code: Path) -> str:
    """Return `path:line` of the innermost frame in the program's own files, relative to `code`. Empty if none is."""
    return next(
        (
            f"{Path(frame.filename).relative_to(code).as_posix()}:{frame.lineno}"
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if Path(frame.filename).is_relative_to(code)
        ),
        "",
    )
