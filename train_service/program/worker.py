"""A worker of a program: Ray Train runs the user's function on it, with Millrace behind `ray.train`.

The worker is a real one of Ray Train's, with its process group. Before the program's module is imported, `report`,
`get_checkpoint` and `get_dataset_shard` are bound to Millrace (`ray_hooks`), and the process gets its own folder,
seeds, and captured output (`process`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import inspect
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray import cloudpickle
from ray.train import Checkpoint
from torch.utils.data import DataLoader, IterableDataset

from shared.checkpoint.registry import data_folder_of
from shared.code_environment import use_environment
from shared.code_packing import requirements_of_folder
from shared.errors import FailedPrecondition, Internal, MillraceError, first_line
from shared.logging_and_tracing import configure_logging, identity
from shared.resource_log import StaleAttempt
from train_service.domain.coverage_counts import (
    MAX_LOADERS,
    MAX_PASSES,
    MAX_PASSES_A_REPORT,
    MAX_ROWS,
    NONE,
    PREFIX,
    Flags,
    Record,
    decode,
    encode,
)
from train_service.domain.spec import Program, TrainingSpec
from train_service.domain.watchdog import Phase
from train_service.program.ray_hooks import LocalProgramTrainFnUtils, LocalRank, ProgramTrainFnUtils, install
from train_service.program.report_sender import Begin, ProgramStopped, RankReports, files_of
from train_service.program.signing import RankStore, Versions, open_rank_store
from train_service.program.worker_setup import (
    AttemptFolder,
    NodeCopies,
    OptimizerSteps,
    drop_hidden_variables,
    line_of,
    seed_everything,
)
from train_service.records.logs import LogShipper
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import FAILING, HeartbeatSender, lost_others
from train_service.worker.user_process import MemoryLimit, MemoryWatch, NodeMemory, captured_output, exits_announced

if TYPE_CHECKING:
    from train_service.program.shards import ProgramShards


# --- Worker ---

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """Config of a program's workers. It holds plain values, because it is sent to them."""

    # The only store setting: a worker holds no key, see `rank_store`.
    store_url: str
    job_name: str
    attempt: int
    spec: TrainingSpec
    # Where ranks send heartbeats to the attempt, see `HeartbeatSender`.
    heartbeat: str
    # For a script: its training function and the function's config, pickled in the script's process. Empty: the
    # entry's.
    function: bytes = b""
    # For a script: the names of the Ray Datasets that it gave its trainer.
    own_datasets: tuple[str, ...] = ()
    # For a script: the first log chunk of this run, after those of the attempt's earlier runs.
    first_log_chunk: int = 0

    @property
    def program(self) -> Program:
        assert self.spec.program is not None
        return self.spec.program


def work_on_program(config: dict[str, Any]) -> None:
    """Run a worker of Ray Train. `config["loop"]` is the attempt's `ProgramConfig`."""
    program: ProgramConfig = config["loop"]
    context = ray.train.get_context()
    configure_logging("train-worker", "INFO")
    drop_hidden_variables()
    node_id = ray.get_runtime_context().get_node_id()
    rank, beside = context.get_world_rank(), context.get_local_world_size()
    run_program(program, rank, context.get_world_size(), node_id, ranks_of_node=beside)


