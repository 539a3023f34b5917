"""All uses of Ray's private parts by a program's worker and its shards, in one place.

Every `ray.train.*` call of a training function goes through one object of the process, a `TrainFnUtils`, which Ray's
own comment names as the place to change these calls. Ours answers `report`, `get_checkpoint` and `get_dataset_shard`.
The context, the barrier and the broadcast, and with them `prepare_model`, `prepare_data_loader` and `get_device`, stay
Ray's own.

Changes in a new release of Ray that may break the hooks, and their symptoms:
- `set_train_fn_utils` moves, or `report` gets another argument: a program's first report raises `TypeError` or
  `ImportError` (`tests/integration/train_service/test_programs.py`).
- `ray.train.get_dataset_shard` takes a `state_dict` of its own: ours shadows it; compare the two.
- `StorageContext` loses `experiment_fs_path` or `storage_filesystem`: NO_UPLOAD and `checkpoint_upload_fn` find no
  folder.
- Ray Train patches `print` elsewhere: the output of a program's `print` is in its log twice.
- A trainer's `fit()` no longer calls `DataParallelTrainer.fit`: a script's run bypasses the job, and its test finds no
  checkpoint (`tests/integration/train_service/test_scripts.py`).
- Ray's controller needs its own actor for more than `get_all_reported_checkpoints`: a script's workers do not start.
- `ASHAScheduler` renames its attributes: a script's Tuner is refused with an `AttributeError`
  (`tests/unit/train_service/program/test_tuning.py`).
- `DataIterator._iter_batches`, which every public way to iterate calls, gets other arguments: a shard's first batch
  raises `TypeError`. `prepare_trainer` of Hugging Face asks for another type than `_IterableFromIterator`
  (`tests/unit/train_service/program/test_shards.py`).
- `prepare_data_loader` returns another wrapper than one with `_dataloader`: the indices of the program's own loaders
  are not counted any more (`tests/unit/train_service/program/test_drawn.py`).
- The frames below Ray's `ThreadRunner` change: only the texts of stacks do.
"""

from __future__ import annotations

import builtins
import copy
import functools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow.fs
import ray
import ray.train
import ray.train.torch
import torch
from ray.data._internal.block_batching.interfaces import FinalizedData
from ray.data.block import _apply_batch_format
from ray.data.iterator import _IterableFromIterator
from ray.runtime_context import RuntimeContext
from ray.train import Checkpoint
from ray.train.v2._internal.data_integration.interfaces import DatasetShardMetadata
from ray.train.v2._internal.execution import collective_impl
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils, set_train_fn_utils
from ray.train.v2._internal.logging.patch_print import _original_print
from ray.train.v2.api import train_fn_utils as train_fn_api
from ray.train.v2.api.context import DistributedTrainContext, LocalTrainContext
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.preemption import PreemptionInfo
from ray.train.v2.api.report_config import CheckpointUploadMode
from ray.train.v2.torch import train_loop_utils

from shared.errors import FailedPrecondition, InvalidArgument
from train_service.domain.capacity import ACCELERATOR
from train_service.program.report_sender import NO_UPLOAD, RankReports
from train_service.program.worker_setup import NodeCopies
from train_service.records.event_log import PREEMPT

# --- Ray Train ---

logger = logging.getLogger(__name__)


class Shards(Protocol):
    """The shards of the job's dataset version for this rank."""

    def get(self, name: str, state_dict: dict[str, Any] | None = None) -> Any: ...


