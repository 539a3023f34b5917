"""Metrics as sums: each batch adds a few float64 numbers, which are summed over batches and ranks.

Training and validation thus measure with the same code, and a step needs one all-reduce for the loss and all metrics.
`precision`, `recall` and `f1` are means over the classes. `auroc` is the mean over classes of one against the rest, at
fixed thresholds that are dense near 0 and 1. Those come from torchmetrics, whose states are the sums. The width of a
metric is known before it is built, so that no metric is built that exceeds the memory limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.errors import InvalidArgument, invalid_field
from train_service.domain.spec import CLASSIFICATION, PERPLEXITY, TrainingSpec
from train_service.learning.losses import total_of

FIELD = "spec.metrics"
TOP = 5
AUROC_THRESHOLDS = 601
AUROC_LOGITS = 36.0
# The greatest exponent whose exp is a finite float64.
MAX_EXPONENT = 709.0
# Limit for all metrics of a job together. A rank holds a few copies, 40 MB each.
MAX_SUMS = 5_000_000
# A training step reduces its sums over ranks. A wider metric is measured in validation only.
MAX_SUMS_OF_A_STEP = 100_000


class Metric(Protocol):
    """A metric of `width` numbers. All of them are sums, and 0 for no rows."""

    width: int

    def sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sums of a batch of one row or more, float64 (width,)."""

    def value(self, sums: Tensor) -> float: ...


class Metrics:
    """All metrics of a job.

    torchmetrics, whose import takes seconds, is imported only if a metric needs it.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        device: torch.device,
        *,
        max_sums: int | None = None,
        own: Callable[[Tensor, Tensor], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Build the metrics that the spec names.

        Metrics wider than `max_sums` are left out. `own` is the `metrics` method of a user's model; it supplies the
        metrics that are not built in. Raises `InvalidArgument` that names `spec.metrics`, also if the built-in metrics
        together exceed `MAX_SUMS`.
        """
        self.task = spec.task
        outputs = spec.model.num_classes
        ours = _OF_CLASSES if spec.task == CLASSIFICATION else _OF_NUMBERS
        theirs = [name for name in measured(spec) if own is not None and (name not in ours or name == PERPLEXITY)]
        self._own = _Own(own, theirs) if own is not None and theirs else None
        kinds = {name: _kind(name, spec) for name in measured(spec) if name not in theirs}
        widths = {name: kind.width(outputs) for name, kind in kinds.items()}
        widths = {name: width for name, width in widths.items() if max_sums is None or width <= max_sums}
        self.width = sum(widths.values())
        if self.width > MAX_SUMS:
            widest = max(widths, key=lambda name: widths[name])
            remedy = (
                f"for {outputs:,} outputs {', '.join(widths)} add up {self.width:,} numbers, of which {widest} has "
                f"{widths[widest]:,}, and up to {MAX_SUMS:,} are kept; leave {widest} out"
            )
            raise invalid_field(FIELD, widest, remedy)
        self._metrics = {name: kinds[name].build(outputs, device) for name in widths}
        self.width += self._own.width if self._own is not None else 0

    def sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sums of a batch, float64 (width,)."""
        sums = [metric.sums(outputs, labels) for metric in self._metrics.values()]
        if self._own is not None:
            sums.append(self._own.sums(outputs, labels))
        return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)

    def values(self, sums: Tensor | Sequence[float]) -> dict[str, float]:
        """Return the values by name. NaN: the metric is undefined, e.g. for no rows."""
        sums = torch.as_tensor(sums, dtype=torch.float64)
        values, begin = {}, 0
        for name, metric in self._metrics.items():
            values[name] = metric.value(sums[begin : begin + metric.width])
            begin += metric.width
        if self._own is not None:
            values.update(self._own.values(sums[begin:]))
        return values


def measured(spec: TrainingSpec) -> tuple[str, ...]:
    """Return the metrics that the spec names. A classifier always has accuracy."""
    always = ("accuracy",) if spec.task == CLASSIFICATION else ()
    return tuple(dict.fromkeys((*always, *spec.metrics)))


def known_metrics(task: str) -> list[str]:
    """Return the metrics that a user's own model cannot have under these names."""
    return sorted(set(_OF_CLASSES if task == CLASSIFICATION else _OF_NUMBERS) - {PERPLEXITY})


