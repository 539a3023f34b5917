"""One run of Ray Train, driven from the attempt's own process.

Ray Train starts its controller as an actor, with a cleaner and a preemption watcher for it, a process each. Here the
controller is an object in the attempt's process. Its resources end with that process, which is a detached actor, so
nothing is left to clean. Only a script's run has the process that Ray Train starts for datasets. Ray's release is
pinned; `tests/integration/train_service` would notice a change.

A `Failure` describes in plain values why a run failed: first what the run's process knows, then what the attempt
concludes from it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.train import DataConfig, Result, TrainingFailedError
from ray.train.torch import TorchConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.working_dir_setup import WorkingDirectorySetupCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.torch.torch_trainer import TorchTrainer

from shared.errors import MillraceError, Unavailable, error_from_record
from shared.jobs.transitions import INSUFFICIENT_RESOURCES, RESIZED
from shared.jobs.warm_workers import WarmWorkers
from train_service.domain.capacity import ACCELERATOR
from train_service.domain.spec import Placement
from train_service.placement import Size, selector
from train_service.program.worker import ProgramConfig, work_on_program
from train_service.program.worker_setup import HIDDEN_VARIABLES
from train_service.worker.loop import LoopConfig, train_loop_per_worker

# --- Run ---

logger = logging.getLogger(__name__)

# Modules that a worker imports before its first step. The first optimizer imports torch._dynamo, whether it compiles or
# not.
WARM_WORKERS = WarmWorkers(("train_service.worker.loop", "torchvision", "torch._dynamo"))
# How often the controller polls its workers. Ray's own interval of 2 s is a tenth of a restart.
POLL_EVERY_S = 0.25
# The capacity was free a moment ago, so another job that has taken it keeps it for longer than this.
CAPACITY_TIMEOUT_S = 20.0
# Settings for this process alone: no processes beside the workers, a limit on how long the workers may take to leave
# their process group, and no advice about blocking calls.
OF_THE_ATTEMPT = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
NOT_NEEDED = (PlacementGroupCleanerCallback, WorkingDirectorySetupCallback)


class RayRun(TorchTrainer):
    """A run of Ray Train whose `fit` blocks until the workers have ended.

    `fit` raises `TrainingFailedError` if a worker was lost or raised an error.
    """

    # Ray's own `fit`, although a script's trainers may have a replaced one (`ray_hooks.install_driver`).
    fit = DataParallelTrainer.fit

    def __init__(
        self,
        config: LoopConfig | ProgramConfig,
        size: Size,
        *,
        name: str = "",
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
    ) -> None:
        """Create a run. `name`, `datasets` and `dataset_config` come from a script's trainer."""
        os.environ.update(OF_THE_ATTEMPT)
        placement = config.spec.placement
        # Only a script gives Ray datasets of its own.
        self._not_needed = NOT_NEEDED if datasets is not None else (*NOT_NEEDED, DatasetsCallback)
        # Ray requires a folder for its own notes. Millrace's records are in the store, which Ray need not know.
        self._folder = Path(tempfile.mkdtemp(prefix="millrace-ray-train-"))
        super().__init__(
            work_on_program if isinstance(config, ProgramConfig) else train_loop_per_worker,
            train_loop_config={"loop": config},
            torch_config=TorchConfig(backend=backend_of(placement, size), timeout_s=round(placement.timeout_s)),
            scaling_config=ScalingConfig(
                num_workers=size.workers,
                use_gpu=size.use_gpu,
                resources_per_worker={
                    name: amount for name, amount in size.bundle.items() if not name.startswith(ACCELERATOR)
                },
                accelerator_type=placement.accelerator_type or None,
                placement_strategy=placement.strategy,
                label_selector=selector(),
            ),
            run_config=RunConfig(
                name=name or f"{config.job_name.rpartition('/')[2]}-attempt-{config.attempt:05d}",
                storage_path=str(self._folder),
                worker_runtime_env=environment_of_workers(config),
                # Both kinds of failure end the attempt. By default Ray would try to start its workers for ever.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            ),
            datasets=dict(datasets or {}),
            dataset_config=dataset_config,
        )

    def _create_default_callbacks(self) -> list[Any]:
        made = super()._create_default_callbacks()
        return [callback for callback in made if not isinstance(callback, self._not_needed)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        controller = TrainController(**arguments)
        controller._health_check_interval_s = POLL_EVERY_S
        controller.worker_group_cls = _Group
        try:
            asyncio.run(controller.run())  # type: ignore[no-untyped-call]
            return controller.get_result()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


class _Group(WorkerGroup):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._worker_group_start_timeout_s = CAPACITY_TIMEOUT_S

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
        """Return the environment unchanged.

        Ray would add variables of this process, but workers take a waiting process only if both have exactly the same
        environment.
        """
        return custom_runtime_env


def environment_of_workers(config: LoopConfig | ProgramConfig) -> dict[str, Any] | None:
    """Return Ray's runtime environment of the workers.

    Workers take only a process that was started for exactly the same environment.
    """
    if isinstance(config, ProgramConfig):
        # So they never take a process that has worked for another job and may still hold a key of the store in its
        # memory.
        return {"env_vars": dict.fromkeys(HIDDEN_VARIABLES, "")}
    # With this environment they take warm processes. For the first attempt there are only Ray's own.
    return WARM_WORKERS.runtime_env if config.attempt > 1 else None


def capacity_was_taken(error: BaseException | None) -> bool:
    """Return whether taken capacity kept workers from starting."""
    while error is not None:
        if isinstance(error, WorkerGroupStartupTimeoutError):
            return True
        error = getattr(error, "controller_failure", None) or error.__cause__
    return False


def backend_of(placement: Placement, size: Size) -> str:
    """Return nccl if each worker has its own GPU. Otherwise return gloo. nccl refuses two ranks on one GPU."""
    return placement.backend or ("nccl" if size.bundle.get("GPU", 0.0) >= 1 else "gloo")


# --- Failures ---


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a run.

    `own` is the record of the first Millrace error that a worker raised. `ranks` lists the failed ranks, separated by
    commas.
    """

    own: dict[str, Any] | None
    ranks: str
    lacks_resources: bool
    text: str

    @classmethod
    def from_error(cls, error: TrainingFailedError) -> Failure:
        failures = list(getattr(error, "worker_failures", {}).items())
        known = next((own for _, raised in failures if (own := _own_error(raised)) is not None), None)
        return cls(
            own=known.as_record() if known is not None else None,
            ranks=",".join(str(rank) for rank, _ in failures),
            lacks_resources=capacity_was_taken(error),
            text=str(error),
        )

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Failure:
        return cls(
            own=message["own"], ranks=message["ranks"], lacks_resources=message["lacks_resources"], text=message["text"]
        )

    def cause(self, ended_for: MillraceError | None) -> MillraceError:
        """Return the cause of the failure.

        A worker's error counts first, then the reason for which the attempt ended the run, then the loss of the
        workers. A resize ends no worker, so a worker that is lost before it has stopped by itself is a failure.
        """
        if self.own is not None:
            return error_from_record(self.own)
        if ended_for is not None and ended_for.specific_reason != RESIZED:
            return ended_for
        if self.lacks_resources:
            return Unavailable("room was taken while the workers started", reason=INSUFFICIENT_RESOURCES)
        logger.warning("attempt lost: %s", self.text)
        return Unavailable(
            f"the workers were lost{self.ranks and f'; first on rank {self.ranks}'}",
            reason="WORKERS_LOST",
            metadata={"ranks": self.ranks},
        )


def _own_error(raised: BaseException | None) -> MillraceError | None:
    """Return the Millrace error in the chain of causes. Ray wraps the errors that workers raise."""
    while raised is not None:
        if isinstance(raised, MillraceError):
            return raised
        raised = getattr(raised, "cause", None) or raised.__cause__
    return None