def run_program(
    config: ProgramConfig,
    rank: int,
    world_size: int,
    node_id: str,
    local: LocalRank | None = None,
    ranks_of_node: int = 1,
    end_process: Callable[[MillraceError], None] | None = None,
) -> None:
    """Run the whole life of one rank.

    Return once the function has returned and all its reports are committed, or once it was stopped at a report. Raises
    `Internal` for an error of the function. `local`: the rank is no worker of Ray Train, and passes `KeyboardInterrupt`
    through. `ranks_of_node` is the number of ranks on this node, which share its memory. A process that is also the
    attempt has `end_process` called if its memory is full.
    """
    torch.set_num_threads(config.spec.threads_per_worker)
    with contextlib.ExitStack() as stack:
        stack.enter_context(identity(job=config.job_name, attempt=str(config.attempt), rank=str(rank)))
        # Entered first and so left last: the end of the log is stored through URLs that the attempt signs.
        heartbeat = stack.enter_context(HeartbeatSender(rank, config.heartbeat, node_id))
        store, versions = open_rank_store(config.store_url, heartbeat)
        first, tees = config.first_log_chunk, local is not None and local.tees
        shipper = LogShipper(store, config.job_name, config.attempt, rank, tees=tees, first_chunk=first)
        stack.enter_context(shipper)
        if not tees:
            stack.enter_context(captured_output(shipper.add_lines))
        folder = stack.enter_context(AttemptFolder(config.store_url, config.job_name, config.attempt, rank).entered())
        try:
            request = config.spec.placement.resources_per_worker.get("memory", 0.0)
            beside = local.local_world_size if local is not None else ranks_of_node
            limit = MemoryLimit.for_rank(request, beside, NodeMemory.read())

            def leave(error: MillraceError) -> None:
                """End this process at once, before it can allocate more."""
                with contextlib.suppress(TimeoutError, ConnectionError):  # then the attempt sees the process end
                    heartbeat.ask({"kind": FAILING, "error": error.as_record()}, timeout_s=5.0)
                shipper.end(5.0)
                if end_process is not None:
                    end_process(error)
                os.kill(os.getpid(), signal.SIGKILL)

            digest = config.program.code_bundle.rpartition("/")[2]
            with MemoryWatch(rank, limit, leave, folder.code / digest):
                _Rank(config, rank, world_size, store, versions, heartbeat, folder, local).run()
        except MillraceError as error:
            # Ray may first learn of another rank's end that only follows from this one.
            with contextlib.suppress(TimeoutError, ConnectionError):  # then Ray reports it
                heartbeat.ask({"kind": FAILING, "error": error.as_record()}, timeout_s=5.0)
            raise


def code_paths(code: Path, program: Program) -> list[str]:
    """Return the import paths of a program: the top of its bundle, and the folder of its script."""
    beside = (code / program.entry).parent if program.is_script else code
    return list(dict.fromkeys([str(beside), str(code)]))


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty and parameter.kind not in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )


