"""Between Ray Tune and the store: trials that Tune starts become training jobs, those that it stops are cancelled."""

from __future__ import annotations

from functools import partial
from typing import Any

from ray.tune import Callback

from shared.errors import Unavailable
from shared.jobs import AttemptContext
from train_service.patience import patient
from train_service.sweeps.trials import Trials


class Steering(Callback):
    """Notes what Tune tells, and acts on it between two of its steps: there, errors reach whoever called Tune."""

    def __init__(self, context: AttemptContext, trials: Trials) -> None:
        self._context = context
        self._trials = trials
        self._started: list[int] = []
        # By number: the epochs that it had told.
        self._ended: dict[int, int] = {}
        self._lost: list[int] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune writes its callbacks down, for a restoration that we do without.
        return Callback, ()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._started.append(trial.config["trial"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._ended[trial.config["trial"]] = (trial.last_result or {}).get("epochs", 0)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._lost.append(trial.config["trial"])

    def on_step_begin(self, iteration: int, trials: list[Any], **_: Any) -> None:
        self._context.raise_if_stopped()

    def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
        """Raises `Unavailable` where a follower was lost more often than Tune begins it again: the next attempt follows
        all trials again."""
        while self._started:
            number = self._started.pop(0)
            patient(partial(self._trials.make, number), "a trial")
            # Whoever cancels says so first and looks for trials then; here it is the other way round.
            patient(lambda: self._context.raise_if_stopped(fresh=True), "the sweep's state")
        while self._ended:
            number, epochs = self._ended.popitem()
            # One that has done its epochs is about to end well.
            if epochs < self._epochs(number):
                patient(lambda: self._context.raise_if_stopped(fresh=True), "the sweep's state")
                patient(partial(self._trials.stop_early, number), "a trial that is to stop")
        if self._lost:
            names = ", ".join(self._trials.name(number) for number in self._lost)
            raise Unavailable(f"the processes that follow {names} were lost", reason="FOLLOWER_LOST")

    def _epochs(self, number: int) -> int:
        spec = self._trials.spec
        return spec.training_of(spec.parameters_of(number)).epochs