class _Mean:
    """The mean of one number per row."""

    width = 2

    def __init__(
        self, each: Callable[[Tensor, Tensor], Tensor], read: Callable[[float], float] = lambda mean: mean
    ) -> None:
        self._each = each
        self._read = read

    def sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        each = self._each(outputs, labels)
        # Created on the device: a copy from the host would wait for all work queued on the device.
        rows = torch.full((), float(len(each)), dtype=torch.float64, device=each.device)
        return torch.stack([each.sum(dtype=torch.float64), rows])

    def value(self, sums: Tensor) -> float:
        total, rows = sums.tolist()
        return self._read(total / rows) if rows else float("nan")


class _Own:
    """The metrics that a user's model computes in `metrics`.

    The method returns, by name, one number per row, (rows,), or their mean.
    """

    def __init__(self, give: Callable[[Tensor, Tensor], Mapping[str, Tensor]], names: Sequence[str]) -> None:
        self._give = give
        self._names = list(names)
        # The sum of each metric, followed by the number of rows.
        self.width = len(self._names) + 1

    def sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        given = self._give(outputs, labels)
        missing = [name for name in self._names if name not in given]
        if missing:
            raise InvalidArgument(
                f"metrics of the model gives {', '.join(given) or 'nothing'}, and not {missing[0]}: it must give the "
                "same names each time",
                reason="BAD_METRICS",
            )
        rows = len(labels)
        each = [total_of(torch.as_tensor(given[name]).detach().double(), rows) for name in self._names]
        return torch.stack([*(one.cpu() for one in each), torch.tensor(float(rows), dtype=torch.float64)])

    def values(self, sums: Tensor) -> dict[str, float]:
        *totals, rows = sums.tolist()
        return {name: total / rows if rows else float("nan") for name, total in zip(self._names, totals, strict=True)}


