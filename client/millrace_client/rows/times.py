"""Dates and times in the types that the columns had of which a model learnt.

On the wire they are numbers without a unit. A server of ours tells the type; of others a column's own unit is sent, and
texts as dates and microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from inference import model_config_pb2

ColumnTypes = Mapping[str, pa.DataType]

# Of a model's parameters: such a one for each input of dates or times.
PARAMETER = "column_type."
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=(.+))?\]")
_OTHERS = {str(one): one for one in (pa.date32(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))}


def column_types(config: model_config_pb2.ModelConfig) -> ColumnTypes:
    """Of the inputs that are dates or times, by name."""
    told = {
        name.removeprefix(PARAMETER): _type(value.string_value)
        for name, value in config.parameters.items()
        if name.startswith(PARAMETER)
    }
    return {name: kind for name, kind in told.items() if kind is not None}


def as_type(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Texts, dates and times as `kind`; all others as they are, numbers among them: those are in its unit already.
    Texts of numbers are refused, as an import refuses them.

    Raises `pa.ArrowInvalid` where one is no such value, or would lose something: digits, its day or its time of day, or
    its zone, or gain one.
    """
    if kinds.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if kinds.is_string(values.type) or kinds.is_large_string(values.type) or kinds.is_string_view(values.type):
        texts = values.cast(pa.string())
        return _times_of_day(texts, kind) if kinds.is_time(kind) else texts.cast(kind)
    if not kinds.is_temporal(values.type):
        return values
    if values.null_count == len(values):
        return pa.chunked_array([pa.nulls(len(values), kind)])
    if _has_zone(values.type) != _has_zone(kind):
        raise pa.ArrowInvalid(f"one of {values.type} and {kind} has a zone")
    try:
        found = values.cast(kind)
        if found.cast(values.type).equals(values):
            return found
    except pa.ArrowNotImplementedError:  # a time of day where the model takes a date, say
        pass
    raise pa.ArrowInvalid(f"a value of {values.type} is no {kind}")


def _has_zone(kind: pa.DataType) -> bool:
    return bool(kinds.is_timestamp(kind) and kind.tz)


def _times_of_day(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """By itself Arrow casts no text to one."""
    on_a_day = pc.binary_join_element_wise(pa.scalar("1970-01-01T"), texts, pa.scalar(""))
    return on_a_day.cast(pa.timestamp("ns")).cast(kind)


def _type(text: str) -> pa.DataType | None:
    found = _TIMESTAMP.fullmatch(text)
    return pa.timestamp(found[1], found[2]) if found else _OTHERS.get(text)
