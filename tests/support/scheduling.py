"""Which tests stay in one process where several share them."""

from __future__ import annotations

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
# What takes a minute or more, the longest first. Begun last, it would leave the other processes without work.
LONGEST = (
    "tests/integration/train_service",
    "tests/integration/data_service",
    "tests/unit/train_service/test_torchrun_main.py",
    "tests/contract/jobs",
    "tests/unit/inference_service/serve/test_overload.py",
    "tests/unit/train_service/learning/test_learner.py",
    "tests/unit/train_service/worker/test_loop.py",
)


class BySuite(LoadScopeScheduling):  # type: ignore[misc]
    """Whole suites where files share fixtures, of the faults those of one service; else whole files. The longest go
    first."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder, _, name = path.rpartition("/")
        if folder == FAULT:
            return "_".join([folder, *name.split("_")[:2]])  # fault/test_data_...
        return folder if folder in SHARING else path

    def _assign_work_unit(self, node: Any) -> None:
        for scope in reversed(LONGEST):
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)
