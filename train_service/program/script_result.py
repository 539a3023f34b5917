"""What a script's `fit()` returns: Ray's own `Result`, whose checkpoints are those of the job's registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pyarrow.fs
from ray.train import Checkpoint, Result


class RegistryCheckpoint(Checkpoint):
    """A checkpoint of the job, `trainingJobs/{j}/checkpoints/{c}`. Its files come to this node when they are first
    asked for, verified and read-only; they go when the attempt ends. Pickled, it is that folder: for tasks and actors
    on the same node."""

    def __init__(self, name: str, fetch: Callable[[str], str]) -> None:
        """`fetch` gives the folder of a checkpoint of that name."""
        self.name = name
        self._fetch = fetch
        self._folder = ""
        self.filesystem = pyarrow.fs.LocalFileSystem()

    @property
    def path(self) -> str:  # type: ignore[override]
        self._folder = self._folder or self._fetch(self.name)
        return self._folder

    def __repr__(self) -> str:
        return f"Checkpoint({self.name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RegistryCheckpoint) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Checkpoint, (self.path, self.filesystem)


def result_of(described: Mapping[str, Any], fetch: Callable[[str], str]) -> Result:
    """`described` is the attempt's answer: `path`, `metrics` of the newest report, and `checkpoints`, oldest first, of
    which each has `name` and `metrics`. As with Ray the data frame has a row for each checkpoint, and both are None
    where nothing was reported."""
    pairs = [(RegistryCheckpoint(one["name"], fetch), dict(one["metrics"])) for one in described["checkpoints"]]
    return Result(
        metrics=dict(described["metrics"]) or None,
        checkpoint=pairs[-1][0] if pairs else None,
        error=None,
        path=described["path"],
        metrics_dataframe=pd.DataFrame([metrics for _, metrics in pairs]) if pairs else None,
        best_checkpoints=pairs,
    )
