from __future__ import annotations

from inference_service.domain.batch_policy import Load, LoadMeter


def test_a_mean_is_over_the_time_since_the_last_reading() -> None:
    meter = LoadMeter(10.0)
    meter.add(8, 11.0)  # one of four seconds with none, two with eight, one with two
    meter.add(-6, 13.0)
    assert meter.read(14.0) == Load((0 + 8 * 2 + 2) / 4, 0)
    assert meter.read(16.0) == Load(2.0, 0)


def test_a_peak_between_two_readings_counts() -> None:
    meter = LoadMeter(0.0)
    meter.add(100, 0.5)
    meter.add(-100, 0.6)
    assert round(meter.read(1.0).rows, 9) == 10.0


def test_refused_rows_are_reported_once() -> None:
    meter = LoadMeter(0.0)
    meter.refuse(3)
    meter.refuse(4)
    assert meter.read(1.0) == Load(0.0, 7)
    assert meter.read(2.0) == Load(0.0, 0)


def test_a_reading_without_elapsed_time_gives_the_present_value() -> None:
    meter = LoadMeter(0.0)
    meter.add(5, 0.0)
    assert meter.read(0.0).rows == 5.0
