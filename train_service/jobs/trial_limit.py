"""A bound on how long a model may take to be built and tried on torch's meta device, where its size costs nothing.

How many layers a builder makes of its arguments only the builder knows. But each layer is made by calls of torch, so
these are counted: a builder that asks for too many is stopped in its next one, whatever its arguments are called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

# Seven times those of torchvision's largest, efficientnet_v2_l; they take some seconds.
MAX_CALLS = 100_000
# Where calls are slow: of the processor's time, for a machine that has much else to do says nothing of the model.
LIMIT_S = 30.0
# Somebody waits for the answer.
WALL_LIMIT_S = 300.0


class TooLarge(Exception):
    """The model was not built to its end."""


class OutOfTime(Exception):
    """The model was not built to its end, for which it may not be to blame."""


class TrialLimit(TorchFunctionMode):
    """Use as a context, in which calls of torch by this thread raise `TooLarge` once there were too many, and
    `OutOfTime` where there was no time for them. Builders may catch it, so `out_of_time` says it, too.

    What builders import should have been imported before: it costs time, and is none of the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        self._end = time.thread_time() + LIMIT_S
        self._wall_end = time.monotonic() + WALL_LIMIT_S
        self.out_of_time = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise TooLarge(f"the model is too large: its layers take more than {MAX_CALLS:,} calls of torch")
        if time.monotonic() > self._wall_end:
            self.out_of_time = True
            raise OutOfTime
        if time.thread_time() > self._end:
            raise TooLarge(f"the model is too large: its layers took more than {LIMIT_S:g} s to be made")
        return function(*args, **(kwargs or {}))
