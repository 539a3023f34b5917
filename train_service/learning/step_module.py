"""A module with a user's own training step, and the parts of Lightning's API that it uses: `log`, `optimizers`, …

The protocol is that of a LightningModule; a class with the same methods works without Lightning. Methods of Lightning
that this loop does not call are refused by name, never silently ignored.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shared.errors import InvalidArgument
from shared.models import own_method

# Methods that a user's class may define but that this loop would not call.
NOT_CALLED = (
    *("optimizer_step", "optimizer_zero_grad", "backward", "lr_scheduler_step", "configure_gradient_clipping"),
    *("configure_model", "setup", "configure_sharded_model", "transfer_batch_to_device", "on_before_batch_transfer"),
)
EPOCH, STEP = "epoch", "step"


@dataclass(frozen=True)
class ScheduledRate:
    """A scheduler and when it is stepped.

    It is stepped after every `frequency`-th `interval`, `epoch` or `step`. `monitor` names the validation metric that
    the scheduler uses, if any.
    """

    scheduler: LRScheduler
    interval: str = EPOCH
    frequency: int = 1
    monitor: str = ""


@dataclass
class Logged:
    """Sums of logged values, each weighted by its rows: name → (sum, rows)."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, value: float, rows: float) -> None:
        total, before = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (total + value * rows, before + rows)