class _Rank:
    def __init__(
        self,
        config: ProgramConfig,
        rank: int,
        world_size: int,
        store: RankStore,
        versions: Versions,
        heartbeat: HeartbeatSender,
        folder: AttemptFolder,
        local: LocalRank | None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._versions = versions
        self._heartbeat = heartbeat
        self._folder = folder
        self._local = local
        self._shards: ProgramShards | None = None

    def run(self) -> None:
        config, heartbeat = self._config, self._heartbeat
        begin = Begin.ask(heartbeat)
        seed_everything(config.spec.seed, begin.report, self._rank)
        steps = OptimizerSteps(begin.optimizer_steps, self._stepped)
        drawn = DrawnIndices(begin.indices)
        reports = RankReports(
            self._store,
            heartbeat,
            self._rank,
            data_folder_of(config.job_name),
            config.attempt,
            begin,
            self._folder.run,
            take_shards=self._take_shards,
            take_indices=drawn.take,
            optimizer_steps=lambda: steps.count,
        )
        copies = NodeCopies(self._store, self._folder.checkpoints, heartbeat.note_progress)
        of_rank = (
            reports,
            copies,
            self._folder.run,
            lambda: self._open_shards(begin),
            lambda: heartbeat.request,
            config.own_datasets,
        )
        if self._local is None:
            install(ProgramTrainFnUtils(*of_rank), drawn.watch)
        else:
            utils = LocalProgramTrainFnUtils(self._rank, self._world_size, self._local, *of_rank)
            install(utils, drawn.watch)
        install_hugging_face(self._folder.path / "outputs")
        code = self._unpack()
        use_environment(requirements_of_folder(code), os.environ, heartbeat.note_progress)
        sys.path += code_paths(code, config.program)
        sys.dont_write_bytecode = True
        heartbeat.at(begin.optimizer_steps, Phase.STARTING)
        try:
            with exits_announced(lambda status, where: self._announce_exit(status, where, code)):
                self._call(code)
                reports.finish()
            heartbeat.ask({"kind": "returned"})
        except (Exception, SystemExit, KeyboardInterrupt, ProgramStopped) as error:
            if self._local is not None and isinstance(error, KeyboardInterrupt):
                raise
            # An error that the function raised after a stop or a failed report only follows from it.
            first = reports.ended or error
            if not isinstance(first, ProgramStopped):
                named = self._as_reported(first, code, reports.number)
                raise named from (first if named is not first else None)
            if error is not first:
                logger.warning("the training function raised after it was stopped", exc_info=error)
            logger.info("%s", first)
            heartbeat.ask({"kind": "stopped"})
        finally:
            reports.close()
            steps.remove()

    def _call(self, code: Path) -> None:
        program = self._config.program
        if self._config.function:
            pickled, settings = cloudpickle.loads(self._config.function)
            # As in Ray, parameters with defaults keep them.
            takes = [
                parameter for parameter in inspect.signature(pickled).parameters.values() if _is_required(parameter)
            ]
            pickled(settings) if takes else pickled()
            return
        module_name, _, name = program.entry.partition(":")
        module = importlib.import_module(module_name)
        if not str(getattr(module, "__file__", "")).startswith(str(code)):
            raise FailedPrecondition(
                f"{module_name} is {module.__file__}, and not of the bundle: a module of that name is installed; "
                "rename the bundle's",
                reason="MODULE_SHADOWED",
            )
        function: Any = module
        for part in name.split("."):
            function = getattr(function, part)
        if inspect.signature(function).parameters:
            function(json.loads(program.config_json or "{}"))
        else:
            function()

    def _stepped(self, count: int) -> None:
        self._heartbeat.at(count, Phase.TRAINING)

    def _unpack(self) -> Path:
        from shared.code_bundle_registry import unpack_on_node

        digest = self._config.program.code_bundle.rpartition("/")[2]
        return retry_on_outage(lambda: unpack_on_node(self._store, digest, self._folder.code), "the code bundle")

    def _open_shards(self, begin: Begin) -> ProgramShards:
        """Open the shards once, on demand: a program that reads its own data need not import ray.data."""
        if self._shards is None:
            from train_service.program.shards import ProgramShards  # the import takes seconds

            self._shards = ProgramShards(
                self._store,
                self._config.spec,
                self._rank,
                self._world_size,
                begin.positions,
                self._heartbeat.note_progress,
                self._versions,
            )
        return self._shards

    def _take_shards(self) -> dict[str, Any]:
        return self._shards.take() if self._shards is not None else {}

    def _announce_exit(self, status: int, where: str, code: Path) -> None:
        error = Internal(
            f"os._exit({status}) on rank {self._rank} at {where.removeprefix(f'{code}/')}: the process ended before "
            "the training function returned",
            reason="PROGRAM_EXITED",
            metadata={"ranks": str(self._rank)},
        )
        self._heartbeat.ask({"kind": FAILING, "error": error.as_record()}, timeout_s=5.0)

    def _as_reported(self, error: BaseException, code: Path, report: int) -> BaseException:
        """Return `error` as one of ours that names its type, the rank, and its line in the program."""
        if isinstance(error, StaleAttempt) or (isinstance(error, Exception) and lost_others(error)):
            return error
        where = line_of(error, code)
        at = f" at {where}" if where else ""
        metadata = {"ranks": str(self._rank), "report": str(report), "line": where}
        if isinstance(error, MillraceError):
            if where and where not in error.message:
                error.message = f"{error.message} (rank {self._rank}{at})"
                error.metadata.setdefault("line", where)
            error.metadata.setdefault("ranks", str(self._rank))
            return error
        logger.error("the training function raised", exc_info=error)
        if isinstance(error, SystemExit):
            text = f"sys.exit({error.code!r}) on rank {self._rank}{at}: the training function must return"
            return Internal(text, reason="PROGRAM_EXITED", metadata=metadata)
        kind = type(error).__name__
        return Internal(
            f"{kind} on rank {self._rank}{at} after report {report}: {first_line(error)}",
            reason="WORKER_RAISED",
            metadata={**metadata, "exception": kind},
        )


# --- Drawn indices ---
# A worker counts the indices that its prepared DataLoaders gave to the program.
#
# A DataLoader asks its batch sampler ahead of time, and Ray's wrapper has the next batch on its way to the device. So
# the drawn batches wait here in their order until the program gets them.

END = object()


class DrawnIndices:
    """The indices that all loaders of a rank gave since the last report. Threads may take turns."""

    def __init__(self, begin: Mapping[str, Record] | None = None) -> None:
        """`begin` has the number of passes that were done, by loader, at the checkpoint that the run resumes from."""
        self._begin = dict(begin or {})
        self._loaders: list[LoaderRecord] = []

    def watch(self, loader: Any) -> Any:
        """Count the indices that a prepared loader gives. Return the loader.

        One whose sampler draws no indices, or too many to keep, is not counted.
        """
        base = getattr(loader, "_dataloader", loader)
        rows = _row_count(base)
        if rows is None or len(self._loaders) >= MAX_LOADERS:
            return loader
        name = f"{PREFIX}{len(self._loaders)}"
        record = LoaderRecord(name, rows, int(self._begin.get(name, {}).get("done", 0)))
        self._loaders.append(record)
        drawn = _DrawnBatches(base.batch_sampler, record)
        # DataLoader forbids the attribute's change, since its other attributes would not follow. These do not depend
        # on which object draws the same batches.
        for one in {id(base): base, id(loader): loader}.values():
            object.__setattr__(one, "batch_sampler", drawn)
        if hasattr(base.sampler, "set_epoch"):
            _follow_epochs(base.sampler, record)
        loader._millrace_record = record
        loader.__class__ = _counting(type(loader))
        return loader

    def take(self) -> dict[str, Record]:
        """Return the records since the last call."""
        return {loader.name: said for loader in self._loaders if (said := loader.take()) is not None}


class LoaderRecord:
    def __init__(self, name: str, row_count: int, done: int) -> None:
        self.name = name
        self._row_count = row_count
        # Passes that this rank has ended, the earlier attempts' included.
        self._done = done
        self._reported_done = done
        self._next = done
        self._set: int | None = None
        self._pass = done
        self._drawn: deque[Sequence[int]] = deque()
        # Whether the sampler has drawn the last batch of the pass.
        self._exhausted = False
        # The sets of the passes since the last report, as a report has them, and the flags of the pass that goes on.
        self._passes: dict[int, list[str]] = {}
        self._current: tuple[int, Flags, Flags] | None = None
        # No report can have the passes that follow.
        self._stopped = False
        self._lock = threading.Lock()

    def set_epoch(self, epoch: int) -> None:
        """The sampler's next pass has this number."""
        self._set = epoch

    def begin(self) -> None:
        """The sampler begins a pass."""
        with self._lock:
            number = self._set if self._set is not None and self._set >= 0 else self._next
            if number >= MAX_PASSES:
                self._stop(f"pass {number} has a number of {MAX_PASSES} or more")
            if self._stopped:
                return
            self._encode_current()
            self._pass = number
            self._set, self._next = None, self._pass + 1
            # The program has left the passes before, whether or not it took all of their batches.
            self._done = max(self._done, self._pass)
            self._drawn.clear()
            self._exhausted = False

    def drew(self, batch: Sequence[int]) -> None:
        if not self._stopped:
            self._drawn.append(batch)

    def exhaust(self) -> None:
        """The sampler has drawn the last batch of its pass."""
        with self._lock:
            self._exhausted = True

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. Each one's indices count when the program gets it."""
        # Ray's wrapper is its own iterator, and a `for` would ask it for a counted one again.
        while (batch := next(batches, END)) is not END:
            self._give()
            yield batch
        with self._lock:
            if not self._stopped:
                self._done = max(self._done, self._pass + 1)
                self._encode_current()

    def take(self) -> Record | None:
        with self._lock:
            self._encode_current()
            passes, self._passes = self._passes, {}
            if not passes and self._done == self._reported_done:
                return None
            self._reported_done = self._done
            sets = {str(number): texts for number, texts in passes.items()}
            return {"row_count": self._row_count, "done": self._done, "passes": sets}

    def _give(self) -> None:
        with self._lock:
            if not self._drawn:
                return  # the loader draws by other means than its batch sampler
            indices = np.asarray(self._drawn.popleft(), np.int64).reshape(-1)
            if self._current is None or self._current[0] != self._pass:
                self._encode_current()
                if self._pass not in self._passes and len(self._passes) >= MAX_PASSES_A_REPORT:
                    self._stop(f"it had {MAX_PASSES_A_REPORT} passes without a report")
                    return
                texts = self._passes.pop(self._pass, [NONE, NONE])
                self._current = (self._pass, decode(texts[0], self._row_count), decode(texts[1], self._row_count))
            _, seen, again = self._current
            valid = indices[(indices >= 0) & (indices < self._row_count)]
            found, times = np.unique(valid, return_counts=True)
            again[found] |= seen[found] | (times > 1)
            seen[found] = True
            # The program may report within its last step, before it asks for a batch after the last one.
            if self._exhausted and not self._drawn:
                self._done = max(self._done, self._pass + 1)

    def _encode_current(self) -> None:
        if self._current is not None:
            number, seen, again = self._current
            self._passes[number], self._current = [encode(seen), encode(again)], None

    def _stop(self, why: str) -> None:
        """Count no further pass: the coordinator would refuse the report, and the training goes on without it."""
        if not self._stopped:
            self._stopped = True
            self._drawn.clear()
            logger.warning("%s is not counted any more: %s", self.name, why)


class _DrawnBatches:
    """A batch sampler that records what another one draws."""

    def __init__(self, batches: Any, record: LoaderRecord) -> None:
        self._batches = batches
        self._record = record

    def __iter__(self) -> Iterator[Any]:
        self._record.begin()
        for batch in self._batches:
            self._record.drew(batch)
            yield batch
        self._record.exhaust()

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)


