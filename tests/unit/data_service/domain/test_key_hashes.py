"""Keys hash the same for ever: the numbers below must never change."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.domain.splits import can_be_key, key_hashes

DAY = datetime.date(2019, 3, 1)
NOON = datetime.datetime(2019, 3, 1, 12)

FROZEN = [
    (pa.array([None], pa.string()), 0, 0xC44BDFF4074EECDB),
    (pa.array([True]), 0, 0x070D80D6A76865F3),
    (pa.array([42], pa.int64()), 0, 0x2ADD0E4A73E936D9),
    (pa.array([42], pa.int64()), 7, 0xDB02A028DFFEABBD),
    (pa.array([-1], pa.int8()), 0, 0x6E543E66A37DFB6C),
    (pa.array([2**64 - 1], pa.uint64()), 0, 0x535D1466CA478C1C),
    (pa.array([0.5]), 0, 0x70827C21A1FDF17C),
    (pa.array(["ant"]), 0, 0x70ECAFE8652797B8),
    (pa.array([b"ant"]), 0, 0xDA814BA32F10A747),
    (pa.array([DAY]), 0, 0x4C69ED733914F154),
    (pa.array([NOON], pa.timestamp("us")), 0, 0x45A4EC26C89B4B0B),
    (pa.array([datetime.time(12, 30)], pa.time32("s")), 0, 0x263591BBD20DEB7C),
    (pa.array([Decimal("1.50")], pa.decimal128(10, 2)), 0, 0x4552A50C37818177),
]


def hashes(*arrays: pa.Array, seed: int = 0) -> list[int]:
    return [int(one) for one in key_hashes([pa.chunked_array([array]) for array in arrays], seed)]


@pytest.mark.parametrize(("array", "seed", "expected"), FROZEN)
def test_a_key_has_the_hash_that_it_always_had(array: pa.Array, seed: int, expected: int) -> None:
    assert hashes(array, seed=seed) == [expected]


def test_a_key_of_several_columns_has_the_hash_that_it_always_had() -> None:
    assert hashes(pa.array(["ant", None]), pa.array([1, 2]), seed=3) == [0xF702AE64908A12DD, 0xC59C86D5280D492D]


@given(st.lists(st.integers(-128, 127), min_size=1))
def test_integers_hash_equal_whatever_their_width(values: list[int]) -> None:
    wide = hashes(pa.array(values, pa.int64()))
    assert hashes(pa.array(values, pa.int8())) == wide
    assert hashes(pa.array([abs(v) for v in values], pa.uint16())) == hashes(pa.array([abs(v) for v in values]))


@given(st.lists(st.floats(width=32), min_size=1))
def test_floats_hash_equal_whatever_their_width(values: list[float]) -> None:
    assert hashes(pa.array(values, pa.float32())) == hashes(pa.array(values, pa.float64()))


def test_values_that_are_equal_hash_equal() -> None:
    assert len(set(hashes(pa.array([0.0, -0.0])))) == 1
    nans = np.array([0x7FF8000000000000, 0xFFF8000000000001], np.uint64).view(np.float64)
    assert len(set(hashes(pa.array(nans, from_pandas=False)))) == 1
    assert hashes(pa.array([Decimal("1.50")])) == hashes(pa.array([Decimal("1.5")]))
    assert hashes(pa.array([Decimal("0.00")])) == hashes(pa.array([Decimal(0)]))
    second = pa.array([NOON], pa.timestamp("s"))
    assert hashes(second) == hashes(second.cast(pa.timestamp("ns")))


def test_all_digits_of_a_decimal_count() -> None:
    long = [Decimal("1." + "0" * 36 + "1"), Decimal("1." + "0" * 36 + "2")]
    assert len(set(hashes(pa.array(long, pa.decimal128(38, 37))))) == 2


def test_values_of_different_kinds_differ() -> None:
    kinds: list[pa.Array] = [
        pa.array([None], pa.int64()),
        pa.array([True]),
        pa.array([1]),
        pa.array([1.0]),
        pa.array(["1"]),
        pa.array([b"1"]),
        pa.array([""]),
        pa.array([1], pa.int32()).cast(pa.date32()),
        pa.array([1], pa.timestamp("ns")),
        pa.array([1], pa.time64("ns")),
        pa.array([Decimal(1)]),
    ]
    assert len({hashes(array)[0] for array in kinds}) == len(kinds)


def test_where_one_value_ends_and_the_next_begins_counts() -> None:
    assert hashes(pa.array(["ab"]), pa.array(["c"])) != hashes(pa.array(["a"]), pa.array(["bc"]))


@given(st.lists(st.tuples(st.one_of(st.none(), st.text(max_size=3)), st.one_of(st.none(), st.integers(0, 3)))))
def test_equal_keys_have_equal_hashes_in_whatever_company(rows: list[tuple[Any, Any]]) -> None:
    texts, numbers = pa.array([row[0] for row in rows], pa.string()), pa.array([row[1] for row in rows], pa.int64())
    together = hashes(texts, numbers, seed=5)
    alone = [hashes(pa.array([t], pa.string()), pa.array([n], pa.int64()), seed=5)[0] for t, n in rows]
    assert together == alone


def test_tensors_are_no_keys() -> None:
    assert not can_be_key(pa.fixed_shape_tensor(pa.uint8(), [2]))
    assert can_be_key(pa.binary(4))
