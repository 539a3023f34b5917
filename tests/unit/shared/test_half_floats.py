"""A half float is the nearest to a text's digits, whatever they are."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.formats.casts import from_text
from shared.transforms.steps.columns import cast_exactly

# All that are finite, in their order.
HALVES = np.unique(np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64))
HALVES = HALVES[np.isfinite(HALVES)]
MIDDLES = (HALVES[:-1] + HALVES[1:]) / 2


def nearest(text: str) -> float:
    """By the digits alone; of two that are as near the one whose last bit is 0."""
    number = Decimal(text)
    place = int(np.searchsorted(HALVES, float(number)))
    around: list[float] = HALVES[max(place - 2, 0) : place + 2].tolist()
    return min(around, key=lambda half: (abs(Decimal(half) - number), int(np.float16(half).view(np.uint16)) & 1))


def made(text: str) -> list[float]:
    """By an import and by a transform's cast."""
    texts = pa.array([None, text])
    both = [from_text(texts, pa.float16()), cast_exactly(texts, pa.float16())]
    assert [one[0].as_py() for one in both] == [None, None]
    return [float(one[1].as_py()) for one in both]


@given(place=st.integers(0, len(MIDDLES) - 1), beside=st.sampled_from([0, 1, -1]), digits=st.integers(16, 60))
def test_digits_beside_the_middle_of_two_go_to_the_side_where_they_are(place: int, beside: int, digits: int) -> None:
    middle = Decimal(MIDDLES[place])
    text = f"{middle + beside * Decimal(10) ** (middle.adjusted() - digits):.100f}"
    assert made(text) == [nearest(text)] * 2


@given(st.floats(-65_000, 65_000) | st.floats(-1e-4, 1e-4))
def test_any_number_becomes_the_nearest(value: float) -> None:
    assert made(repr(value)) == [nearest(repr(value))] * 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.000488281250001", 1.0009765625),
        ("1.00048828125", 1.0),
        ("1.00048828125000000000000000001", 1.0009765625),
        ("-1.00048828125000000000000000001", -1.0009765625),
        ("65519.99999999999999999999", 65504.0),
        ("inf", float("inf")),
        ("1e-400", 0.0),
    ],
)
def test_of_two_half_floats_the_nearer_is_taken(text: str, value: float) -> None:
    assert made(text) == [value] * 2
