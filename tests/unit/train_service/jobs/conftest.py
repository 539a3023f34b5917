"""What is known of a caller's code and weights does not depend on how busy the machine is."""

from __future__ import annotations

import pytest

from train_service.jobs import checkpoint_import, model_check
from train_service.jobs.own_code import Limits

BUSY_MACHINE_S = 500.0


@pytest.fixture(autouse=True)
def generous_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has long enough to import torch; a test of a limit sets its own."""
    defaults = Limits.__init__.__kwdefaults__
    assert defaults is not None
    for limit in ("idle_s", "wall_s"):
        monkeypatch.setitem(defaults, limit, BUSY_MACHINE_S)
    monkeypatch.setattr(checkpoint_import, "BASE_S", BUSY_MACHINE_S)
    monkeypatch.setattr(model_check, "LIMIT_S", BUSY_MACHINE_S)
