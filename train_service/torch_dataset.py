"""The order of a training run as a torch dataset, for those who come with a `DataLoader` and a loop of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from train_service.loader import Loader


class TrainingBatches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches of a loader's rank from the position on: inputs float32 (rows, *shape) and labels (rows,).

    Use it with `DataLoader(dataset, batch_size=None)`: the batches are made. Its state is the number of steps taken, so
    `state_dict` after a batch and `load_state_dict` before the first go on with the next batch. The loader's thread
    reads ahead; worker processes of a `DataLoader` would each give all batches, and are refused.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._step = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if get_worker_info() is not None:
            raise ValueError("TrainingBatches: num_workers must be 0; the loader reads ahead by itself")
        with closing(self._loader.batches(self._step)) as batches:
            for batch in batches:
                self._step = batch.step + 1
                yield torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)

    def set_epoch(self, epoch: int) -> None:
        """To the first step of `epoch`, counted from 0."""
        self._step = epoch * self._loader.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `ValueError` for a state that is not one of this loader's."""
        step = state.get("step")
        if not isinstance(step, int) or not 0 <= step <= self._loader.total_steps:
            raise ValueError(f"state: step is {step!r}; use what state_dict gave, 0 to {self._loader.total_steps}")
        self._step = step