class _Torchmetrics:
    """A metric of torchmetrics whose states are all sums."""

    def __init__(
        self,
        metric: Any,
        device: torch.device,
        ready: Callable[[Tensor], Tensor],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Wrap a metric.

        `ready` converts the model's outputs for the metric. `shapes` are the shapes of states that the metric's first
        update would change.
        """
        self._metric = metric.set_dtype(torch.float64).to(device)
        self._ready = ready
        self._device = device
        self._shapes = {name: torch.Size(value.shape) for name, value in metric._defaults.items()}
        self._shapes |= {name: torch.Size(shape) for name, shape in (shapes or {}).items()}
        self.width = sum(shape.numel() for shape in self._shapes.values())

    def sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self._metric.reset()
        self._metric.update(self._ready(outputs), labels)
        return torch.cat([getattr(self._metric, name).double().flatten() for name in self._shapes])

    def value(self, sums: Tensor) -> float:
        self._metric.reset()
        begin = 0
        for name, shape in self._shapes.items():
            count = shape.numel()
            setattr(self._metric, name, sums[begin : begin + count].to(self._device).reshape(shape))
            begin += count
        self._metric._update_count = 1
        try:
            return float(self._metric.compute())
        except ValueError:  # too few rows
            return float("nan")


class _OfHits(_Torchmetrics):
    """A metric whose states are the true and false positives and negatives of each class.

    They are counted here, because torchmetrics builds a table of classes by classes for each batch.
    """

    def sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        classes = outputs.shape[1]
        given = outputs.argmax(1)
        hits, all_given, all_there = (
            torch.bincount(one, minlength=classes) for one in (labels[given == labels], given, labels)
        )
        wrong, missed = all_given - hits, all_there - hits
        counts = {"tp": hits, "fp": wrong, "fn": missed, "tn": len(labels) - (hits + wrong + missed)}
        return torch.cat([counts[name].double() for name in self._shapes])


@dataclass(frozen=True)
class _Kind:
    """A factory of metrics. `width` returns the width of a metric for that number of outputs."""

    build: Callable[[int, torch.device], Metric]
    width: Callable[[int], int] = lambda _: _Mean.width


def _kind(name: str, spec: TrainingSpec) -> _Kind:
    kinds = _OF_CLASSES if spec.task == CLASSIFICATION else _OF_NUMBERS
    if name not in kinds:
        raise invalid_field(FIELD, name, f"use some of {', '.join(kinds)} with TASK_{spec.task}")
    return kinds[name]


def _accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.argmax(1) == labels


def _top5(classes: int, _: torch.device) -> Metric:
    if classes <= TOP:
        raise invalid_field(FIELD, "top5_accuracy", f"with {classes} classes it is always 1; use accuracy")

    def each(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.topk(TOP, 1).indices == labels[:, None]).any(1)

    return _Mean(each)


def _of_hits(name: str) -> _Kind:
    """Return a classification metric of torchmetrics, averaged over all classes."""

    def build(classes: int, device: torch.device) -> Metric:
        from torchmetrics import classification

        made = getattr(classification, name)(num_classes=classes, average="macro", sync_on_compute=False)
        return _OfHits(made, device, lambda outputs: outputs.argmax(1))

    return _Kind(build, lambda classes: 4 * classes)


def _auroc(classes: int, device: torch.device) -> Metric:
    from torchmetrics.classification import MulticlassAUROC

    # Equal steps would put all scores of a confident model into the first and the last bin.
    inner = torch.linspace(-AUROC_LOGITS, AUROC_LOGITS, AUROC_THRESHOLDS, dtype=torch.float64).sigmoid()
    # The two ends of the curve: below all scores and above them.
    thresholds = torch.cat([torch.zeros(1), inner, torch.full((1,), 2.0)])
    multiclass_auroc = MulticlassAUROC(
        num_classes=classes, average="macro", thresholds=thresholds, sync_on_compute=False
    )
    return _Torchmetrics(multiclass_auroc, device, lambda outputs: outputs.double().softmax(1))


def _r2(outputs: int, device: torch.device) -> Metric:
    from torchmetrics.regression import R2Score

    shapes = dict.fromkeys(("sum_squared_error", "sum_error", "residual"), (outputs,))
    return _Torchmetrics(R2Score(sync_on_compute=False), device, lambda given: given.double(), shapes)


class _Perplexity:
    """exp of the mean surprise of a token, over all tokens of all rows, see `shared.models.transformers_models`."""

    width = 2

    def sums(self, outputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG002
        counts = ~(outputs < 0)  # of NaN, too: it must reach the metric
        total = torch.where(counts, outputs, outputs.new_zeros(())).sum(dtype=torch.float64)
        return torch.stack([total, counts.sum(dtype=torch.float64)])

    def value(self, sums: Tensor) -> float:
        total, tokens = sums.tolist()
        return math.exp(min(total / tokens, MAX_EXPONENT)) if tokens else float("nan")


def _differences(power: int, read: Callable[[float], float]) -> _Kind:
    def each(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.double() - labels).abs().pow(power).mean(1)

    return _Kind(lambda *_: _Mean(each, read))


_OF_CLASSES: dict[str, _Kind] = {
    "accuracy": _Kind(lambda *_: _Mean(_accuracy)),
    "top5_accuracy": _Kind(_top5),
    "precision": _of_hits("MulticlassPrecision"),
    "recall": _of_hits("MulticlassRecall"),
    "f1": _of_hits("MulticlassF1Score"),
    # Four counts per class at each threshold and at both ends.
    "auroc": _Kind(_auroc, lambda classes: 4 * classes * (AUROC_THRESHOLDS + 2)),
}
_OF_NUMBERS: dict[str, _Kind] = {
    "mae": _differences(1, lambda mean: mean),
    "mse": _differences(2, lambda mean: mean),
    "rmse": _differences(2, lambda mean: mean**0.5),
    "r2": _Kind(_r2, lambda outputs: 3 * outputs + 1),
    PERPLEXITY: _Kind(lambda *_: _Perplexity()),
}
