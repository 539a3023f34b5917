"""Limits of child processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared import process_limits


def test_namespaces_that_the_kernel_grants_hold_where_it_refuses_the_names_of_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    granted = iter([1, 0])  # without a user namespace it is refused
    monkeypatch.setattr(process_limits, "libc", lambda: SimpleNamespace(unshare=lambda _: next(granted)))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(Path, "write_text", refuse)
    assert process_limits.enter_namespaces(process_limits.CLONE_NEWNET)


def test_the_processor_time_of_a_process_grows_with_its_work() -> None:
    before = process_limits.cpu_seconds_of("self")
    while process_limits.cpu_seconds_of("self") <= before:
        sum(range(10_000))
    assert process_limits.cpu_seconds_of(2**22 + 1) == 0
