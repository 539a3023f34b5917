"""A train service that knows one sweep, of three trials."""

from __future__ import annotations

from typing import Any

import grpc

from millrace.train.v1 import resources_pb2, sweep_pb2, train_service_pb2_grpc
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.grpc_answers import abort, status

Sweep = sweep_pb2.Sweep
Job = resources_pb2.TrainingJob
RATE = "optimizer.learning_rate"


def answer(name: str, state: Any, best: str = "trainingJobs/s-001") -> Sweep:
    """Three trials: one that was stopped early, the best one, and one that is still to be made."""
    sweep = Sweep(name=name, state=state, best_training_job=best)
    sweep.best_checkpoint = best and f"{best}/checkpoints/step-00000009"
    sweep.spec.metric = "validation_accuracy"
    sweep.spec.parameters[RATE].grid.SetInParent()
    rates = (1e-7, 0.003, 0.5)
    states = (Job.STATE_CANCELLED, Job.STATE_SUCCEEDED, Job.STATE_UNSPECIFIED)
    for number, (rate, one) in enumerate(zip(rates, states, strict=True)):
        trial = sweep.trials.add(number=number, training_job=f"trainingJobs/s-{number:03d}", state=one, epochs=3)
        trial.parameters[RATE].number_value = rate
        trial.stopped_early = number == 0
        if number < 2:
            trial.epochs_done = 1 + 2 * number
            trial.last_value, trial.best_value = (0.1, 0.2) if number == 0 else (0.91, 0.93)
    return sweep


class Sweeping(train_service_pb2_grpc.TrainServiceServicer):
    """Answers every wish, remembers each; a sweep is over at the third look."""

    def __init__(
        self,
        final: Any = Sweep.STATE_SUCCEEDED,
        best: str = "trainingJobs/s-001",
        deleted: int | None = None,
        error: str = "",
    ) -> None:
        self.requests: list[Any] = []
        self._final = final
        self._best = best
        # The number of a trial that was deleted by hand.
        self._deleted = deleted
        self._error = error
        self._polls = 0

    def CreateSweep(self, request: Any, context: grpc.ServicerContext) -> Sweep:
        self.requests.append(request)
        return answer(f"sweeps/{request.sweep_id}", Sweep.STATE_PENDING, "")

    def GetSweep(self, request: Any, context: grpc.ServicerContext) -> Sweep:
        self._polls += 1
        if self._polls == 2:
            abort(context, status(grpc.StatusCode.UNAVAILABLE, "away for a moment"))
        sweep = answer(request.name, self._final if self._polls > 2 else Sweep.STATE_RUNNING, self._best)
        if self._deleted is not None:
            sweep.trials[self._deleted].deleted = True
        if self._error:
            sweep.error.message = self._error
        return sweep

    def ListSweeps(self, request: Any, context: grpc.ServicerContext) -> pb.ListSweepsResponse:
        one = answer("sweeps/s", Sweep.STATE_RUNNING)
        one.counts.total = 3
        return pb.ListSweepsResponse(sweeps=[one])

    def CancelSweep(self, request: Any, context: grpc.ServicerContext) -> Sweep:
        self.requests.append(request)
        return answer(request.name, Sweep.STATE_CANCELLING)

    def DeleteSweep(self, request: Any, context: grpc.ServicerContext) -> Sweep:
        self.requests.append(request)
        return answer(request.name, Sweep.STATE_DELETING)
