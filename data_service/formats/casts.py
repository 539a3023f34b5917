"""Parses values from text, and casts columns row by row, so that bad rows do not fail the whole column."""

from __future__ import annotations

from collections.abc import Callable
from decimal import MAX_PREC, Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from shared.dataset_version.manifest import refuse_beyond_milliseconds
from shared.value_texts import halves_of_texts, times_of_day, zone_hint, zone_problem

# --- Text values ---
# Parses values from text, and infers the types that all texts of a column fit.
#
# The inferred types: bool (`true`, `false` in any case) < int64 < double < timestamp[us] (ISO 8601 without a zone) <
# string. Text is never trimmed. A whole number that exceeds int64, or that a double would change, makes the column
# string, so that no digit is lost. So does one with a leading zero or plus (`007`, `+49`), and a fraction with such
# zeros: postcodes, ids and telephone numbers are text. `-0` is a double, which keeps its sign.
#
# A fraction with more digits than a double has (17) is a double if the double reproduces all digits, as for a printed
# double: 0.1 with 20 decimals is 0.10000000000000000555. Otherwise, for example for amounts and for pi to 20 decimals,
# the column stays string; `column_types` may ask for a decimal, or for a double, which rounds.

INFERRED = (pa.bool_(), pa.int64(), pa.float64(), pa.timestamp("us"))
EXACT_IN_DOUBLE = 2**53
# A double reproduces any 15 digits; writing a double without loss takes at most 17.
SAFE_DIGITS, WRITTEN_DIGITS = 15, 17


def from_text(texts: pa.Array, target: pa.DataType) -> pa.Array:
    """Parse a string array as `target`; nulls stay null.

    A float is the nearest to the text's digits. Raises `pa.ArrowInvalid` if a text does not fit, for example a number
    beyond the float's range or a whole number that even a double would change, and `pa.ArrowNotImplementedError` if no
    text ever fits.
    """
    if kinds.is_string(target):
        return texts
    if kinds.is_floating(target):
        return _floats(texts, target)
    if kinds.is_time(target):
        return times_of_day(texts, target)
    if kinds.is_fixed_size_binary(target):
        return texts.cast(pa.binary()).cast(target)
    return texts.cast(target)


class InferredType:
    """Infers the type of one column from its texts, a chunk at a time."""

    def __init__(self) -> None:
        self._possible = list(INFERRED)
        self._any_text = False

    def update(self, texts: pa.Array) -> None:
        """Add a string array; nulls fit every type."""
        if not self._possible:
            return
        present = texts.drop_null()
        if not len(present):
            return
        self._any_text = True
        if self._possible != [pa.timestamp("us")] and _has_digits_of_text(present):
            self._possible = [one for one in self._possible if not (kinds.is_integer(one) or kinds.is_floating(one))]
        integers = _integers(present) if pa.int64() in self._possible else None
        if integers is not None:
            # Integers fit no other type but doubles, which need no check of each text.
            kept = {pa.int64()} | ({pa.float64()} if _exact_in_double(integers) else set())
            self._possible = [one for one in self._possible if one in kept]
        else:
            tried = [one for one in self._possible if not kinds.is_integer(one)]
            self._possible = [one for one in tried if self._fits(present, one)]

    def merge(self, other: InferredType) -> None:
        """Add the texts of other rows: a type is possible if it is in both."""
        if self._any_text and other._any_text:
            self._possible = [one for one in self._possible if one in other._possible]
        elif other._any_text:
            self._possible = list(other._possible)
        self._any_text |= other._any_text

    @property
    def type(self) -> pa.DataType:
        """The first type that all texts fit; string if there is none, or if all are null."""
        return self._possible[0] if self._possible and self._any_text else pa.string()

    def _fits(self, texts: pa.Array, candidate: pa.DataType) -> bool:
        try:
            if kinds.is_floating(candidate):
                return _fit_doubles(texts)
            if kinds.is_boolean(candidate):
                return bool(pc.all(pc.is_in(pc.utf8_lower(texts), pa.array(["true", "false"]))).as_py())
            from_text(texts, candidate)
        except pa.ArrowInvalid:
            return False
        return True


def _integers(texts: pa.Array) -> pa.Array | None:
    """Parse the texts as int64; None if one is no integer."""
    try:
        values = texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    # Arrow also reads hexadecimal; only such texts have a character beyond the digits and the minus.
    codes = np.frombuffer(texts.buffers()[2], np.uint8)
    if codes.max(initial=0) > ord("9") and pc.any(pc.match_substring(texts, "x", ignore_case=True)).as_py():
        return None
    if pc.any(pc.equal(values, 0)).as_py() and pc.any(pc.equal(texts, "-0")).as_py():
        return None
    return values


