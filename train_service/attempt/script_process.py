"""The process that runs a job's script.

Its command is `python -m train_service.attempt.script_process FD PID`.

The process is a driver of Ray. In local mode it is the only rank and trains itself, for a script or a function.

`FD` is its end of the channel to the attempt. `PID` is the attempt's process, with which it ends. `ScriptRun` starts
it. It has no credentials of the store: a trainer's `fit()` asks the attempt, which has them.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.train import Result, RunConfig, TrainingFailedError
from ray.train.v2.torch.torch_trainer import TorchTrainer

from shared.code_environment import add_packages
from shared.errors import Internal, InvalidArgument, MillraceError, first_line
from train_service.attempt.ray_run import Failure, RayRun
from train_service.domain.spec import Program
from train_service.placement import Size
from train_service.program.fit_calls import Channel, ChannelClosed, FitCall, TrainerSettings
from train_service.program.ray_hooks import LocalRank, install_driver
from train_service.program.tuning import TrialDone, TrialResults, result_of, tuner_of
from train_service.program.worker import ProgramConfig, code_paths, run_program
from train_service.program.worker_setup import line_of
from train_service.worker.user_process import exits_announced

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
MAX_TEXT = 200
# Fields of Ray's configurations that `TrainerSettings` covers, and the name, which identifies a run.
IN_ASKED = frozenset(
    {
        "num_workers",
        "use_gpu",
        "resources_per_worker",
        "accelerator_type",
        "placement_strategy",
        "backend",
        "timeout_s",
        "max_failures",
        "max_preemption_failures",
        "name",
        "storage_path",
        "failure_config",
        "checkpoint_config",
        "callbacks",
        "worker_runtime_env",
    }
)
PLAIN_LOG = logging.StreamHandler(sys.stdout)
PLAIN_LOGGERS = ("train_service", "shared")


class ScriptDriver:
    """The implementation behind the script's trainers."""

    def __init__(self, channel: Channel, code: Path, config: Mapping[str, Any], *, is_trial: bool = False) -> None:
        """Create the driver.

        `config` replaces keys of every trainer's `train_loop_config`. `is_trial` means that `config` has the values of
        a trial of the sweep that the script's `Tuner` has become.
        """
        self._channel = channel
        self._code = code
        self._config = dict(config)
        self._is_trial = is_trial

    def fit(self, trainer: Any) -> Result:
        """Replace a trainer's own `fit`.

        Return once the run is done and committed. If the run fails, the attempt ends, and this process with it.
        """
        line = self.line()
        if not isinstance(trainer, TorchTrainer):
            raise InvalidArgument(f"{line}: {type(trainer).__name__}.fit() is not supported; use TorchTrainer")
        function, settings = trainer.train_loop_per_worker, {**(trainer.train_loop_config or {}), **self._config}
        run_config = trainer.run_config
        call = FitCall(
            name=str(run_config.name),
            storage_path=str(run_config.storage_path or ""),
            line=line,
            function=getattr(function, "__qualname__", type(function).__name__),
            config_sha256=hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode()).hexdigest(),
        )
        question = {
            "kind": "fit",
            "call": asdict(call),
            "asked": asdict(self._trainer_settings(trainer)),
            "datasets": sorted(trainer.datasets),
        }
        answer = self._channel.ask(question)
        if "run" in answer:
            self._train(trainer, answer["run"], cloudpickle.dumps((function, settings)))  # type: ignore[no-untyped-call]
            answer = self._channel.ask({"kind": "fitted"})
        result = result_of(answer["result"], lambda name: str(self._channel.ask(_question_for(name))["folder"]))
        logger.info("%s: fit() of %r returns %s", line, call.name, result)
        return result

    def tune(self, trainer: Any, space: Mapping[str, Any], settings: Mapping[str, Any], line: str) -> TrialResults:
        """Replace `Tuner.fit`.

        A trial trains with its own values and ends the script, because the code after the call concerns all trials
        together.
        """
        if self._is_trial:
            self.fit(trainer)
            raise TrialDone
        constants = {**(trainer.train_loop_config or {}), **space["constants"], **self._config}
        domains = {
            path: domain for path, domain in space["domains"].items() if path.partition(".")[0] not in self._config
        }
        question = {"kind": "sweep", "line": line, "constants": constants, "domains": domains, "settings": settings}
        answer = self._channel.ask(question)
        return TrialResults.from_answer(
            answer, settings, lambda name: str(self._channel.ask(_question_for(name))["folder"])
        )

    def warn(self, text: str) -> None:
        self._channel.ask({"kind": "warning", "text": f"{self.line()}: {text}"})

    def line(self) -> str:
        """Return the innermost running line of the script.

        The line lies in the script's own files, such as `cells.py:31`.
        """
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(self._code):
            frame = frame.f_back
        if frame is None:
            return "the script"
        return f"{Path(frame.f_code.co_filename).relative_to(self._code).as_posix()}:{frame.f_lineno}"

    def _train(self, trainer: Any, given: str, function: bytes) -> None:
        config, size = _run_given(given)
        config = replace(config, function=function, own_datasets=tuple(trainer.datasets))
        if size is None:
            self._train_here(
                config, LocalRank(name=trainer.run_config.name, datasets=_created_datasets(trainer.datasets))
            )
            return
        try:
            run = RayRun(
                config,
                size,
                name=trainer.run_config.name,
                datasets=trainer.datasets,
                dataset_config=trainer.data_config,
            )
            run.fit()
        except TrainingFailedError as error:
            # The attempt ends this process: a script that caught the error would continue without its run.
            self._channel.ask({"kind": "failed", "failure": asdict(Failure.from_error(error))})
        except BaseException:
            self._channel.ask({"kind": "withdrawn"})
            raise

    def train_function(self) -> None:
        """Train a program without a script in this process."""
        config, _ = _run_given(self._channel.ask({"kind": "train"})["run"])
        self._train_here(config, LocalRank(name=config.job_name))
        self._channel.ask({"kind": "fitted"})

    def _train_here(self, config: ProgramConfig, local: LocalRank) -> None:
        try:
            with _plain_log_paused():  # the rank's log already has Millrace's records
                run_program(config, 0, 1, "", local)
        except MillraceError as error:
            failure = Failure(own=error.as_record(), ranks="0", lacks_resources=False, text=error.message)
            self._channel.ask({"kind": "failed", "failure": asdict(failure)})

    def _trainer_settings(self, trainer: Any) -> TrainerSettings:
        scaling, run_config, torch_config = trainer.scaling_config, trainer.run_config, trainer.backend_config
        failures, checkpoints = run_config.failure_config, run_config.checkpoint_config
        workers = scaling.num_workers
        given = trainer.train_loop_config or {}
        return TrainerSettings(
            num_workers=list(workers) if isinstance(workers, tuple) else workers,
            use_gpu=bool(scaling.use_gpu),
            resources_per_worker=dict(scaling.resources_per_worker or {}),
            accelerator_type=scaling.accelerator_type or "",
            placement_strategy=str(scaling.placement_strategy),
            # Ray fills in a default path if the script names none.
            storage_path="" if run_config.storage_path == RunConfig().storage_path else str(run_config.storage_path),
            backend=torch_config.backend or "",
            timeout_s=torch_config.timeout_s,
            max_failures=failures.max_failures,
            max_preemption_failures=failures.max_preemption_failures,
            num_to_keep=checkpoints.num_to_keep,
            score_attribute=checkpoints.checkpoint_score_attribute or "",
            score_order=checkpoints.checkpoint_score_order,
            callbacks=len(run_config.callbacks or ()),
            has_worker_environment=bool(run_config.worker_runtime_env),
            has_validation=trainer.validation_config is not None,
            others=[
                text for config in (scaling, torch_config, failures, run_config) for text in other_settings(config)
            ],
            config={
                key: [repr(given[key])[:MAX_TEXT] if key in given else "(absent)", repr(value)[:MAX_TEXT]]
                for key, value in self._config.items()
                # A trial's values replace the script's on purpose.
                if not self._is_trial and (key not in given or given[key] != value)
            },
        )


