"""Processes for the races, started once: importing the store's libraries takes a second in each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import racing


@pytest.fixture(scope="session")
def racers() -> Iterator[racing.Racers]:
    with racing.racers() as started:
        yield started
