"""Types of typed files that no version keeps: which of them `column_types` can turn into others.

An all-null column comes as `null`, as pandas writes it; whole milliseconds of days, durations and decimals of other
widths have a cast. Lists of numbers become tensors of a shape that is given. Other nested types have no cast.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as kinds

from data_service.domain.list_tensors import is_list
from data_service.domain.row_casts import CastRefused, cast_between
from shared.dataset_version.columns import is_tensor, logical_field, scalar_remedy
from shared.errors import InvalidArgument


def plain_type(given: pa.DataType) -> pa.DataType:
    """That of the values themselves, behind a dictionary or an extension."""
    if isinstance(given, pa.BaseExtensionType):
        return plain_type(given.storage_type)
    return plain_type(given.value_type) if kinds.is_dictionary(given) else given


def is_foreign(plain: pa.DataType) -> bool:
    """Whether a version keeps no values of that `plain_type`, nor any that they simply are."""
    simply_others = (
        kinds.is_large_string,
        kinds.is_large_binary,
        kinds.is_string_view,
        kinds.is_binary_view,
        kinds.is_nested,
    )
    return not any(check(plain) for check in simply_others) and scalar_remedy(plain) is not None


def has_cast(given: pa.DataType) -> bool:
    """Whether only `column_types` make a column of that type one of a version: its values are foreign, or an extension
    says that they are more than they look like."""
    extended = isinstance(given, pa.BaseExtensionType) and not is_tensor(given)
    return extended or is_foreign(plain_type(given))


def kept_type(plain: pa.DataType) -> pa.DataType:
    """That of the column which a version makes of such values by itself; foreign ones stay what they are."""
    try:
        return logical_field(pa.field("", plain)).type
    except InvalidArgument:
        return plain


def is_castable(plain: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether `column_types` may turn such values into `wanted`, save for lists."""
    if kinds.is_nested(plain):
        return False
    try:
        cast_between(kept_type(plain), wanted)
    except CastRefused:
        return False
    return True


def lists_within(given: pa.DataType) -> pa.DataType | None:
    """The lists that a column holds, itself or as an extension; None where it holds others."""
    storage = given.storage_type if isinstance(given, pa.BaseExtensionType) and not is_tensor(given) else given
    return storage if is_list(storage) else None


def suggested_type(plain: pa.DataType) -> pa.DataType | None:
    """A type of a version that can hold the values, if there is one."""
    candidates = [pa.timestamp("ms"), pa.int64(), pa.string()]
    if kinds.is_null(plain):
        candidates = [pa.string()]
    elif kinds.is_timestamp(plain):
        candidates = [pa.timestamp(plain.unit, "UTC")]
    elif kinds.is_decimal(plain):
        candidates = [pa.decimal128(38, plain.scale)] if 0 <= plain.scale <= 38 else [pa.string()]
    elif scalar_remedy(plain) is None:
        candidates = [plain]
    return next((one for one in candidates if is_castable(plain, one)), None)
