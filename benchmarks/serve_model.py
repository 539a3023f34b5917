"""The model that all contenders serve, a ResNet-18 with one channel and seeded weights, and its own speed."""

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

# The timed runs of each batch size, after `WARM_UP_RUNS` untimed ones.
RUNS, WARM_UP_RUNS = 7, 2


def write_checkpoints(settings: StoreSettings) -> tuple[tuple[str, ...], Path]:
    """Commit two checkpoints with the same weights to a store in a folder.

    Return their names, and the file of the weights of the first.
    """
    store = open_store(settings)
    written = [write(store, name) for name in ("c1", "c2")]
    weights = Path(settings.url.removeprefix("file://")) / written[0].entry.folder / WEIGHTS
    return tuple(one.entry.name for one in written), weights


class BareModel:
    """The module alone, in this process, on `threads` threads."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._module = make_module()

    def logits(self, given: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> np.ndarray:
        """Return (B, 10) logits of uint8 images (B, 28, 28)."""
        with torch.inference_mode():
            made: np.ndarray = self._module(prepared(given)).numpy()
        return made

    def seconds(self, batch_size: int, runs: int = RUNS) -> list[float]:
        """Return the seconds of each of `runs` forward passes."""
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
        """Return the images a second of consecutive batches with these sizes and counts, and nothing else."""
        total_s = sum(count * statistics.median(self.seconds(size)) for size, count in batches.items())
        return sum(size * count for size, count in batches.items()) / total_s


def prepared(given: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> torch.Tensor:
    """Prepare images as the checkpoint's steps do: float32 (B, 1, 28, 28)."""
    return ((torch.from_numpy(given.copy()).float() / 255 - MEAN) / STD).unsqueeze(1)
