"""A user's own training step, a LightningModule or a class with the same methods, and the learning of one rank with it.

The protocol is that of a LightningModule, with the parts of Lightning's API that it uses: `log`, `optimizers` and the
like. A class with the same methods works without Lightning. Methods of Lightning that this loop does not call are
refused by name, never silently ignored.

There is no DistributedDataParallel around the module. After each backward, gradients are averaged over ranks for
exactly the parameters that have one on some rank. So a step may use some of its parameters at a time, and several
optimizers.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shared.errors import FailedPrecondition, InvalidArgument
from shared.models import own_method
from shared.models.inputs import Inputs
from shared.transforms.records import ModelInput
from train_service.domain.order import loss_scale
from train_service.domain.spec import FSDP, OWN, REGRESSION, TrainingSpec, learning_rate
from train_service.learning.learner import (
    BaseLearner,
    MicroBatch,
    by_compiler,
    compile_failed,
    diverged,
    split_into_micro_batches,
    validation_batches,
)
from train_service.learning.optimizers import build_optimizer, build_scheduler
from train_service.learning.ranks import Ranks, full_float32, gradients_kept_local
from train_service.learning.sharding import put_optimizer_state, units_of, whole_optimizer_state
from train_service.loading.loader import Batch, RowCache
from train_service.loading.preprocessing import Preprocessing

# --- Module ---

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


# --- Learner ---

# Limit on the names that a training step may log; each adds two numbers to the sum over ranks of every step.
MAX_LOGGED = 64


class OwnStepLearner(BaseLearner):
    def __init__(
        self, spec: TrainingSpec, ranks: Ranks, model_input: ModelInput, steps_per_epoch: int, total_steps: int
    ) -> None:
        super().__init__(spec, ranks, steps_per_epoch, total_steps)
        sharded = spec.placement.parallel == FSDP and ranks.world_size > 1
        units = units_of(spec.model, model_input.shape) if sharded else None
        self.model = self._built()
        trainer = Trainer(spec.epochs, steps_per_epoch, total_steps, ranks.rank, ranks.world_size)
        self._step_module = StepModule(self.model, trainer, self._manual_backward)
        if sharded:
            from torch.distributed.fsdp import register_fsdp_forward_method

            # Shard before the optimizer is built, because it must hold the shards. `training_step` takes the place of
            # `forward`.
            ranks.wrap(self.model, FSDP, units=units)
            register_fsdp_forward_method(self.model, "training_step")
        self._configures = spec.optimizer.name == OWN
        if self._configures:
            self._step_module.configure()
        else:
            self._step_module.optimizers = [build_optimizer(spec.optimizer, self.model, fused=False)]
            scheduler = build_scheduler(spec.optimizer, self._step_module.optimizers[0], total_steps)
            self._step_module.rates = [ScheduledRate(scheduler, STEP)] if scheduler is not None else []
            trainer.optimizers = self._step_module.optimizers
        for optimizer in self._step_module.optimizers:
            optimizer.register_step_post_hook(lambda *_: self._note_update())
        # Logged values are added over ranks in the order of these names. Rank 0 chooses them at the first step of an
        # epoch.
        self._names: list[str] = []
        self._unnamed: dict[str, None] = {}
        self._agreed_at = -1
        self._begun = False
        # Optimizer steps in the run so far, which modules read as `global_step`.
        self._updates = 0
        # The factor of the losses in a manual step, by the rows of the batch.
        self._weight = 1.0

    def prepare(self) -> None:
        if self._spec.compile:
            self.model.compile()
        if self._spec.placement.parallel != FSDP:
            # The tensors are the same on all ranks, unless the module draws from a generator of its own.
            self._ranks.share_tensors([*self.model.parameters(), *self.model.buffers()])
        self.model.train()

    def step(self, batch: Batch) -> list[float]:
        module = self._step_module
        index = batch.step % self._steps_per_epoch
        module.at(batch.epoch, self._updates)
        self._seed_step(batch.step)
        if not self.model.training:
            self.model.train()
        if self._spec.placement.parallel != FSDP:
            # As in DistributedDataParallel, all ranks begin the step with rank 0's buffers.
            self._ranks.share_tensors(list(self.model.buffers()))
        with module.logging(len(batch.row_ids)) as logged:
            self._begin(index)
            micro_batches = self._micro_batches(batch)
            self._stepped = False
            module.hook("on_train_batch_start", micro_batches[0][1], index)
            loss, outputs = self._taken(batch, micro_batches, index)
            module.hook("on_train_batch_end", outputs, micro_batches[-1][1], index)
            self._schedule(STEP, batch.step + 1, {})
        if math.isnan(loss) and logged.sums:
            total, rows = next(iter(logged.sums.values()))  # a manual step returns no loss: show its first logged value
            loss = total / rows
        return self._sums(batch, loss, logged.sums)

    def describe(self, sums: Sequence[float]) -> dict[str, float]:
        loss, rows = sums[:2]
        values = {"loss": loss / rows if rows else math.nan}
        for number, name in enumerate(self._names):
            total, count = sums[2 + 2 * number : 4 + 2 * number]
            if count and name != "loss":
                values[name] = total / count
        return values

    def evaluate(self, cache: RowCache, preprocessing: Preprocessing) -> tuple[dict[str, float], int]:
        """Return the values that `validation_step` logs, and as `validation_loss` what it returns.

        Return nothing if the module has no `validation_step`.
        """
        module, ranks = self._step_module, self._ranks
        if own_method(self.model, "validation_step") is None:
            return {}, 0
        ranks.share_buffers(self.model)
        self.model.eval()
        module.trainer.training, module.trainer.validating = False, True
        try:
            with torch.no_grad(), full_float32(), module.logging(0.0) as logged:
                module.hook("on_validation_epoch_start")
                batches = validation_batches(
                    cache, preprocessing, ranks, self._rows_per_call(), numbers=self._spec.task == REGRESSION
                )
                rows = 0.0
                module.forget_metrics()
                for number, (inputs, labels, is_padding) in enumerate(batches):
                    if is_padding and number and self._spec.placement.parallel != FSDP:
                        continue  # only a sharded model's calls are collective
                    with module.logging(0.0 if is_padding else len(labels)) as of_batch:
                        given = self._moved((inputs, labels))
                        loss = measured_loss(module.hook("validation_step", given, number))
                    if is_padding:
                        if not rows:  # this rank has no rows of its own; its metrics stay empty
                            for metric in module.metrics.values():
                                metric.reset()
                        continue
                    rows += len(labels)
                    if loss is not None:
                        logged.add("validation_loss", loss.item(), len(labels))
                    for name, (total, count) in of_batch.sums.items():
                        logged.add(name, total / count, count)
                module.rows = rows
                module.hook("on_validation_epoch_end")
                computed = module.read_metrics()
        finally:
            module.trainer.training, module.trainer.validating = True, False
        names = sorted(set().union(*ranks.share_all(sorted(logged.sums))))
        values = [number for name in names for number in logged.sums.get(name, (0.0, 0.0))]
        rows, *added = ranks.add([rows, *values]).result()
        metrics = {name: added[2 * at] / added[2 * at + 1] for at, name in enumerate(names) if added[2 * at + 1]}
        return {**metrics, **computed}, int(rows)

    def end_epoch(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the values that this rank's `on_train_epoch_end` logs."""
        module = self._step_module
        module.trainer.callback_metrics = dict(metrics)
        with module.logging(1.0) as logged:
            module.hook("on_train_epoch_end")
        found = {name: total / count for name, (total, count) in logged.sums.items()}
        module.forget_metrics()
        self._schedule(EPOCH, module.trainer.current_epoch + 1, {**metrics, **found})
        return found

    def state(self, note_progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        module = self._step_module
        parallel = self._spec.placement.parallel
        state: dict[str, Any] = {
            "optimizers": [
                whole_optimizer_state(self.model, optimizer, parallel, note_progress) for optimizer in module.optimizers
            ],
            "schedulers": [rate.scheduler.state_dict() for rate in module.rates],
            "updates": self._updates,
        }
        if self._scaler.is_enabled():
            state["scaler"] = self._scaler.state_dict()
            state["skipped_steps"] = self._skipped_steps
        if own_method(self.model, "on_save_checkpoint") is not None:
            own: dict[str, Any] = {}
            module.hook("on_save_checkpoint", own)
            state["own"] = own
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        module = self._step_module
        for optimizer, saved in zip(module.optimizers, state["optimizers"], strict=True):
            put_optimizer_state(self.model, optimizer, saved, self._spec.placement.parallel)
        for rate, saved in zip(module.rates, state["schedulers"], strict=True):
            rate.scheduler.load_state_dict(saved)
        self._updates = int(state["updates"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])
            self._skipped_steps = int(state["skipped_steps"])
        if "own" in state:
            module.hook("on_load_checkpoint", state["own"])

    def _begin(self, index: int) -> None:
        if not self._begun:
            self._begun = True
            self._step_module.hook("on_fit_start")
            self._step_module.hook("on_train_start")
        if index == 0:
            self._step_module.hook("on_train_epoch_start")

    def _micro_batches(self, batch: Batch) -> list[tuple[MicroBatch, Any]]:
        """Return the micro-batches of the batch, each with the input of the module."""
        ranks = self._ranks
        cut = split_into_micro_batches(
            batch, self._spec, ranks.world_size, ranks.device, whole=self._step_module.is_manual
        )
        return [(micro_batch, self._moved((micro_batch.inputs, micro_batch.labels))) for micro_batch in cut]

    def _moved(self, batch: tuple[Inputs, Tensor]) -> Any:
        """Apply the module's `on_after_batch_transfer`, which may augment or normalize on the device."""
        given = self._step_module.hook("on_after_batch_transfer", batch, 0)
        return batch if given is None else given

    def _taken(self, batch: Batch, micro_batches: Sequence[tuple[MicroBatch, Any]], index: int) -> tuple[float, Any]:
        take = self._manual if self._step_module.is_manual else self._automatic
        try:
            return take(batch, micro_batches, index)
        except Exception as error:
            if not self._spec.compile or not by_compiler(error):
                raise
            raise compile_failed(error) from error

    def _automatic(
        self, batch: Batch, micro_batches: Sequence[tuple[MicroBatch, Any]], index: int
    ) -> tuple[float, Any]:
        """Accumulate the micro-batches' gradients and step the one optimizer.

        Return the mean loss of this rank's rows, and the last micro-batch's result of `training_step`.
        """
        module, spec = self._step_module, self._spec
        (optimizer,) = module.optimizers
        module.hook("on_before_zero_grad", optimizer)
        optimizer.zero_grad(set_to_none=True)
        total, outputs = 0.0, None
        for number, (micro_batch, given) in enumerate(micro_batches, start=1):
            module.rows = len(micro_batch.row_ids)
            with gradients_kept_local(self.model, number < len(micro_batches)):
                with self._autocast():
                    outputs = self.model.training_step(given, index)  # type: ignore[operator]
                loss = self._checked(number_of(outputs), batch, micro_batch)
                total += loss.item() * len(micro_batch.row_ids)
                scale = len(micro_batch.row_ids) * loss_scale(self._ranks.world_size, batch.step_rows)
                module.hook("on_before_backward", loss)
                self._scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
                module.hook("on_after_backward")
        self._average()
        self._set_rate(batch.step)
        if spec.max_gradient_norm:
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), spec.max_gradient_norm)
        module.hook("on_before_optimizer_step", optimizer)
        self._learning_rate = float(optimizer.param_groups[0]["lr"])
        self._scaler.step(optimizer)
        self._scaler.update()
        self._skipped_steps += int(self.skipped)
        return total / len(batch.row_ids), outputs

    def _checked(self, loss: Tensor | None, batch: Batch, micro_batch: MicroBatch) -> Tensor:
        if loss is None:
            raise InvalidArgument(
                "training_step returned no loss: return it, or set automatic_optimization to False and step the "
                "optimizers yourself",
                reason="BAD_TRAINING_STEP",
            )
        value = loss.item()
        if not math.isfinite(value):
            raise diverged(batch, micro_batch, loss, value, self._ranks.rank)
        return loss

    def _manual(self, batch: Batch, micro_batches: Sequence[tuple[MicroBatch, Any]], index: int) -> tuple[float, Any]:
        """Run a step whose module steps its optimizers itself.

        Return the loss, or NaN if the step returns none, and the result of `training_step`.
        """
        self._weight = len(batch.row_ids) * loss_scale(self._ranks.world_size, batch.step_rows)
        self._learning_rate = float(self._step_module.optimizers[0].param_groups[0]["lr"])
        self._set_rate(batch.step)
        with self._autocast():
            outputs = self.model.training_step(micro_batches[0][1], index)  # type: ignore[operator]
        self._stepped = True  # only a loss scaler skips steps, and a manual step has none
        loss = number_of(outputs)
        return (math.nan if loss is None else loss.item()), outputs

    def _manual_backward(self, loss: Tensor, *arguments: Any, **named: Any) -> None:
        if not self._step_module.is_manual:
            raise FailedPrecondition(
                "manual_backward was called by a module whose automatic_optimization is True; set it to False",
                reason="BAD_TRAINING_STEP",
            )
        (loss * self._weight).backward(*arguments, **named)  # type: ignore[no-untyped-call]
        self._average()
        self._step_module.hook("on_after_backward")

    def _average(self) -> None:
        if self._spec.placement.parallel != FSDP:
            self._ranks.average_gradients(list(self.model.parameters()))

    def _set_rate(self, step: int) -> None:
        """Set the learning rate of an optimizer that the spec names with one of our schedules."""
        if self._configures or self._step_module.rates:
            return
        spec = self._spec.optimizer
        rate = learning_rate(spec.schedule, spec.learning_rate, step, self._total_steps)
        for group in self._step_module.optimizers[0].param_groups:
            group["lr"] = rate

    def _schedule(self, interval: str, done: int, metrics: Mapping[str, float]) -> None:
        """Step the schedulers of that interval. `done` intervals are complete.

        A manual module steps its own schedulers.
        """
        if self._step_module.is_manual:
            return
        for rate in self._step_module.rates:
            if rate.interval != interval or done % rate.frequency:
                continue
            if not isinstance(rate.scheduler, ReduceLROnPlateau):
                rate.scheduler.step()
            elif rate.monitor in metrics:
                rate.scheduler.step(metrics[rate.monitor])
            else:
                raise FailedPrecondition(
                    f"a ReduceLROnPlateau monitors {rate.monitor!r}, and validation measured "
                    f"{', '.join(metrics) or 'nothing'}; log it in validation_step",
                    reason="METRIC_NOT_MEASURED",
                )

    def _sums(self, batch: Batch, loss: float, logged: Mapping[str, tuple[float, float]]) -> list[float]:
        """Return loss, rows, and a sum and its rows per logged name, of fixed width for the sum over ranks."""
        self._unnamed.update(dict.fromkeys(name for name in logged if name not in self._names))
        if self._agreed_at != batch.epoch:
            self._agreed_at = batch.epoch
            more = self._ranks.share([name for name in self._unnamed if name not in self._names])
            self._names += more[: MAX_LOGGED - len(self._names)]
        sums = [loss * len(batch.row_ids), float(len(batch.row_ids))]
        for name in self._names:
            sums += logged.get(name, (0.0, 0.0))
        return sums + [0.0] * (2 * (MAX_LOGGED - len(self._names)))

    def _note_update(self) -> None:
        super()._note_update()
        self._updates += 1
        self._step_module.trainer.global_step = self._updates
