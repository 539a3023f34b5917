"""A worker of a program: Ray Train runs the user's function on it, with Millrace behind `ray.train`.

The worker is a real one of Ray Train's, with its process group. Before the program's module is imported, `report`,
`get_checkpoint` and `get_dataset_shard` are bound to Millrace (`ray_hooks`), and the process gets its own folder,
seeds, and captured output (`process`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
import ray.train.torch
import torch
from ray import cloudpickle

from shared.checkpoint.registry import data_folder_of
from shared.code_environment import use_environment
from shared.code_packing import requirements_of_folder
from shared.errors import FailedPrecondition, Internal, MillraceError, first_line
from shared.log import StaleAttempt
from shared.telemetry import configure_logging, identity
from train_service.domain.spec import Program, TrainingSpec
from train_service.domain.watchdog import Phase
from train_service.program.drawn import DrawnIndices
from train_service.program.hugging_face_hooks import install_hugging_face
from train_service.program.process import (
    AttemptFolder,
    NodeCopies,
    OptimizerSteps,
    drop_hidden_variables,
    line_of,
    seed_everything,
)
from train_service.program.ray_hooks import LocalProgramTrainFnUtils, LocalRank, ProgramTrainFnUtils, install
from train_service.program.report_sender import Begin, ProgramStopped, RankReports
from train_service.program.signing import RankStore, Versions, open_rank_store
from train_service.records.logs import LogShipper
from train_service.store_retry import retry_on_outage
from train_service.worker.heartbeat import FAILING, HeartbeatSender, lost_others
from train_service.worker.user_process import MemoryLimit, MemoryWatch, NodeMemory, captured_output, exits_announced

if TYPE_CHECKING:
    from train_service.program.shards import ProgramShards

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

    Returns once the function has returned and all its reports are committed, or once it was stopped at a report. Raises
    `Internal` for an error of the function. `local`: the rank is no worker of Ray Train, and passes `KeyboardInterrupt`
    through. `ranks_of_node` share the node's memory. A process that is also the attempt has `end_process` called if its
    memory is full.
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
        copies = NodeCopies(self._store, self._folder.checkpoints, heartbeat.tick)
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
        use_environment(requirements_of_folder(code), os.environ, heartbeat.tick)
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
                self._heartbeat.tick,
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