def _counting(kind: type) -> type:
    class Counting(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            batches = super().__iter__()
            counted: Iterator[Any] = self._millrace_record.counted(batches)
            return counted

    Counting.__name__, Counting.__qualname__ = kind.__name__, kind.__qualname__
    return Counting


def _follow_epochs(sampler: Any, record: LoaderRecord) -> None:
    inner = sampler.set_epoch

    def set_epoch(epoch: int) -> None:
        inner(epoch)
        record.set_epoch(int(epoch))

    sampler.set_epoch = set_epoch


def _row_count(base: Any) -> int | None:
    """Return the rows of the loader's dataset, or None if its sampler draws no indices that can be counted."""
    if not isinstance(base, DataLoader) or base.batch_sampler is None or isinstance(base.dataset, IterableDataset):
        return None
    try:
        rows = len(base.dataset)  # type: ignore[arg-type]
    except TypeError:
        return None
    if not 1 <= rows <= MAX_ROWS:
        logger.info("a DataLoader of %d rows is not counted: its indices would take too much memory", rows)
        return None
    return rows


# --- Hooks of Hugging Face ---
# Hooks that keep the checkpoints of `transformers.Trainer` correct in a program: all uses of its private parts.
#
# Without them, the Trainer and Ray's `RayTrainReportCallback` go wrong in four ways:
# - **Ranks apart.** On CPUs the Trainer joins the process group only with `use_cpu=True`. Without it every rank trains
#   its own model, and only one line of its log says so. Here `use_cpu` is set on workers without an accelerator.
# - **Half a checkpoint.** A rank's save ends when its own files are written, and the callback copies the whole folder,
#   so a rank may copy files that another still writes. Here every save ends once it has ended on all ranks.
# - **A stale checkpoint.** `output_dir` outlives a killed attempt on the same node, and the callback takes the folder
#   of the highest step, which after a resume is that of the lost attempt. Another job on the node may write into the
#   same folder, too. Here a scratch folder belongs to the attempt, and the callback takes the folder of the step that
#   was just saved, and checks `trainer_state.json` against it.
# - **The same files from every rank.** Each rank of a node copies and uploads the whole folder. Here a rank reports
#   only files that no lower rank has.
#
# The hooks import neither `transformers` nor Ray's callback: both are changed after the program has imported them.
#
# Changes in a new release that may break the hooks, and their symptoms
# (`tests/integration/train_service/test_hugging_face.py`):
# - `Trainer._save_checkpoint` is renamed: `AttributeError` when the program imports `transformers`.
# - `TrainingArguments` is no longer a dataclass with a `__post_init__`: the same.
# - The Trainer names its folders differently: each report raises CHECKPOINT_NOT_FOUND.
# - Ray's callback is moved: it is not changed, and checkpoints come from all ranks again.

ARGUMENTS = "transformers.training_args"
TRAINER = "transformers.trainer"
CALLBACK = "ray.train.huggingface.transformers._transformers_utils"
STATE = "trainer_state.json"
# Where a node keeps temporary files.
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")


def install_hugging_face(outputs: Path) -> None:
    """Install the hooks. Call it before the program's module is imported.

    `outputs` is a folder of the attempt's ranks on this node, which takes the place of scratch folders.
    """
    patches: dict[str, Callable[[ModuleType], None]] = {
        ARGUMENTS: lambda module: _fit_arguments(module.TrainingArguments, outputs),
        TRAINER: lambda module: end_saves_together(module.Trainer),
        CALLBACK: lambda module: _report_saved_step(module.RayTrainReportCallback),
    }
    for name in [patch for patch in patches if patch in sys.modules]:
        patches.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _PatchOnImport(patches))


