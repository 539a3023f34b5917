"""Hooks that keep the checkpoints of `transformers.Trainer` correct in a program: all uses of its private parts.

Without them, the Trainer and Ray's `RayTrainReportCallback` go wrong in four ways:
- **Ranks apart.** On CPUs the Trainer joins the process group only with `use_cpu=True`. Without it every rank trains
  its own model, and only one line of its log says so. Here `use_cpu` is set on workers without an accelerator.
- **Half a checkpoint.** A rank's save ends when its own files are written, and the callback copies the whole folder, so
  a rank may copy files that another still writes. Here every save ends once it has ended on all ranks.
- **A stale checkpoint.** `output_dir` outlives a killed attempt on the same node, and the callback takes the folder of
  the highest step, which after a resume is that of the lost attempt. Another job on the node may write into the same
  folder, too. Here a scratch folder belongs to the attempt, and the callback takes the folder of the step that was just
  saved, and checks `trainer_state.json` against it.
- **The same files from every rank.** Each rank of a node copies and uploads the whole folder. Here a rank reports only
  files that no lower rank has.

Nothing is imported here: the modules are changed right after the program has imported them.

Changes in a new release that may break the hooks, and their symptoms
(`tests/integration/train_service/test_hugging_face.py`):
- `Trainer._save_checkpoint` is renamed: `AttributeError` when the program imports `transformers`.
- `TrainingArguments` is no longer a dataclass with a `__post_init__`: the same.
- The Trainer names its folders differently: each report raises CHECKPOINT_NOT_FOUND.
- Ray's callback is moved: it is not changed, and checkpoints come from all ranks again.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import ray.train
import ray.train.torch
import torch.distributed as dist
from ray.train import Checkpoint

from shared.errors import FailedPrecondition
from train_service.program.report_sender import files_of

logger = logging.getLogger(__name__)

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
