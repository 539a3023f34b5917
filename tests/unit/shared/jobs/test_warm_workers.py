"""Whether processes wait for the workers of the next attempt."""

from __future__ import annotations

import pytest

from shared.jobs import warm_workers


@pytest.mark.parametrize(("text", "warm"), [("", True), ("1", True), ("0", False), ("yes", False)])
def test_a_nodes_setting_that_cannot_be_read_costs_time_and_no_job(
    monkeypatch: pytest.MonkeyPatch, text: str, warm: bool
) -> None:
    monkeypatch.setenv("MILLRACE_WARM_WORKERS", text)

    assert warm_workers.wanted() is warm
