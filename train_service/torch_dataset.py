"""The order of a training run as a torch dataset, for use with a `DataLoader` in a user's own loop."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from millrace.train.v1 import resources_pb2
from shared.errors import invalid_field
from shared.models.inputs import tensors_of
from shared.settings import StoreSettings, allowed_functions, store_settings
from shared.storage import open_store
from train_service.convert_specs import spec_from_proto
from train_service.domain.spec import CLASSIFICATION
from train_service.loading.loader import Loader, LoaderFactory
from train_service.loading.preprocessing import fitted


class TrainingBatches(IterableDataset[tuple[Any, torch.Tensor]]):
    """Batches of one rank from the current position: inputs float32 (rows, *shape) and labels (rows,).

    With `input_columns` the inputs are a dict with a tensor for each column.

    Use it with `DataLoader(dataset, batch_size=None)`, because it yields whole batches. One pass yields the rest of the
    run, or of the epoch that `set_epoch` chose. Its state is the number of steps taken: `state_dict` after a batch, and
    `load_state_dict` before the first, continue with the next batch. The loader's thread reads ahead; worker processes
    of a `DataLoader` would each yield all batches, and are refused.
    """

    @classmethod
    def open(
        cls,
        spec: resources_pb2.TrainingSpec,
        store: StoreSettings | str = "",
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> TrainingBatches:
        """Return the batches that a training job of this specification gives rank `rank` of `world_size`.

        `store` is the store of the dataset version: settings, or a URL in the form of MILLRACE_STORE; by default that
        variable. The keys of S3 come from MILLRACE_S3_* unless they are in the settings.

        Raises `SettingsError` for the store, `NotFound` for the version, and `InvalidArgument` that names the field of
        the specification that does not fit the version, also if the batches are too small for the ranks.
        """
        if not 0 <= rank < world_size:
            raise invalid_field("rank", rank, f"use 0 to world_size - 1, {world_size - 1}")
        settings = store if isinstance(store, StoreSettings) else _settings(store)
        training_spec = resources_pb2.TrainingSpec()
        training_spec.CopyFrom(spec)
        # The order of rows depends on the lanes, so they are the job's for any number of ranks.
        training_spec.lanes = spec_from_proto(spec, allowed_functions(os.environ)).lanes
        training_spec.num_workers = world_size
        training_spec.min_workers = 0
        plain = spec_from_proto(training_spec, allowed_functions(os.environ))
        if plain.model.is_own and plain.task == CLASSIFICATION and not plain.model.num_classes:
            raise invalid_field("spec.model.num_classes", 0, "set it, because no code of the model runs here")
        opened = open_store(settings)
        plain, version, _ = fitted(opened, plain)
        return cls(LoaderFactory(opened, version, plain).loader(rank, world_size))

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._step = 0
        self._end = loader.total_steps
        # Steps that a restored state counts as taken are not repeated.
        self._restored = 0

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        if get_worker_info() is not None:
            raise ValueError("TrainingBatches: num_workers must be 0; the loader reads ahead by itself")
        if self._step >= self._end:
            return
        with closing(self._loader.batches(self._step)) as batches:
            for batch in islice(batches, self._end - self._step):
                self._step = batch.step + 1
                yield tensors_of(batch.inputs), torch.from_numpy(batch.labels)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass yield `epoch`, counted from 0, only.

        After `load_state_dict` the pass yields the rest of that epoch, or nothing if it was complete. Raises
        `ValueError` for an epoch that the run does not have.
        """
        steps = self._loader.steps_per_epoch
        epochs = self._loader.total_steps // steps
        number = _whole(epoch)
        if number is None or not 0 <= number < epochs:
            raise ValueError(f"epoch is {epoch!r}; use 0 to {epochs - 1}")
        self._step = max(number * steps, self._restored)
        self._end = (number + 1) * steps

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "lanes": self._loader.lanes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue from `state`, to the end of the run or of the epoch that `set_epoch` chooses.

        Raises `ValueError` for a state that does not belong to this loader.
        """
        step, lanes = state.get("step"), state.get("lanes")
        if lanes is None:
            # An earlier release wrote it; its default was 24 for any number of workers.
            raise ValueError("state: has no lanes; add those of the spec that it comes from, 24 where that named none")
        if lanes != self._loader.lanes:
            raise ValueError(
                f"state: its rows were dealt out to {lanes!r} lanes, those of this spec to {self._loader.lanes}; set "
                "spec.lanes to go on in the same order"
            )
        if not isinstance(step, int) or not 0 <= step <= self._loader.total_steps:
            raise ValueError(f"state: step is {step!r}; use what state_dict gave, 0 to {self._loader.total_steps}")
        self._step = self._restored = step
        self._end = self._loader.total_steps


def _whole(number: object) -> int | None:
    """Return a whole number of any type, numpy's included. None for anything else, including a bool."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def _settings(url: str) -> StoreSettings:
    return store_settings({**os.environ, "MILLRACE_STORE": url} if url else os.environ)
