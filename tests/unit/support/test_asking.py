"""Clients that ask without a pause tell whatever goes wrong."""

from __future__ import annotations

import itertools

from tests.support.asking import Load


def test_a_wrong_answer_is_told_as_an_error_is() -> None:
    numbers = itertools.count()

    def ask() -> str:
        assert next(numbers) != 3, "a wrong answer"
        return "1"

    with Load(ask, 1) as load:
        load.wait_for(10, within_s=5)
    assert [str(error).splitlines()[0] for error in load.errors] == ["a wrong answer"]
