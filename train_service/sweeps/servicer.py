"""The sweep RPCs of the training service.

They belong to `millrace.train.v1.TrainService`. The module converts their messages, too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from google.protobuf import json_format
from grpc import aio

from millrace.train.v1 import resources_pb2, sweep_pb2, train_service_pb2, train_service_pb2_grpc
from shared.errors import InvalidArgument, invalid_field
from shared.grpc_errors import status_proto_from_record
from shared.idempotency import body_digest
from shared.jobs import JobRecord, JobState
from train_service.converters.jobs import etag, set_values, timestamp
from train_service.converters.specs import maximizes, spec_from_proto, spec_to_proto, whole
from train_service.domain.spec import TrainingSpec
from train_service.domain.sweep import (
    CHOICE,
    GRID,
    INTEGERS,
    LISTED,
    LOG_UNIFORM,
    UNIFORM,
    Asha,
    Domain,
    SweepSpec,
    renamed,
)
from train_service.sweeps.sweeps import Sweeps, SweepView, Trial

# --- Servicer ---

Context = aio.ServicerContext[Any, Any]


class SweepServicerPart(train_service_pb2_grpc.TrainServiceServicer):
    def __init__(self, sweeps: Sweeps, custom_allowed: Collection[str]) -> None:
        self._sweeps = sweeps
        self._allowed_in_sweeps = custom_allowed

    async def CreateSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        timeout_s = context.time_remaining()
        return await asyncio.to_thread(self._create, request, math.inf if timeout_s is None else timeout_s)

    def _create(self, request: Any, timeout_s: float) -> sweep_pb2.Sweep:
        """Create the sweep, in a thread. A sweep may list many values, and other calls must be answered meanwhile."""
        spec = sweep_spec_from_proto(request.spec, self._allowed_in_sweeps)
        digest = body_digest(request)
        view = self._sweeps.create(request.sweep_id, spec, request.request_id, digest, request.validate_only, timeout_s)
        return sweep_to_proto(view)

    async def GetSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        return sweep_to_proto(await asyncio.to_thread(self._sweeps.get, request.name))

    async def ListSweeps(self, request: Any, context: Context) -> train_service_pb2.ListSweepsResponse:
        views, token = await asyncio.to_thread(self._sweeps.page, request.page_size, request.page_token)
        return train_service_pb2.ListSweepsResponse(
            sweeps=[sweep_to_proto(view) for view in views], next_page_token=token
        )

    async def CancelSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        return sweep_to_proto(await asyncio.to_thread(self._sweeps.cancel, request.name, request.etag))

    async def DeleteSweep(self, request: Any, context: Context) -> sweep_pb2.Sweep:
        return sweep_to_proto(await asyncio.to_thread(self._sweeps.delete, request.name, request.etag))


# --- Messages ---

_Order = resources_pb2.CheckpointPolicy
# Prefixes of enum names in the contract that the service's own names lack.
_PREFIXES = {"optimizer.schedule": "SCHEDULE_", "precision": "PRECISION_"}


def sweep_spec_from_proto(spec: sweep_pb2.SweepSpec, custom_allowed: Collection[str]) -> SweepSpec:
    """Return the specification with defaults filled in. Raises `InvalidArgument` for what plain values cannot hold."""
    if not spec.HasField("base"):
        raise invalid_field("spec.base", None, "say what all trials have in common")
    try:
        base = spec_from_proto(spec.base, custom_allowed)
    except InvalidArgument as error:
        raise renamed(error, {}) from None
    asha = spec.asha
    return SweepSpec(
        base=_ranked(base, spec),
        parameters={path: _domain(path, spec.parameters[path]) for path in spec.parameters},
        num_samples=spec.num_samples if spec.HasField("num_samples") else 1,
        seed=spec.seed,
        max_concurrent_trials=spec.max_concurrent_trials or 4,
        asha=Asha(grace_period=asha.grace_period or 1, reduction_factor=asha.reduction_factor or 4.0, max_t=asha.max_t)
        if spec.HasField("asha")
        else None,
    )


def sweep_to_proto(view: SweepView) -> sweep_pb2.Sweep:
    record = view.record
    message = sweep_pb2.Sweep(
        name=record.name,
        uid=record.uid,
        spec=_spec_to_proto(view.spec),
        state=f"STATE_{record.state.value}",
        attempt=record.attempt,
        create_time=timestamp(record.create_time),
        update_time=timestamp(record.update_time),
        etag=etag(record),
        counts=_counts(view),
        best_training_job=view.best_training_job,
        best_checkpoint=view.best_checkpoint,
    )
    if record.state is JobState.FAILED and record.error:
        message.error.CopyFrom(status_proto_from_record(record.error))
    message.trials.extend(_trial(trial, view.spec) for trial in view.trials or ())
    return message


def _ranked(base: TrainingSpec, spec: sweep_pb2.SweepSpec) -> TrainingSpec:
    """Return `base` ranked by the sweep's metric."""
    policy = base.checkpoints
    metric = spec.metric or policy.best_metric
    if spec.order != _Order.ORDER_UNSPECIFIED:
        maximize = spec.order == _Order.ORDER_MAXIMIZE
    else:
        maximize = policy.maximize if metric == policy.best_metric else maximizes(metric)
    return replace(base, checkpoints=replace(policy, best_metric=metric, maximize=maximize))