class _Context(DistributedTrainContext):
    """Ray's own context, but with storage in a folder of this rank's node. Ray's storage is on the attempt's node."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool

    def get_storage(self) -> Any:
        storage = copy.copy(get_train_context().get_storage())  # type: ignore[no-untyped-call]
        storage.storage_filesystem = pyarrow.fs.LocalFileSystem()
        storage.storage_fs_path = str(self._spool.parent)
        storage.experiment_dir_name = self._spool.name
        return storage


@dataclass(frozen=True, kw_only=True)
class LocalRank:
    """Position of a rank that is no worker of Ray Train: alone, or among the ranks that torchrun started.

    `datasets` are a script's, which such a rank reads whole. `tees`: its output also goes to its own terminal.
    """

    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    name: str = ""
    datasets: Mapping[str, Any] = field(default_factory=dict)
    tees: bool = False


class _LocalContext(LocalTrainContext):
    def __init__(self, spool: Path, rank: int, world_size: int, local: LocalRank) -> None:
        super().__init__(local.name, world_size, rank, local.local_rank, local.local_world_size, local.node_rank)
        self._spool = spool

    def get_storage(self) -> Any:
        return StorageContext(
            storage_path=str(self._spool.parent),
            experiment_dir_name=self._spool.name,
            storage_filesystem=pyarrow.fs.LocalFileSystem(),
        )


class ProgramTrainFnUtils(DistributedTrainFnUtils):
    """The implementation of a program's `ray.train.*` calls on this rank."""

    def __init__(
        self,
        reports: RankReports,
        copies: NodeCopies,
        spool: Path,
        shards: Callable[[], Shards],
        request: Callable[[], int],
        own_datasets: Collection[str] = (),
    ) -> None:
        """Build the implementation.

        `shards` is called for the first shard that the program requests; `request` returns the attempt's reason to
        stop. `own_datasets` are the names of Ray Datasets that a script gave its trainer; Ray distributes these.
        """
        self._reports = reports
        self._copies = copies
        self._spool = spool
        self._shards = shards
        self._request = request
        self._own_datasets = frozenset(own_datasets)
        # A program that never requests its checkpoint begins again after each loss.
        self.asked_for_checkpoint = False

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
        validation: Any = False,
    ) -> None:
        if validation:
            raise InvalidArgument(
                "ray.train.report got `validation`, and a program has no validation_config; validate in the function"
            )
        mode = checkpoint_upload_mode.value
        folder = upload = None
        if checkpoint is not None and checkpoint_upload_fn is not None:
            name = checkpoint_dir_name or f"checkpoint_{self._reports.number + 1:08d}"
            given, call = checkpoint, checkpoint_upload_fn

            def upload() -> Path:
                return self._in_spool(call(given, name), "your `checkpoint_upload_fn` returned a checkpoint")

            folder = Path(checkpoint.path)
        elif checkpoint is not None:
            folder = self._in_spool(checkpoint, "the checkpoint is") if mode == NO_UPLOAD else local_folder(checkpoint)
        self._reports.report(
            metrics, folder, mode=mode, delete=bool(delete_local_checkpoint_after_upload), upload=upload
        )

    def get_checkpoint(self) -> Checkpoint | None:
        self.asked_for_checkpoint = True
        checkpoint = self._reports.checkpoint
        return Checkpoint.from_directory(str(self._copies.folder_of(checkpoint))) if checkpoint else None

    def get_dataset_shard(self, dataset_info: DatasetShardMetadata) -> Any:
        return self.shard(dataset_info.dataset_name)

    def shard(self, name: str, state_dict: dict[str, Any] | None = None) -> Any:
        if name not in self._own_datasets:
            return self._shards().get(name, state_dict)
        if state_dict is not None:
            raise InvalidArgument(
                f"get_dataset_shard({name!r}) got a state_dict, and the script gives a Ray Dataset of its own under "
                "that name, which has no position; leave one of both out"
            )
        return super().get_dataset_shard(DatasetShardMetadata(name, self.get_context().get_world_rank()))

    def get_context(self) -> DistributedTrainContext:
        return _Context(self._spool)

    def get_preemption_info(self) -> PreemptionInfo | None:
        """Return rank 0's information, because every rank must see the same."""
        leaving = self._request() == PREEMPT
        info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={}) if leaving else None
        found: PreemptionInfo | None = collective_impl.broadcast_from_rank_zero(
            info, caller_method_name="ray.train.get_preemption_info", relaxable=True
        )
        return found

    def get_all_reported_checkpoints(self, *_: Any, **__: Any) -> list[Any]:
        raise FailedPrecondition(
            "ray.train.get_all_reported_checkpoints is not offered to programs yet; ray.train.get_checkpoint gives the "
            "newest, and ListCheckpoints names all",
            reason="NOT_OFFERED",
        )

    def _in_spool(self, checkpoint: Checkpoint, what: str) -> Path:
        folder = local_folder(checkpoint)
        if not folder.resolve().is_relative_to(self._spool.resolve()):
            raise InvalidArgument(
                f"{what} outside of the run's folder: {folder}. Write it below "
                "`ray.train.get_context().get_storage().experiment_fs_path`, or leave the upload to ray.train.report"
            )
        return folder


