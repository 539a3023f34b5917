"""Whether a run's attempts keep processes waiting for the next one."""

from __future__ import annotations

import pytest

from train_service import supervision


@pytest.mark.parametrize(("text", "warm"), [("", True), ("1", True), ("0", False), ("yes", False)])
def test_a_nodes_setting_that_cannot_be_read_costs_time_and_no_run(
    monkeypatch: pytest.MonkeyPatch, text: str, warm: bool
) -> None:
    monkeypatch.setenv("MILLRACE_WARM_WORKERS", text)

    assert supervision._warm_workers() is warm
