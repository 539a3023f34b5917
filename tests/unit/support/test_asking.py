"""Clients that ask without a pause tell whatever goes wrong."""

from __future__ import annotations

import itertools
import threading

from tests.support.asking import Load


def test_a_wrong_answer_is_reported_as_an_error_is() -> None:
    numbers = itertools.count()

    def ask() -> str:
        assert next(numbers) != 3, "a wrong answer"
        return "1"

    with Load(ask, 1) as load:
        load.wait_for(10, timeout_s=60)
    assert [str(error).splitlines()[0] for error in load.errors] == ["a wrong answer"]


def test_a_wait_for_calls_under_way_ends_with_the_slowest() -> None:
    held, asked = threading.Event(), threading.Lock()

    def ask() -> str:
        if asked.acquire(blocking=False):  # the first call of all
            held.wait()
            return "late"
        return "at once"

    with Load(ask, 2) as load:
        load.wait_for(20, timeout_s=60)
        assert "late" not in load.answers
        threading.Timer(0.05, held.set).start()
        load.wait_for_those_under_way(timeout_s=60)
        assert load.answers["late"] == 1