class _PatchOnImport(MetaPathFinder):
    """Finder that changes each of these modules once, right after its import. It leaves all other modules alone."""

    def __init__(self, patches: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._patches = dict(patches)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.pop(name, None)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return None
        execute, changed = spec.loader.exec_module, patch

        def exec_module(module: ModuleType) -> None:
            execute(module)
            changed(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def own_output_dir(output_dir: str, outputs: Path) -> str:
    """Return `output_dir`, or a folder below `outputs` if it is relative or on a node's scratch disk.

    There it would outlive the attempt, or be shared with another job.
    """
    path = Path(os.path.abspath(output_dir))  # noqa: PTH100  # links stay as they are
    scratch = not Path(output_dir).is_absolute() or any(path.is_relative_to(one) for one in SCRATCH)
    # The attempt's folder, which holds TMPDIR, already belongs to the attempt.
    if not scratch or path.is_relative_to(outputs.parent):
        return output_dir
    return str(outputs / path.relative_to("/"))


def _fit_arguments(arguments: type[Any], outputs: Path) -> None:
    check = arguments.__post_init__

    def __post_init__(self: Any) -> None:  # noqa: N807
        if not self.use_cpu and ray.train.torch.get_device().type == "cpu":
            logger.info("use_cpu is set: the worker has no accelerator")
            self.use_cpu = True
        check(self)
        given = os.fspath(self.output_dir)
        self.output_dir = own_output_dir(given, outputs)
        if self.output_dir != given:
            logger.info("output_dir %s is %s in this attempt", given, self.output_dir)

    arguments.__post_init__ = __post_init__


def end_saves_together(trainer: type[Any]) -> None:
    save = trainer._save_checkpoint

    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        if self.args.world_size > 1:
            dist.barrier()

    trainer._save_checkpoint = _save_checkpoint


def _report_saved_step(callback: type[Any]) -> None:
    def on_save(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG001
        """Report the checkpoint that was just saved, with the newest value of each metric."""
        metrics = {name: value for log in state.log_history for name, value in log.items()}
        metrics["step"] = state.global_step
        source = Path(args.output_dir, f"checkpoint-{state.global_step}")
        paths = paths_to_report(source)
        if STATE in paths:
            _check_step(source, state.global_step)
        with tempfile.TemporaryDirectory() as folder:
            for path in paths:
                _take(source / path, Path(folder, self.CHECKPOINT_NAME, path))
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if paths else None)

    callback.on_save = on_save


def paths_to_report(source: Path) -> list[str]:
    """Return the files in `source` that no lower rank has at the same path. All ranks must call it.

    Raises `FailedPrecondition` if no rank has any file.
    """
    own = files_of(source, "checkpoint") if source.is_dir() else []  # `report` checks the whole keys
    lower: list[list[str]] = []
    every = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, own)
        lower = every[: dist.get_rank()]
    if not any(every):
        raise FailedPrecondition(
            f"the Trainer saved nothing to {source}; RayTrainReportCallback reports what is in its `output_dir`",
            reason="CHECKPOINT_NOT_FOUND",
        )
    taken = {path for paths in lower for path in paths}
    return [path for path in own if path not in taken]


def _check_step(source: Path, step: int) -> None:
    """Raise `FailedPrecondition` if the checkpoint belongs to another step."""
    held = json.loads((source / STATE).read_text())["global_step"]
    if held != step:
        raise FailedPrecondition(
            f"{source / STATE} is of step {held}, and the Trainer is at step {step}: another process writes there; "
            "give each job an `output_dir` of its own",
            reason="CHECKPOINT_OF_ANOTHER_STEP",
        )


def _take(file: Path, to: Path) -> None:
    """Hard-link the file if the file system allows it, else copy it. Nothing changes it before the report."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        to.hardlink_to(file)
    except OSError:
        shutil.copy(file, to)
