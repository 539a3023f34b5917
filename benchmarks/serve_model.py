"""The model that all contenders serve, a ResNet-18 of one channel with seeded weights, and how fast it is by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.data_rows import MEAN, STD
from benchmarks.serve_load import images
from shared.checkpoint.format import WEIGHTS
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.integration.inference_service.checkpoints import make_module, write

# Of each batch size, after as many runs that are not counted as there are in `WARM_UP_RUNS`.
RUNS, WARM_UP_RUNS = 7, 2


def write_checkpoints(settings: StoreSettings) -> tuple[tuple[str, ...], Path]:
    """Commits two checkpoints, of the same weights, to a store in a folder. Returns their names, and the file of the
    weights of the first."""
    store = open_store(settings)
    written = [write(store, name) for name in ("c1", "c2")]
    weights = Path(settings.url.removeprefix("file://")) / written[0].entry.folder / WEIGHTS
    return tuple(one.entry.name for one in written), weights


class BareModel:
    """The module alone, in this process, on `threads`: a tensor in, a tensor out, nothing else."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._module = make_module()

    def logits(self, given: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> np.ndarray:
        """(B, 10) of uint8 images (B, 28, 28)."""
        with torch.inference_mode():
            made: np.ndarray = self._module(prepared(given)).numpy()
        return made

    def seconds(self, batch_size: int, runs: int = RUNS) -> list[float]:
        """How long each of `runs` forward passes took."""
        inputs = prepared(images(batch_size))
        took_s = []
        with torch.inference_mode():
            for number in range(WARM_UP_RUNS + runs):
                began = time.perf_counter()
                self._module(inputs)
                if number >= WARM_UP_RUNS:
                    took_s.append(time.perf_counter() - began)
        return took_s

    def limit_per_s(self, batches: Mapping[int, int]) -> float:
        """Images a second, if it did nothing but batches of these sizes, so many of each, one after the other."""
        total_s = sum(count * statistics.median(self.seconds(size)) for size, count in batches.items())
        return sum(size * count for size, count in batches.items()) / total_s


def prepared(given: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> torch.Tensor:
    """As the checkpoint's steps prepare them: float32 (B, 1, 28, 28)."""
    return ((torch.from_numpy(given.copy()).float() / 255 - MEAN) / STD).unsqueeze(1)