def other_settings(config: Any) -> list[str]:
    """Return a configuration's settings beyond those of `TrainerSettings`.

    The configuration is one of Ray's, and default values are left out.
    """
    kind = type(config)
    defaults = kind()
    return [
        f"{kind.__name__}({field.name}={repr(value)[:MAX_TEXT]})"
        for field in fields(config)
        if field.name not in IN_ASKED and (value := getattr(config, field.name)) != getattr(defaults, field.name)
    ]


def main(arguments: list[str]) -> int:
    _end_with(int(arguments[1]))
    _log_plainly()
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    start = channel.receive()
    assert start is not None
    code, entry = Path(start["code"]), start["entry"]
    driver = ScriptDriver(channel, code, start["config"], is_trial=start["is_trial"])
    program = Program(code_bundle="", entry=entry)
    if not program.is_script:
        _add_packages(start["packages"])
        driver.train_function()
        channel.send({"kind": "end"})
        return 0
    # Connect before the script's paths are added, because Ray puts the present `sys.path` first on all workers.
    ray.init(address=start["cluster"], namespace=start["job"], logging_level=logging.WARNING)
    sys.dont_write_bytecode = True
    _add_packages(start["packages"])
    sys.path += code_paths(code, program)
    tuner = tuner_of(driver) if _names_tune(code) else None
    install_driver(driver.fit, driver.warn, tuner, may_use_gpus=start["gpus_per_worker"] != 0)
    try:
        with exits_announced(lambda status, where: _announce_exit(channel, code, status, where)):
            _run(code / entry)
    except TrialDone:
        logger.info("the script of a trial ends with its training")
    except SystemExit as error:
        if error.code not in (None, 0):
            _raised(channel, error, code)
    except ChannelClosed:
        return 1  # the attempt has ended
    except BaseException as error:
        traceback.print_exc()
        _raised(channel, error, code)
    channel.send({"kind": "end"})
    return 0


