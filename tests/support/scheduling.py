"""Which tests stay in one process where several share them."""

from __future__ import annotations

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


class BySuite(LoadScopeScheduling):  # type: ignore[misc]
    """Whole suites where files share fixtures, of the faults those of one service; else whole files."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder, _, name = path.rpartition("/")
        if folder == FAULT:
            return "_".join([folder, *name.split("_")[:2]])  # fault/test_data_...
        return folder if folder in SHARING else path