class Trainer:
    """The trainer's attributes that modules read. Any other attribute raises an AttributeError that says so."""

    def __init__(self, max_epochs: int, steps_per_epoch: int, total_steps: int, rank: int, world_size: int) -> None:
        self.max_epochs = max_epochs
        self.max_steps = self.estimated_stepping_batches = total_steps
        self.num_training_batches = steps_per_epoch
        self.global_rank, self.world_size = rank, world_size
        self.is_global_zero = rank == 0
        self.current_epoch = self.global_step = 0
        self.training, self.validating, self.sanity_checking, self.evaluating = True, False, False, False
        self.callback_metrics: dict[str, float] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.logger, self.datamodule, self.fast_dev_run = None, None, False
        self.loggers: list[Any] = []
        self.barebones = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_global_zero:
            print(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Millrace's own loop has no trainer.{name}; run such a module in a loop of your own")


class StepModule:
    """A user's module and the loop's calls into it. `manual_backward` calls `backward`."""

    def __init__(self, module: nn.Module, trainer: Trainer, backward: Callable[..., None]) -> None:
        self.module = module
        self.trainer = trainer
        self.optimizers: list[torch.optim.Optimizer] = []
        self.rates: list[ScheduledRate] = []
        self.logged = Logged()
        # The number of rows that a logged value stands for.
        self.rows = 0.0
        # Metrics of torchmetrics that were logged as objects, by name; they accumulate over batches.
        self.metrics: dict[str, Any] = {}
        self._backward = backward
        self._frozen: list[tuple[nn.Parameter, bool]] = []
        self._bind()

    @property
    def is_manual(self) -> bool:
        return not getattr(self.module, "automatic_optimization", True)

    def hook(self, name: str, *arguments: Any) -> Any:
        """Call the hook of that name if the user's class defines it."""
        method = own_method(self.module, name)
        return method(*arguments) if method is not None else None

    def at(self, epoch: int, global_step: int) -> None:
        self.trainer.current_epoch, self.trainer.global_step = epoch, global_step
        for name, value in (("current_epoch", epoch), ("global_step", global_step)):
            self._set(name, value)

    def configure(self) -> None:
        """Build the module's optimizers and schedulers. Raises `InvalidArgument` if it returns anything else."""
        made = configured(self.module)
        self.optimizers, self.rates = made
        self.trainer.optimizers = self.optimizers

    @contextlib.contextmanager
    def logging(self, rows: float) -> Iterator[Logged]:
        """Weight values that are logged in this context by `rows`."""
        before, self.logged, self.rows = self.logged, Logged(), rows
        try:
            yield self.logged
        finally:
            self.logged = before

    def read_metrics(self) -> dict[str, float]:
        """Return the values of the metrics that were logged as objects, over all ranks, and reset them.

        All ranks must call it.
        """
        metrics, self.metrics = self.metrics, {}
        values = {name: float(metric.compute()) for name, metric in sorted(metrics.items())}
        for metric in metrics.values():
            metric.reset()
        return values

    def forget_metrics(self) -> None:
        """Reset the metrics that were logged as objects. Their step logged the value of each batch."""
        for metric in self.metrics.values():
            metric.reset()
        self.metrics = {}

    def _bind(self) -> None:
        self._set("trainer", self.trainer)
        self._set("log", self._log)
        self._set("log_dict", self._log_dict)
        self._set("optimizers", self._get_optimizers)
        self._set("lr_schedulers", self._get_schedulers)
        self._set("manual_backward", self._manual_backward)
        self._set("toggle_optimizer", self._toggle)
        self._set("untoggle_optimizer", self._untoggle)

    def _set(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self.module), name, None), property) and name != "trainer":
            return  # Lightning's own property, which reads it from the trainer
        setattr(self.module, name, value)

    def _log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Log a value as Lightning does, but always reduce it to the mean over the rows of all ranks."""
        if _is_metric(value):
            self.metrics[name] = value
            value = value._forward_cache  # the batch's value; None if the metric was only updated
            if value is None:
                return
        if not isinstance(value, Tensor | int | float):
            raise InvalidArgument(
                f"log({name!r}, …) was given a {type(value).__name__}; give a number or a tensor of one, which the "
                "loop averages over rows and ranks",
                reason="BAD_LOG",
            )
        self.logged.add(name, float(value.detach() if isinstance(value, Tensor) else value), self.rows)

    def _log_dict(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            self._log(name, value)

    def _get_optimizers(self, use_pl_optimizer: bool = True) -> Any:  # noqa: ARG002
        return self.optimizers[0] if len(self.optimizers) == 1 else list(self.optimizers)

    def _get_schedulers(self) -> Any:
        found = [rate.scheduler for rate in self.rates]
        return None if not found else found[0] if len(found) == 1 else found

    def _manual_backward(self, loss: Tensor, *arguments: Any, **named: Any) -> None:
        self._backward(loss, *arguments, **named)

    def _toggle(self, optimizer: torch.optim.Optimizer) -> None:
        """Freeze all parameters except the optimizer's until `untoggle_optimizer`."""
        its = {id(param) for group in optimizer.param_groups for param in group["params"]}
        others = {id(one): one for made in self.optimizers for group in made.param_groups for one in group["params"]}
        self._frozen = [(one, one.requires_grad) for key, one in others.items() if key not in its]
        for one, _ in self._frozen:
            one.requires_grad = False

    def _untoggle(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        for one, needed in self._frozen:
            one.requires_grad = needed
        self._frozen = []


def _is_metric(value: Any) -> bool:
    """Return whether the value is a metric of torchmetrics.

    torchmetrics takes seconds to import, but a module that uses it has imported it already.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def is_step(module: object) -> bool:
    """Return whether the user's class has a training step."""
    return own_method(module, "training_step") is not None


def configured(module: nn.Module) -> tuple[list[torch.optim.Optimizer], list[ScheduledRate]]:
    """Return the optimizers and schedulers of `configure_optimizers`, in any form that Lightning accepts.

    Raises `InvalidArgument` for any other form, for no optimizer, and for several if the loop steps them itself.
    """
    made: Any = module.configure_optimizers()  # type: ignore[operator]
    optimizers: list[Any] = []
    rates: list[Any] = []
    two_lists = isinstance(made, list | tuple) and len(made) == 2 and all(isinstance(one, list | tuple) for one in made)
    if two_lists:
        optimizers, rates = list(made[0]), list(made[1])
    else:
        for one in made if isinstance(made, list | tuple) else [made]:
            if isinstance(one, Mapping):
                optimizers.append(one.get("optimizer"))
                rates += [one["lr_scheduler"]] if "lr_scheduler" in one else []
            else:
                optimizers.append(one)
    if not optimizers or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
        kinds = ", ".join(type(one).__name__ for one in optimizers) or "nothing"
        raise _bad(f"gives {kinds}; give torch's optimizers, with schedulers if any, in a form of Lightning's")
    if len(optimizers) > 1 and getattr(module, "automatic_optimization", True):
        raise _bad("gives several optimizers: set automatic_optimization to False, and step them in training_step")
    return optimizers, [_rate(rate) for rate in rates]


def _rate(given: Any) -> ScheduledRate:
    config = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = config.get("scheduler")
    if not isinstance(scheduler, LRScheduler):
        raise _bad(f"gives a scheduler of type {type(scheduler).__name__}; give one of torch.optim.lr_scheduler")
    interval, frequency = config.get("interval", EPOCH), config.get("frequency", 1)
    if interval not in (EPOCH, STEP) or type(frequency) is not int or frequency < 1:
        raise _bad(
            f"gives a scheduler with interval {interval!r} and frequency {frequency!r}; use epoch or step, and 1 up"
        )
    if isinstance(scheduler, ReduceLROnPlateau) and not (config.get("monitor") and interval == EPOCH):
        raise _bad("gives a ReduceLROnPlateau without monitor, the name of a validation metric, or not of epochs")
    return ScheduledRate(scheduler, interval, frequency, config.get("monitor") or "")


def _bad(what: str) -> InvalidArgument:
    return InvalidArgument(f"configure_optimizers {what}", reason="BAD_OPTIMIZERS")


def measured_loss(returned: Any) -> Tensor | None:
    """Return the loss that a validation step returned, or None if it returned anything else."""
    found = returned.get("loss") if isinstance(returned, Mapping) else returned
    return found.reshape(()) if isinstance(found, Tensor) and found.numel() == 1 else None


def number_of(returned: Any) -> Tensor | None:
    """Return the loss that a training step returned, or None.

    The loss is a tensor of one number, or the item `loss` of a dict.
    """
    found = returned.get("loss") if isinstance(returned, Mapping) else returned
    if found is None:
        return None
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise InvalidArgument(
            f"training_step returned a {type(found).__name__}; return the loss, the mean over the batch's rows, or a "
            "dict that has it as loss",
            reason="BAD_TRAINING_STEP",
        )
    return found.reshape(())
