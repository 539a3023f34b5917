"""The bridge between Ray Tune and the store.

Started trials become training jobs, and the jobs of stopped trials are cancelled.
"""

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

# Tune writes this before each failure in a trial's error file.
FAILURE = "Failure # "


class TuneBridge(Callback):
    """A callback that records Tune's events.

    It acts on them between two of Tune's steps. Errors raised there reach the caller of Tune.
    """

    def __init__(self, context: AttemptContext, trials: Trials) -> None:
        self._context = context
        self._trials = trials
        self._started: list[int] = []
        # By number: the epochs that the trial had reported.
        self._ended: dict[int, int] = {}
        # By number: the reason.
        self._lost: dict[int, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune saves its callbacks for a restoration that is not used here.
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
        """Create started trials' jobs, and stop ended trials.

        Raises `Unavailable` if a follower was lost more often than Tune restarts it; the next attempt follows all
        trials again.
        """
        while self._started:
            number = self._started.pop(0)
            retry_on_outage(partial(self._trials.make, number), "a trial")
            # A cancellation is recorded first, and then cancels existing trials. Creating a trial first and then
            # checking for a cancellation leaves no gap.
            retry_on_outage(lambda: self._context.raise_if_stopped(fresh=True), "the sweep's state")
        while self._ended:
            number, epochs = self._ended.popitem()
            # A trial that has finished its epochs is about to succeed.
            if epochs < self._epochs(number):
                retry_on_outage(lambda: self._context.raise_if_stopped(fresh=True), "the sweep's state")
                retry_on_outage(partial(self._trials.stop_early, number), "a trial that is to stop")
        if self._lost:
            told = "; ".join(f"{self._trials.name(number)}: {why}" for number, why in self._lost.items())
            raise Unavailable(f"processes that follow trials were lost: {told}", reason="FOLLOWER_LOST")

    def _log_failure(self, trial: Any, what: str) -> str:
        """Log the trial's newest failure. Returns its last line, which is the error itself."""
        # Read the file that Tune's driver writes. `Trial.get_error` reads a copy in Tune's storage, which is updated
        # only at times.
        failure = Path(trial.error_file).read_text().rpartition(FAILURE)[2].strip()
        logger.warning("the process that follows %s %s: %s", self._trials.name(trial.config[TRIAL]), what, failure)
        return failure.splitlines()[-1].strip()

    def _epochs(self, number: int) -> int:
        """Return after how many epochs a trial ends.

        It then ends by itself. A program's loop decides that, and the scheduler stops no trial after `max_t`.
        """
        spec = self._trials.spec
        if spec.base.program is not None:
            return spec.asha.max_t if spec.asha is not None else 0
        return spec.training_of(spec.parameters_of(number)).epochs
