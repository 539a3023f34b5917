from __future__ import annotations

import pyarrow as pa
import pytest

from data_service.domain.import_spec import TypeRefused, parse_type


@pytest.mark.parametrize(
    "arrow_type",
    [
        pa.decimal128(1, 0),
        pa.decimal128(5, 5),
        pa.decimal128(38, 38),
        pa.timestamp("s"),
        pa.timestamp("us", "UTC"),
        pa.timestamp("ns", "America/Argentina/Buenos_Aires"),
        pa.timestamp("ms", "+02:00"),
        pa.time32("s"),
        pa.binary(3),
        pa.fixed_shape_tensor(pa.uint8(), [2, 3]),
    ],
    ids=str,
)
def test_a_type_is_read_from_its_spelling(arrow_type: pa.DataType) -> None:
    assert parse_type(str(arrow_type)) == arrow_type


@pytest.mark.parametrize(
    "spelling", ["decimal128(5, -1)", "decimal128(5, 7)", "decimal128(0, 0)", "decimal128(39, 0)", "decimal128(99, 2)"]
)
def test_a_decimal_that_no_file_holds_is_refused_with_the_remedy(spelling: str) -> None:
    with pytest.raises(TypeRefused, match="use a precision of 1 to 38 and a scale of 0 to the precision"):
        parse_type(spelling)


@pytest.mark.parametrize("zone", ["A B", "weird.zone", "Z" * 65])
def test_a_zone_that_is_none_is_refused_with_the_remedy(zone: str) -> None:
    with pytest.raises(TypeRefused, match="name a time zone such as UTC"):
        parse_type(f"timestamp[us, tz={zone}]")