def _has_digits_of_text(texts: pa.Array) -> bool:
    """Return whether a text has a zero before a digit, or is a whole number with a plus.

    A number would not reproduce such a text. The texts are not null. Texts that are no numbers may match, too, which
    does no harm.
    """
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    starts, ends = offsets[:-1], offsets[1:]
    some = starts < ends
    if not some.all():
        starts, ends = starts[some], ends[some]
    if not len(starts):
        return False
    codes = np.frombuffer(texts.buffers()[2], np.uint8)
    first = codes[starts]
    plus, minus, zero = (first == ord(character) for character in "+-0")
    signed = plus | minus
    return (
        _zero_then_digit(codes, starts[zero], ends[zero])
        or _zero_then_digit(codes, starts[signed] + 1, ends[signed])
        or bool(plus.any() and pc.any(pc.match_substring_regex(texts, r"^\+[0-9]+$")).as_py())
    )


def _zero_then_digit(codes: NDArray[np.uint8], starts: NDArray[np.int32], ends: NDArray[np.int32]) -> bool:
    starts = starts[starts + 1 < ends]
    second = codes[starts + 1]
    return bool(((codes[starts] == ord("0")) & (second >= ord("0")) & (second <= ord("9"))).any())


def _exact_in_double(integers: pa.Array) -> bool:
    bounds = pc.min_max(integers)
    return bool(bounds["min"].as_py() >= -EXACT_IN_DOUBLE and bounds["max"].as_py() <= EXACT_IN_DOUBLE)


def _fit_doubles(texts: pa.Array) -> bool:
    values = _floats(texts, pa.float64())
    wholes = _large_wholes(texts, values)
    if not all(abs(_whole(text)) <= EXACT_IN_DOUBLE for text in wholes.to_pylist()):
        return False
    return all(map(_gives_back, _long_fractions(texts, values).to_pylist()))


def _long_fractions(texts: pa.Array, values: pa.Array) -> pa.Array:
    """Return the texts, all of them numbers, whose digits a double may not reproduce.

    For fractions beyond 2**53 a double guarantees only 15 digits; such fractions are rare.
    """
    large = pc.greater_equal(pc.abs(values), float(EXACT_IN_DOUBLE))
    # Counts from the first significant digit, without the point. For nearly all texts this is enough, and no regular
    # expression is needed.
    counted = pc.utf8_ltrim(texts, "+-0.")
    points = pc.match_substring(counted, ".").cast(pa.int32())
    long = pc.or_(large, pc.greater(pc.subtract(pc.binary_length(counted), points), WRITTEN_DIGITS))
    if not pc.any(long).as_py():
        return texts.slice(0, 0)
    found, values, large = texts.filter(long), values.filter(long), large.filter(long)
    count = pc.utf8_length(pc.utf8_trim(pc.replace_substring_regex(found, r"[eE].*$|[.+-]", ""), "0"))
    too_many = pc.or_(pc.greater(count, WRITTEN_DIGITS), pc.and_(large, pc.greater(count, SAFE_DIGITS)))
    # Whole numbers are checked separately, and infinities have no digits.
    is_fraction = pc.and_(pc.match_substring_regex(found, "[.eE]"), pc.is_finite(values))
    return found.filter(pc.and_(too_many, is_fraction))


def _gives_back(text: str) -> bool:
    """Return whether the nearest double, written with as many digits, equals the text's number."""
    number = Decimal(text)
    digits = len(number.normalize(Context(prec=MAX_PREC)).as_tuple().digits)
    return Decimal(f"{float(text):.{digits - 1}e}") == number


def _floats(texts: pa.Array, target: pa.DataType) -> pa.Array:
    """Parse floats.

    Raises `pa.ArrowInvalid` if digits became infinity, or if a double would change a whole number.
    """
    values = halves_of_texts(texts) if kinds.is_float16(target) else texts.cast(target)
    wide = values.cast(pa.float64())
    infinite = pc.is_inf(wide)
    if pc.any(infinite).as_py():
        said = pc.match_substring_regex(texts.filter(infinite), "^[+-]?inf(inity)?$", ignore_case=True)
        if not pc.all(said).as_py():
            raise pa.ArrowInvalid(f"a number is beyond the range of {target}")
    for text in _large_wholes(texts, wide).to_pylist():
        if int(float(text)) != _whole(text):
            raise pa.ArrowInvalid("a whole number has more digits than a double holds")
    return values


def _whole(digits: str) -> int:
    return int(Decimal(digits))  # int() itself refuses thousands of digits, even leading zeros


def _large_wholes(texts: pa.Array, values: pa.Array) -> pa.Array:
    """Return the texts of digits alone whose values a double may have changed."""
    large = pc.greater_equal(pc.abs(values), float(EXACT_IN_DOUBLE))
    if not pc.any(large).as_py():
        return texts.slice(0, 0)
    found = texts.filter(large)
    return found.filter(pc.match_substring_regex(found, "^[+-]?[0-9]+$"))


