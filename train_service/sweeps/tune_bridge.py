"""Between Ray Tune and the store: trials that Tune starts become training jobs, those that it stops are cancelled."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from ray.tune import Callback

from shared.errors import Unavailable
from shared.jobs import AttemptContext
from train_service.store_retry import retry_on_outage
from train_service.sweeps.follower import EPOCHS, TRIAL
from train_service.sweeps.sweeps import Trials

logger = logging.getLogger(__name__)

# What Tune writes before each failure in a trial's file of them.
FAILURE = "Failure # "


class TuneBridge(Callback):
    """Notes what Tune tells, and acts on it between two of its steps: there, errors reach whoever called Tune."""

    def __init__(self, context: AttemptContext, trials: Trials) -> None:
        self._context = context
        self._trials = trials
        self._started: list[int] = []
        # By number: the epochs that it had told.
        self._ended: dict[int, int] = {}
        # By number: why.
        self._lost: dict[int, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune writes its callbacks down, for a restoration that we do without.
        return Callback, ()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._started.append(trial.config[TRIAL])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._ended[trial.config[TRIAL]] = (trial.last_result or {}).get(EPOCHS, 0)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._log_failure(trial, "was lost; it is begun again")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._lost[trial.config[TRIAL]] = self._log_failure(trial, "was lost too often")

    def on_step_begin(self, iteration: int, trials: list[Any], **_: Any) -> None:
        self._context.raise_if_stopped()

    def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
        """Raises `Unavailable` where a follower was lost more often than Tune begins it again: the next attempt follows
        all trials again."""
        while self._started:
            number = self._started.pop(0)
            retry_on_outage(partial(self._trials.make, number), "a trial")
            # Whoever cancels says so first and looks for trials then; here it is the other way round.
            retry_on_outage(lambda: self._context.raise_if_stopped(fresh=True), "the sweep's state")
        while self._ended:
            number, epochs = self._ended.popitem()
            # One that has done its epochs is about to end well.
            if epochs < self._epochs(number):
                retry_on_outage(lambda: self._context.raise_if_stopped(fresh=True), "the sweep's state")
                retry_on_outage(partial(self._trials.stop_early, number), "a trial that is to stop")
        if self._lost:
            told = "; ".join(f"{self._trials.name(number)}: {why}" for number, why in self._lost.items())
            raise Unavailable(f"processes that follow trials were lost: {told}", reason="FOLLOWER_LOST")

    def _log_failure(self, trial: Any, what: str) -> str:
        """The last line of the trial's newest failure, which is the error itself; all of it is logged."""
        # Where Tune's driver writes; what `Trial.get_error` reads is a copy in its storage, made at times.
        failure = Path(trial.error_file).read_text().rpartition(FAILURE)[2].strip()
        logger.warning("the process that follows %s %s: %s", self._trials.name(trial.config[TRIAL]), what, failure)
        return failure.splitlines()[-1].strip()

    def _epochs(self, number: int) -> int:
        """After this many epochs a trial ends by itself. A program's loop decides when; the scheduler stops no trial
        behind `max_t`."""
        spec = self._trials.spec
        if spec.base.program is not None:
            return spec.asha.max_t if spec.asha is not None else 0
        return spec.training_of(spec.parameters_of(number)).epochs
