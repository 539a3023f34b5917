"""Which tests stay in one process where several share them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Suites whose files share a Ray head, which takes longer to start than most of their tests.
SHARING = (
    "tests/contract/jobs",
    "tests/integration/data_service",
    "tests/integration/inference_service",
    "tests/integration/train_service",
    "tests/e2e",
)
FAULT = "tests/fault"
# Files with this import fork processes from one that has imported torch. Its imports take 10 s of CPU time in each
# process of xdist that runs such a file. So only two run them: one those of `LEARNING`, the other the rest.
FORKING = "from tests.unit.train_service.in_ranks import "
LEARNING, OTHER_FORKING = "tests/unit/train_service/learning", "tests/unit/train_service"
# What takes long, the longest first. Begun last, it would leave the other processes without work.
LONGEST = (
    "tests/integration/train_service",
    "tests/integration/data_service",
    LEARNING,
    OTHER_FORKING,
    "tests/contract/jobs",
    "tests/unit/inference_service/serve/test_overload.py",
    "tests/unit/train_service/worker/test_loop.py",
    "tests/unit/train_service/jobs/test_checkpoint_import.py",
    "tests/unit/train_service/jobs/test_own_weights_import.py",
    "tests/unit/train_service/jobs/test_own_model_check.py",
    "tests/unit/train_service/attempt/test_supervision.py",
    "tests/contract/checkpoints/test_slow_line.py",
)


@cache
def _forks(file: Path) -> bool:
    return FORKING in file.read_text()


class BySuite(LoadScopeScheduling):  # type: ignore[misc]
    """Whole suites where files share fixtures or processes, of the faults those of one service; else whole files. The
    longest go first."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder, _, name = path.rpartition("/")
        if folder == FAULT:
            return "_".join([folder, *name.split("_")[:2]])  # fault/test_data_...
        if folder in SHARING:
            return folder
        if folder.startswith(OTHER_FORKING) and _forks(self.config.rootpath / path):
            return LEARNING if folder == LEARNING else OTHER_FORKING
        return path

    def _assign_work_unit(self, node: Any) -> None:
        for scope in reversed(LONGEST):
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)
