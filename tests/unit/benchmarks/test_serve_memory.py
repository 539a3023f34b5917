from __future__ import annotations

import os

import pytest

from benchmarks.serve_memory import ProcessMemory, quarters


def test_growth_is_of_the_last_quarter_over_the_first_one_after_the_warm_up() -> None:
    warm_up, flat, grown = [900.0] * 10, [100.0] * 12, [100.0, 100.0, 500.0] * 2 + [110.0] * 8
    assert quarters([*warm_up, *flat], 0.2, 10).ratio == 1.0
    assert quarters([*flat, *flat[:2], *grown], 0.0, 0).ratio == pytest.approx(1.1)


def test_the_warm_up_is_a_share_and_no_less_than_its_least() -> None:
    samples = [float(number) for number in range(1, 101)]
    assert quarters(samples, 0.2, 0).first_mib == 30.5
    assert quarters(samples, 0.2, 60).first_mib == 65.5


def test_too_few_samples_say_nothing() -> None:
    with pytest.raises(ValueError, match="soak for longer"):
        quarters([1.0] * 22, 0.0, 20)


def test_a_process_is_measured_as_it_is() -> None:
    memory = ProcessMemory(os.getpid())
    for _ in range(8):
        memory.sample()
    assert 10 < memory.held(0.0, 0).first_mib < 10_000
    before = memory.open_files()
    with open(os.devnull):  # noqa: PTH123 - a file that is open meanwhile
        assert memory.open_files() == before + 1
