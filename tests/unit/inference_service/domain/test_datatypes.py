from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference_service.domain.signature import bfloat16_to_float32, float32_to_bfloat16


def test_every_bfloat16_survives_the_way_through_float32() -> None:
    bits = np.arange(2**16, dtype="<u2")
    assert np.array_equal(float32_to_bfloat16(bfloat16_to_float32(bits)), bits)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120))
def test_rounding_to_bfloat16_is_off_by_at_most_half_a_step(value: float) -> None:
    values = np.array([value], "<f4")
    back = bfloat16_to_float32(float32_to_bfloat16(values))
    assert abs(float(back[0]) - value) <= max(abs(value) * 2.0**-8, 2.0**-133)


def test_halves_round_to_even_in_bfloat16() -> None:
    halves = np.array([0x3F808000, 0x3F818000], "<u4").view("<f4")
    assert float32_to_bfloat16(halves).tolist() == [0x3F80, 0x3F82]


def test_a_nan_whose_payload_is_cut_off_stays_a_nan() -> None:
    sneaky = np.array([0x7F800001, 0xFF800001], "<u4").view("<f4")
    assert np.isnan(bfloat16_to_float32(float32_to_bfloat16(sneaky))).all()
