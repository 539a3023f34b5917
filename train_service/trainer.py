"""The attempt at a training job: hands the loop to Ray Train and waits.

Ray's own checkpoint manager is bypassed and its retries are off: our registry says what counts, and a lost worker ends
the attempt. The next attempt is a fresh Ray run that resumes from the newest good checkpoint.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.checkpoint.registry import best, latest
from shared.errors import Cancelled, Internal, MillraceError, Unavailable
from shared.jobs import AttemptContext
from shared.log import StaleAttempt
from train_service.domain.spec import TrainingSpec
from train_service.loop import LoopConfig, train_loop

logger = logging.getLogger(__name__)

# Workers that have begun stop after their next step. Those that wait for resources never would.
STOP_WITHIN_S = 20.0


def run(context: AttemptContext) -> dict[str, Any]:
    """Entry function of a durable job of kind `train`. Returns the last and the best checkpoint."""
    spec = TrainingSpec.from_config(context.job.spec["training"])
    config = LoopConfig(
        store=context.store.settings,
        job_name=context.job.name,
        attempt=context.attempt,
        spec=spec,
    )
    with _ends_when_stopped(context):
        _fit(config, context)
    context.raise_if_stopped(fresh=True)
    entries = CheckpointRegistry(context.store, context.job.name).entries()
    last, chosen = latest(entries), best(entries, spec.checkpoints.ranking)
    if last is None or chosen is None or not last.final:
        raise Internal("the workers ended before the last epoch was saved", reason="RUN_INCOMPLETE")
    return {"checkpoint": last.name, "best_checkpoint": chosen.name}


def _fit(config: LoopConfig, context: AttemptContext) -> None:
    spec = config.spec
    use_gpu = ray.cluster_resources().get("GPU", 0) >= spec.num_workers  # type: ignore[no-untyped-call]
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"loop": config},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=spec.num_workers,
            use_gpu=use_gpu,
            resources_per_worker={"CPU": 1, **({"GPU": 1} if use_gpu else {})},
        ),
        run_config=RunConfig(
            name=f"attempt-{config.attempt:05d}",
            storage_path=f"{context.folder}/ray",
            storage_filesystem=context.store.filesystem(),
            failure_config=FailureConfig(max_failures=0),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        context.raise_if_stopped(fresh=True)
        raise _cause(error) from error


def _cause(error: TrainingFailedError) -> MillraceError:
    """The first error of our own that a worker raised, else that a worker was lost."""
    failures = list(getattr(error, "worker_failures", {}).items())
    for _, raised in failures:
        known = _own_error(raised)
        if known is not None:
            return known
    ranks = ", ".join(str(rank) for rank, _ in failures)
    logger.warning("attempt lost: %s", error)
    return Unavailable(
        f"the workers were lost{ranks and f'; first on rank {ranks}'}",
        reason="WORKERS_LOST",
        metadata={"ranks": ranks},
    )


def _own_error(raised: BaseException | None) -> MillraceError | None:
    """Follows causes down to an error of ours; Ray wraps what workers raise."""
    while raised is not None:
        if isinstance(raised, MillraceError):
            return raised
        raised = getattr(raised, "cause", None) or raised.__cause__
    return None


@contextmanager
def _ends_when_stopped(context: AttemptContext) -> Iterator[None]:
    """Ends this process, and with it its workers, should they not stop by themselves when a client or a later attempt
    wishes it: `fit` cannot be interrupted while it waits for resources."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            try:
                context.raise_if_stopped()
            except (Cancelled, StaleAttempt):
                if not done.wait(STOP_WITHIN_S):
                    logger.warning("the workers did not stop within %.0f s; ending the attempt", STOP_WITHIN_S)
                    os._exit(1)
                return

    thread = threading.Thread(target=watch, name="stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
