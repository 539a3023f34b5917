"""The limit on building a model and trying it.

The model's size costs no memory on the meta device, so the limit is on the time that it takes.

Only the builder knows how many layers it makes of its arguments. But each layer is made by calls of torch, so the limit
counts these calls. It stops a builder that requests too many layers at its next call, however its arguments are named.

It is a module of its own because its class extends one of torch, which a service imports with its first check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

# Seven times the calls of torchvision's largest model, efficientnet_v2_l; they take some seconds.
MAX_CALLS = 100_000
# For slow calls: a limit on CPU time, because wall time on a busy machine says nothing about the model.
TRIAL_LIMIT_S = 30.0
# A client waits for the answer.
WALL_LIMIT_S = 300.0


class TooLarge(Exception):
    """The model is too large to be built."""


class OutOfTime(Exception):
    """The model was not built in time. The machine may be busy."""


class TrialLimit(TorchFunctionMode):
    """A context in which calls of torch are limited.

    Only calls by this thread count.

    A call raises `TooLarge` after too many calls, and `OutOfTime` if there was no time for them. Builders may catch the
    error, so `out_of_time` records it, too.

    Import the builder's modules first: imports cost time, but are no part of the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        self._end = time.thread_time() + TRIAL_LIMIT_S
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
            raise TooLarge(f"the model is too large: its layers took more than {TRIAL_LIMIT_S:g} s to be made")
        return function(*args, **(kwargs or {}))
