"""How images lie in memory while a model works on them: channel after channel as rows come, or pixel after pixel with
the channels side by side. Which is faster depends on the model, the processor, and the images' size and number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from inference_service.domain.batch_times import bucket
from shared.models.loaded import LoadedModel, Outputs

# What the other layout must save of a batch's time: less is noise, and not worth a second copy of the weights.
WORTH_IT = 0.1
# After one that pays for what kernels prepare. The fastest counts: what else the machine does only makes runs slower.
TIMED_RUNS = 3
# Larger batches than could be tried in this time are laid out as the largest that was.
TRIED_FOR_S = 5.0

Run = Callable[[NDArray[Any]], Outputs]


def fastest_s(run: Run, inputs: NDArray[Any]) -> float:
    run(inputs)
    return min(_seconds(run, inputs) for _ in range(TIMED_RUNS))


class Layouts:
    """A model as one function of its prepared input, in whichever layout is faster for so many rows."""

    def __init__(self, model: LoadedModel) -> None:
        self._usual = model
        # By batch size, in buckets of powers of two; the usual one for all others.
        self._chosen: dict[int, LoadedModel] = {}

    def __call__(self, prepared: NDArray[Any]) -> Outputs:
        return self._chosen.get(bucket(len(prepared)), self._usual)(prepared)

    @property
    def channels_last(self) -> frozenset[int]:
        """The batch sizes, in buckets, whose images have their channels last."""
        return frozenset(size for size, model in self._chosen.items() if model is not self._usual)

    def choose(
        self, shape: Sequence[int], sizes: Sequence[int], seconds: Callable[[Run, NDArray[Any]], float] = fastest_s
    ) -> None:
        """Tries batches of `sizes`, ascending, of inputs of `shape` (without the rows) in both layouts, where the model
        has convolutions of images. `seconds` tells how long a run takes."""
        if len(shape) != 3 or not any(isinstance(one, nn.Conv2d) for one in self._usual.module.modules()):
            return
        other = self._usual.channels_last()
        faster, give_up_at = self._usual, time.monotonic() + TRIED_FOR_S
        for size in sizes:
            if time.monotonic() < give_up_at:
                inputs = np.zeros((size, *shape), np.float32)
                saves = seconds(other, inputs) < (1 - WORTH_IT) * seconds(self._usual, inputs)
                faster = other if saves else self._usual
            self._chosen[bucket(size)] = faster


def _seconds(run: Run, inputs: NDArray[Any]) -> float:
    began = time.perf_counter()
    run(inputs)
    return time.perf_counter() - began
