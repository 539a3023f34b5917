"""The attempt at a sweep.

Ray Tune decides which trials run and which stop early, and the attempt applies these decisions to their jobs.

Tune sees only the trials' numbers; the sweep's specification gives them meaning. Tune's own state is discarded: the
attempt after a lost one finds the existing jobs, and replays their reports to Tune. The jobs continue meanwhile.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.errors import Cancelled, FailedPrecondition
from shared.jobs import AttemptContext, JobState
from shared.jobs.actor import NOT_BESIDE_A_SERVICE
from shared.resource_log import StaleAttempt
from train_service.domain.sweep import SweepSpec
from train_service.store_retry import retry_on_outage
from train_service.sweeps.sweeps import Trials, best_of

logger = logging.getLogger(__name__)

# Trials stop after their next step. A trial that does not stop is ended by its own attempt soon after.
ENDED_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 1.0
# Nodes come and go, and restarting a follower costs the start of a process. A follower that always fails ends the
# attempt.
FOLLOWER_RESTARTS = 100
# In bytes. A follower requests no CPU, because the trainings need them, but Ray requires a bundle with some resource.
MEMORY_OF_FOLLOWER = 1


def run(context: AttemptContext) -> dict[str, Any]:
    """Run an attempt at a sweep.

    This is the entry function of a durable job of kind `sweep`. Return the best trial and its checkpoint.
    """
    trials = Trials(context.store, context.job)
    try:
        retry_on_outage(trials.stop_marked, "trials that were stopped")
        _search(context, trials)
        _await_ends(context, trials)
    except (Cancelled, StaleAttempt):
        _end(context, trials)
        raise
    return _result(trials)


def _search(context: AttemptContext, trials: Trials) -> None:
    """Run Tune until every trial is done. Jobs may still be ending."""
    # Tune reads these when it starts. They turn off its result files, which are not needed.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"
    # Imported here, because the import takes seconds and a reconciler imports the neighbouring modules.
    from ray import tune
    from ray.tune.registry import TRAINABLE_CLASS, _global_registry
    from ray.tune.search import BasicVariantGenerator

    from train_service.sweeps.tune_bridge import EPOCHS, TRIAL, VALUE, Followed, TuneBridge, follow

    spec = trials.spec
    followed = [
        Followed(
            context.store.settings,
            trials.name(number),
            trials.uid(number),
            *_metric(spec),
            by_reports=spec.base.program is not None,
        )
        for number in trials.numbers
    ]

    def trainable(config: dict[str, Any]) -> None:
        follow(followed[config[TRIAL]], lambda epochs, value: tune.report({EPOCHS: epochs, VALUE: value}))

    # Tune registers the function by the Ray job, which all attempts share, and by this name.
    trainable.__name__ = f"follow-{context.job.uid}-{context.attempt}"
    bundles = tune.PlacementGroupFactory(
        [{"memory": MEMORY_OF_FOLLOWER}], bundle_label_selector=[dict(NOT_BESIDE_A_SERVICE)]
    )
    with tempfile.TemporaryDirectory(prefix="millrace-sweep-") as folder:
        tuner = tune.Tuner(
            tune.with_resources(trainable, bundles),
            param_space={TRIAL: tune.grid_search(list(trials.numbers))},
            tune_config=tune.TuneConfig(
                metric=VALUE,
                mode="max" if spec.ranking.maximize else "min",
                search_alg=BasicVariantGenerator(max_concurrent=spec.max_concurrent_trials),
                scheduler=_scheduler(spec),
            ),
            run_config=tune.RunConfig(
                name=context.job.uid,
                storage_path=folder,
                verbose=0,
                callbacks=[TuneBridge(context, trials)],
                # A restarted follower reports again from the beginning. The scheduler has judged these reports and
                # ignores them.
                failure_config=tune.FailureConfig(max_failures=FOLLOWER_RESTARTS),
            ),
        )
        try:
            with _kept_out("wandb"):
                tuner.fit()
        finally:
            # The registration would stay until the head node ends, because Tune removes it only in a driver.
            _global_registry.unregister(TRAINABLE_CLASS, trainable.__name__)  # type: ignore[no-untyped-call]


@contextmanager
def _kept_out(module: str) -> Iterator[None]:
    """Prevent the import of a module in the body.

    A module that is already imported stays.

    Tune imports each library that its users may log to, only to count them. The import of wandb takes a second and
    parses source. In Python 3.11 that fails if another thread parses at the same time, for example to show a traceback:
    SystemError, "AST constructor recursion depth mismatch".
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment] # marks the module as missing
    try:
        yield
    finally:
        del sys.modules[module]


def _metric(spec: SweepSpec) -> tuple[str, bool]:
    return spec.ranking.metric, spec.ranking.maximize


def _scheduler(spec: SweepSpec) -> Any:
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    from train_service.sweeps.tune_bridge import EPOCHS

    asha = spec.asha
    if asha is None:
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    return ASHAScheduler(
        time_attr=EPOCHS,
        grace_period=asha.grace_period,
        reduction_factor=asha.reduction_factor,
        max_t=max(asha.max_t or spec.max_epochs, asha.grace_period),
    )


def _await_ends(context: AttemptContext, trials: Trials) -> None:
    while not _all_over(trials):
        retry_on_outage(lambda: context.raise_if_stopped(fresh=True), "the sweep's state")
        time.sleep(POLL_INTERVAL_S)


def _all_over(trials: Trials) -> bool:
    return retry_on_outage(lambda: all(trials.is_over(number) for number in trials.numbers), "the trials' states")


def _end(context: AttemptContext, trials: Trials) -> None:
    """Cancel the trials of a cancelled or failed sweep. A later attempt's trials are left alone."""
    newest = retry_on_outage(context.newest, "the sweep's state")
    ends = (JobState.CANCELLING, JobState.CANCELLED, JobState.FAILED)
    if newest.state not in ends:
        return
    retry_on_outage(trials.cancel, "the end of the trials")
    give_up_at = time.monotonic() + ENDED_TIMEOUT_S
    while time.monotonic() < give_up_at and retry_on_outage(trials.any_at_work, "the end of the trials"):
        time.sleep(POLL_INTERVAL_S)


def _result(trials: Trials) -> dict[str, Any]:
    """Return the best trial and its checkpoint.

    Raises `FailedPrecondition` if no trial ended well, or none has a checkpoint with the sweep's metric.
    """
    read = retry_on_outage(trials.read, "the trials")
    best = best_of(trials.spec, read)
    if any(trial.ended_well for trial in read) and (best is None or best.best is None):
        raise FailedPrecondition(
            f"no checkpoint of the {len(read)} trials has the metric {trials.spec.ranking.metric!r}: name one that is "
            "measured in validation or at the end of an epoch, e.g. validation_loss",
            reason="METRIC_NOT_MEASURED",
            metadata={"metric": trials.spec.ranking.metric},
        )
    if best is None or best.best is None or not any(trial.ended_well for trial in read):
        failed = next((trial.job for trial in read if trial.job and trial.job.error), None)
        why = f"; {failed.name}: {failed.error['message']}" if failed and failed.error else ""
        raise FailedPrecondition(
            f"none of the {len(read)} trials ended well{why}",
            reason="ALL_TRIALS_FAILED",
            metadata={"resource": failed.name if failed else trials.name(0)},
        )
    return {"best_training_job": best.name, "best_checkpoint": best.best.name}
