"""An offline run of Weights & Biases; `wandb sync` takes it to a server, if somebody wants that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.export import Written, job_id, parameters


def export(job: resources_pb2.TrainingJob, points: Sequence[pb.MetricPoint], folder: Path) -> Written:
    """A run `offline-run-…` below `folder/wandb`, of the job's id and uid."""
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
        run.finish(exit_code=0 if job.state == resources_pb2.TrainingJob.STATE_SUCCEEDED else 1)
    return Written(place, len(points), f"wandb sync {place} takes it to a server")
