"""Exports an offline run of Weights & Biases. `wandb sync` can upload it to a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.export import Written, job_id, parameters

Job = resources_pb2.TrainingJob
# Exit codes by state. W&B calls all but 0 failed, and its own library reports 255 for an interrupted process. A run
# that has not ended is neither, but a file without an end would count as crashed.
EXIT_CODES = {Job.STATE_FAILED: 1, Job.STATE_CANCELLED: 255, Job.STATE_DELETING: 255}


def export(job: Job, points: Sequence[pb.MetricPoint], folder: Path) -> Written:
    """Write the job's present state as a run `offline-run-…` below `folder/wandb`, with the job's id and uid.

    A tag names the job's state, unless it is of a later release. W&B's own process, which writes the run, is stopped
    afterwards.
    """
    import wandb

    settings = wandb.Settings(
        mode="offline",
        x_disable_stats=True,
        x_disable_meta=True,
        disable_git=True,
        disable_code=True,
        console="off",
        silent=True,
    )
    run = wandb.init(
        project="millrace",
        name=job_id(job),
        id=job.uid or None,
        dir=str(folder),
        config=parameters(job),
        tags=_tags(job),
        settings=settings,
    )
    try:
        for point in points:
            run.log(
                {**point.values, "epoch": point.epoch, "attempt": point.attempt, "time": point.time.ToSeconds()},
                step=point.step,
            )
        place = str(Path(run.settings.sync_dir))
    finally:
        run.finish(exit_code=EXIT_CODES.get(job.state, 0))
        wandb.teardown()  # waits for the file; `finish` may return before it is written
    return Written(place, len(points), f"wandb sync {place} takes it to a server")


def _tags(job: Job) -> list[str]:
    return [name.removeprefix("STATE_").lower() for name, state in Job.State.items() if state == job.state]