def _domain(path: str, domain: sweep_pb2.Domain) -> Domain:
    kind = domain.WhichOneof("domain") or ""
    if kind in LISTED:
        where = f"spec.parameters[{path}].{kind}"
        values = [_plain(value, path, where) for value in getattr(domain, kind).values]
        return Domain(kind=kind, values=tuple(values))
    if kind in (UNIFORM, LOG_UNIFORM, INTEGERS):
        bounds = getattr(domain, kind)
        return Domain(kind=kind, low=bounds.low, high=bounds.high)
    return Domain(kind="")


def _plain(value: Any, path: str, where: str) -> Any:
    """Return a JSON value as a plain one.

    JSON has only doubles. Whole ones become ints, as in the other arguments of a specification.
    """
    try:
        plain = whole(json_format.MessageToDict(value))
    except (ValueError, json_format.Error):
        raise invalid_field(where, None, "use finite numbers; JSON has no others") from None
    prefix = _PREFIXES.get(path, "")
    return plain.removeprefix(prefix) if isinstance(plain, str) else plain


def _with_prefixes(parameters: dict[str, Any]) -> dict[str, Any]:
    return {path: f"{_PREFIXES[path]}{value}" if path in _PREFIXES else value for path, value in parameters.items()}


def _spec_to_proto(spec: SweepSpec) -> sweep_pb2.SweepSpec:
    message = sweep_pb2.SweepSpec(
        base=spec_to_proto(spec.base),
        num_samples=spec.num_samples,
        seed=spec.seed,
        metric=spec.ranking.metric,
        order=_Order.ORDER_MAXIMIZE if spec.ranking.maximize else _Order.ORDER_MINIMIZE,
        max_concurrent_trials=spec.max_concurrent_trials,
    )
    for path, domain in spec.parameters.items():
        into = getattr(message.parameters[path], domain.kind)
        if domain.kind in (GRID, CHOICE):
            for value in domain.values:
                json_format.ParseDict(_with_prefixes({path: value})[path], into.values.add())
        elif domain.kind == INTEGERS:
            into.low, into.high = int(domain.low), int(domain.high)
        else:
            into.low, into.high = domain.low, domain.high
    if spec.asha is not None:
        message.asha.grace_period = spec.asha.grace_period
        message.asha.reduction_factor = spec.asha.reduction_factor
        message.asha.max_t = spec.asha.max_t
    return message


def _trial(trial: Trial, spec: SweepSpec) -> sweep_pb2.Trial:
    metric = spec.ranking.metric
    message = sweep_pb2.Trial(
        number=trial.number,
        training_job=trial.name,
        state=f"STATE_{trial.job.state.value}" if trial.job else "STATE_UNSPECIFIED",
        stopped_early=trial.stopped_early,
        deleted=trial.deleted,
        last_value=trial.last.metrics[metric] if trial.last else None,
        best_value=trial.best.metrics[metric] if trial.best else None,
        best_checkpoint=trial.best.name if trial.best else "",
        epochs_done=trial.epochs_done,
        epochs=trial.epochs,
    )
    set_values(message.parameters, _with_prefixes(trial.parameters))
    if trial.job and trial.job.state is JobState.FAILED and trial.job.error:
        message.error.CopyFrom(status_proto_from_record(trial.job.error))
    return message


def _counts(view: SweepView) -> sweep_pb2.TrialCounts:
    counts = sweep_pb2.TrialCounts(total=view.spec.trial_count)
    for trial in view.trials or ():
        if name := _counted_as(trial, view.record):
            setattr(counts, name, getattr(counts, name) + 1)
    return counts


def _counted_as(trial: Trial, sweep: JobRecord) -> str:
    """Return the count that includes the trial. The name is empty if only the total includes it."""
    if trial.deleted:
        return ""
    if trial.job is None:
        if not sweep.state.final:
            return "pending"
        return "cancelled" if JobState.CANCELLED in (sweep.state, sweep.deleted_from) else ""
    if trial.stopped_early:
        return "stopped_early"
    return {
        JobState.PENDING: "pending",
        JobState.SUCCEEDED: "succeeded",
        JobState.FAILED: "failed",
        JobState.CANCELLED: "cancelled",
        JobState.DELETING: "cancelled",
    }.get(trial.job.state, "running")