# --- Row casts ---

# True for each row that fits; None if all do.
Fits = NDArray[np.bool_] | None
Cast = Callable[[pa.Array], pa.Array]


class CastRefused(ValueError):
    """No value of one type can be cast to the other; the text says why."""


def cast_rows(values: pa.Array, cast: Cast) -> tuple[pa.Array, Fits]:
    """Return `cast(values)`, with null and False for rows for which it raises.

    Bad rows are found by halving, so that good rows stay fast.
    """
    try:
        return cast(values), None
    except pa.ArrowInvalid:
        if len(values) <= 1:
            empty = cast(values.slice(0, 0))
            return pa.nulls(len(values), empty.type), np.zeros(len(values), np.bool_)
    middle = len(values) // 2
    parts = [cast_rows(values.slice(0, middle), cast), cast_rows(values.slice(middle), cast)]
    fits = np.concatenate([np.ones(len(part), np.bool_) if fit is None else fit for part, fit in parts])
    return pa.concat_arrays([part for part, _ in parts]), fits


def cast_between(data_type: pa.DataType, wanted: pa.DataType) -> Cast | None:
    """Return the cast from one logical type to another; None if they are equal.

    Raises `CastRefused`.
    """
    if data_type == wanted:
        return None
    if problem := zone_problem(data_type, wanted):
        raise CastRefused(problem)
    cast = _chosen(data_type, wanted)
    try:
        cast(_empty(data_type))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        raise CastRefused(f"{data_type} cannot be cast to {wanted}") from None
    return cast


def misfit(value: str, data_type: pa.DataType) -> str:
    """Return the reason for a bad row whose `value` does not fit."""
    return f"{value} does not fit {data_type}{zone_hint(data_type)}"


def _chosen(data_type: pa.DataType, wanted: pa.DataType) -> Cast:
    def from_texts(values: pa.Array) -> pa.Array:
        return from_text(values, wanted)

    def plain(values: pa.Array) -> pa.Array:
        return _checked(values, values.cast(wanted))

    if _is_tensor(data_type) or _is_tensor(wanted):
        return _tensor_cast(data_type, wanted)
    return from_texts if kinds.is_string(data_type) else plain


def _empty(arrow_type: pa.DataType) -> pa.Array:
    if _is_tensor(arrow_type):
        return pa.ExtensionArray.from_storage(arrow_type, pa.array([], arrow_type.storage_type))
    return pa.array([], arrow_type)


def _is_tensor(arrow_type: pa.DataType) -> bool:
    return isinstance(arrow_type, pa.FixedShapeTensorType)


def _tensor_cast(data_type: pa.DataType, wanted: pa.DataType) -> Cast:
    if not (_is_tensor(data_type) and _is_tensor(wanted)):
        raise CastRefused(f"{data_type} cannot be cast to {wanted}: a tensor stays a tensor")
    size = int(np.prod(wanted.shape))
    if int(np.prod(data_type.shape)) != size:
        raise CastRefused(f"rows of shape {data_type.shape} cannot have the shape {wanted.shape}")

    def cast(tensors: pa.Array) -> pa.Array:
        flat = tensors.storage.flatten()
        values = _checked(flat, flat.cast(wanted.value_type))
        return pa.ExtensionArray.from_storage(wanted, pa.FixedSizeListArray.from_arrays(values, size))

    return cast


def _checked(given: pa.Array, cast: pa.Array) -> pa.Array:
    """Check a cast for errors that Arrow ignores.

    These are a finite number that became infinite in a narrower float, and seconds beyond the range of a version's
    files.
    """
    if kinds.is_floating(cast.type) and (kinds.is_floating(given.type) or kinds.is_decimal(given.type)):
        wide = given.cast(pa.float64())
        if pc.any(pc.and_(pc.is_finite(wide), pc.is_inf(cast.cast(pa.float64())))).as_py():
            raise pa.ArrowInvalid("beyond the range of the float")
    refuse_beyond_milliseconds(cast)
    return cast


def rows_without_nulls(lists: pa.FixedSizeListArray) -> tuple[pa.Array, Fits]:
    """Return the lists' values as one array, and which lists are valid.

    A valid list is not null and has no null; the values of others are zeros.
    """
    size = lists.type.list_size
    values = lists.values.slice(lists.offset * size, len(lists) * size)
    if not lists.null_count and not values.null_count:
        return values, None
    fits: NDArray[Any] = ~lists.is_null().to_numpy(zero_copy_only=False)
    if values.null_count:
        fits &= ~values.is_null().to_numpy(zero_copy_only=False).reshape(len(lists), size).any(axis=1)
        values = values.fill_null(pa.scalar(0, pa.int8()).cast(values.type))
    return values, fits
