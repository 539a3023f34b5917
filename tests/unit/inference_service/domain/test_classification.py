from __future__ import annotations

import numpy as np

from inference_service.domain.signature import classified, named


def test_equal_numbers_keep_their_order_and_nan_is_last() -> None:
    assert classified(np.array([[1.0, np.nan, 2.0, 2.0]], np.float32), 4).tolist() == [
        [b"2.000000:2", b"2.000000:3", b"1.000000:0", b"nan:1"]
    ]


def test_classes_that_have_a_name_are_reported_with_it() -> None:
    assert classified(np.array([[0.5, 1.0, 0.0]], np.float32), 3, ["ants", "bees: wild"]).tolist() == [
        [b"1.000000:1:bees: wild", b"0.500000:0:ants", b"0.000000:2"]
    ]


def test_labels_get_their_names_in_utf8_and_none_where_the_data_had_none() -> None:
    found = named(np.array([1, 0, 2, 1], np.int64), ["ants", "bees: ähnlich"])
    assert found.tolist() == ["bees: ähnlich".encode(), b"ants", b"", "bees: ähnlich".encode()]


def test_whole_numbers_are_reported_without_a_fraction() -> None:
    assert classified(np.array([[-1, 7]], np.int64), 1).tolist() == [[b"7:1"]]


def test_the_dimensions_of_a_row_are_one_list() -> None:
    assert classified(np.arange(8.0).reshape(2, 2, 2), 1).tolist() == [[b"3.000000:3"], [b"7.000000:3"]]


def test_the_greatest_of_all_rows_are_those_of_each_row_by_itself() -> None:
    values = np.random.default_rng(3).integers(0, 9, (20, 50)).astype(np.float32) / 3  # with many that are equal
    for top in (1, 7, 50):
        expected = [
            [f"{row[index]:f}:{index}".encode() for index in sorted(range(50), key=lambda i: (-row[i], i))[:top]]
            for row in values
        ]
        assert classified(values, top).tolist() == expected