class LocalProgramTrainFnUtils(ProgramTrainFnUtils):
    """The same calls on a rank that is no worker of Ray Train, with collectives of torch."""

    def __init__(self, rank: int, world_size: int, local: LocalRank, *arguments: Any) -> None:
        """Build the implementation. `arguments` are those of `ProgramTrainFnUtils`."""
        super().__init__(*arguments)
        self._local = _LocalContext(self._spool, rank, world_size, local)
        self._datasets = local.datasets

    def shard(self, name: str, state_dict: dict[str, Any] | None = None) -> Any:
        return self._datasets[name] if name in self._datasets else super().shard(name, state_dict)

    def get_context(self) -> Any:
        return self._local

    def is_distributed(self) -> bool:
        return False

    def barrier(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        shared = [data]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(shared, src=0)
        return shared[0]

    def get_preemption_info(self) -> PreemptionInfo | None:
        return None


def local_folder(checkpoint: Checkpoint) -> Path:
    """Return the folder of the checkpoint's files. Raises `InvalidArgument` unless it is on a local disk."""
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidArgument(f"ray.train.report needs a ray.train.Checkpoint, not {type(checkpoint).__name__}")
    if not isinstance(checkpoint.filesystem, pyarrow.fs.LocalFileSystem):
        raise InvalidArgument(
            f"the checkpoint is at {checkpoint.path} and on no local disk; report one of a local folder, by "
            "Checkpoint.from_directory"
        )
    return Path(checkpoint.path)


def install(utils: ProgramTrainFnUtils, watch: Callable[[Any], Any] = lambda loader: loader) -> None:
    """Let `utils` answer the process's `ray.train.*` calls from here on.

    `watch` gets each DataLoader that Ray's `prepare_data_loader` has prepared. On a worker of Ray's, `ray.init` does
    nothing and `ray.shutdown` is refused. Call this before the program's module is imported, because it may import the
    functions by name.
    """
    set_train_fn_utils(utils)

    def get_dataset_shard(dataset_name: str | None = None, state_dict: dict[str, Any] | None = None) -> Any:
        return utils.shard(dataset_name or "", state_dict)

    prepare = train_loop_utils.prepare_data_loader

    @functools.wraps(prepare)
    def prepare_data_loader(*arguments: Any, **options: Any) -> Any:
        return watch(prepare(*arguments, **options))

    ray.train.torch.prepare_data_loader = prepare_data_loader
    train_loop_utils.prepare_data_loader = prepare_data_loader
    ray.train.get_dataset_shard = get_dataset_shard
    # Ray Train's `print` also sends the text to the root logger, so it would be in the rank's log twice.
    builtins.print = _original_print
    # A function that a script imported by name is pickled by reference to this module.
    train_fn_api.get_dataset_shard = get_dataset_shard
    if utils.is_distributed():
        ray.init = _no_init
        ray.shutdown = _no_shutdown


def install_driver(
    fit: Callable[[DataParallelTrainer], ray.train.Result],
    warn: Callable[[str], None],
    tuner: type | None,
    *,
    may_use_gpus: bool,
) -> None:
    """Patch Ray in the process of a script, which is connected to Ray.

    Every trainer's `fit()` calls `fit`. `ray.init` and `ray.shutdown` do nothing. `tuner` replaces Ray Tune's, if it is
    given. Unless the script may use GPUs, its tasks and actors request none, whatever `ray.remote` says. Call this
    before the script begins.
    """

    def fit_by_attempt(trainer: DataParallelTrainer) -> ray.train.Result:
        return fit(trainer)

    DataParallelTrainer.fit = fit_by_attempt  # type: ignore[method-assign, assignment]
    # Ray passes workers the actor of its controller, to ask it for reported checkpoints. Here the controller is no
    # actor, and `ProgramTrainFnUtils` answers instead.
    RuntimeContext.current_actor = None  # type: ignore[method-assign, assignment]

    def no_init(*_: Any, **__: Any) -> Any:
        warn("ray.init() does nothing: the script is connected to the job's cluster already")
        return ray.get_runtime_context()

    def no_shutdown(*_: Any, **__: Any) -> None:
        logger.info("ray.shutdown() does nothing: the script leaves the cluster when it ends")

    ray.init = no_init
    ray.shutdown = no_shutdown
    if tuner is not None:
        from ray import tune  # the import takes seconds

        tune.Tuner = tuner  # type: ignore[misc, assignment]
        tune.tuner.Tuner = tuner  # type: ignore[misc, assignment]
    if may_use_gpus:
        return
    remote = ray.remote

    def remote_without_gpus(*arguments: Any, **options: Any) -> Any:
        kept = without_gpus(options)
        if kept == options:
            return remote(*arguments, **options)
        warn(f"ray.remote({_as_arguments(options)}) is ray.remote({_as_arguments(kept)}): the job has no GPUs")
        return remote(*arguments, **kept) if arguments or kept else remote

    ray.remote = remote_without_gpus


def asha_facts(scheduler: Any) -> dict[str, Any]:
    """Return the arguments of an `ASHAScheduler`, which keeps them only in private attributes."""
    rungs = scheduler._brackets[0]._rungs
    return {
        "time_attr": scheduler._time_attr,
        "metric": scheduler._metric,
        "mode": scheduler._mode,
        "brackets": len(scheduler._brackets),
        "max_t": int(scheduler._max_t),
        # The first rung of the first bracket is at the grace period.
        "grace_period": int(min(milestone for milestone, _ in rungs)) if rungs else 1,
        "reduction_factor": float(scheduler._reduction_factor),
    }


def without_gpus(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `ray.remote` without those that need a node with GPUs."""
    # Ray Data asks for 0 GPUs of its own accord.
    needy = ("accelerator_type",) if options.get("num_gpus") == 0 else ("accelerator_type", "num_gpus")
    kept = {name: value for name, value in options.items() if name not in needy}
    if resources := kept.pop("resources", None):
        others = {name: amount for name, amount in resources.items() if not name.startswith(ACCELERATOR)}
        kept.update({"resources": others} if others else {})
    return kept


def _as_arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _no_init(*_: Any, **__: Any) -> Any:
    logger.warning("ray.init() in a training function does nothing: its worker is connected already")
    return ray.get_runtime_context()


def _no_shutdown(*_: Any, **__: Any) -> None:
    raise FailedPrecondition(
        "ray.shutdown() in a training function would end its worker; leave it out", reason="RAY_SHUTDOWN"
    )


# --- Ray Data ---

IterableFromIterator = _IterableFromIterator


def default_format(batch_format: str | None) -> str | None:
    """Return `numpy` for `default`. Raises `ValueError` for a format that Ray does not know."""
    found: str | None = _apply_batch_format(batch_format)
    return found


def unwrap_finalized(batch: Any) -> Any:
    """Return the batch of Ray's finalizing function, whose transfer to the device has ended."""
    if not isinstance(batch, FinalizedData):
        return batch
    if batch.on_consume is not None:
        batch.on_consume()
    return batch.data