def _add_packages(packages: str) -> None:
    """Make the packages importable that the bundle requires and the image lacks. The attempt keeps their folder."""
    if packages:
        add_packages(Path(packages), sys.path)


def _names_tune(code: Path) -> bool:
    """Return whether a bundle may use Ray Tune. Any of its modules may; the import of Ray Tune takes seconds."""
    return any(b"tune" in module.read_bytes() for module in code.rglob("*.py"))


def _run_given(given: str) -> tuple[ProgramConfig, Size | None]:
    config, size = pickle.loads(base64.b64decode(given))
    return config, size


def _created_datasets(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the datasets of a script. A dataset that the script gives as a function is created here."""
    return {name: dataset() if callable(dataset) else dataset for name, dataset in datasets.items()}


def _run(path: Path) -> None:
    """Run the script as `python path` does.

    The module stays in `sys.modules`, so that its objects are pickled by value.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    sys.argv = [str(path)]
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)


def _raised(channel: Channel, error: BaseException, code: Path) -> None:
    """Report the error to the attempt. The attempt then ends this process."""
    where = line_of(error, code)
    if isinstance(error, MillraceError):
        record = error
        if where and where not in error.message:
            error.message = f"{where}: {error.message}"
    else:
        what = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
        at = f" at {where}" if where else ""
        text = first_line(error) if isinstance(error, Exception) else ""
        record = Internal(
            f"{what}{at} of the script{text and ': '}{text}",
            reason="PROGRAM_RAISED",
            metadata={"line": where, "exception": type(error).__name__},
        )
    with contextlib.suppress(ChannelClosed):
        channel.ask({"kind": "raised", "error": record.as_record()})


def _announce_exit(channel: Channel, code: Path, status: int, where: str) -> None:
    text = f"os._exit({status}) at {where.removeprefix(f'{code}/')}: the process ended before the script's last line"
    channel.ask({"kind": "raised", "error": Internal(text, reason="PROGRAM_EXITED").as_record()})


def _log_plainly() -> None:
    """Write log records as plain lines to the job's log.

    The records are those of Millrace and Ray Train. The script configures its own logging.
    """
    PLAIN_LOG.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in PLAIN_LOGGERS:
        logging.getLogger(name).addHandler(PLAIN_LOG)
        logging.getLogger(name).setLevel(logging.INFO)


@contextlib.contextmanager
def _plain_log_paused() -> Iterator[None]:
    for name in PLAIN_LOGGERS:
        logging.getLogger(name).removeHandler(PLAIN_LOG)
    try:
        yield
    finally:
        for name in PLAIN_LOGGERS:
            logging.getLogger(name).addHandler(PLAIN_LOG)


def _question_for(name: str) -> dict[str, Any]:
    return {"kind": "checkpoint", "name": name}


def _end_with(parent: int) -> None:
    """Make the kernel kill this process with its parent."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
