"""Requests that a hostile client could send: legal on the wire, and as bad as their descriptors allow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NAMES = (
    *(
        "",
        "a",
        "train",
        "..",
        "../..",
        "/",
        "\0",
        "a\0b",
        "\n",
        "\u00e9",
        "\U0001d54f",
        "\u202e",
        "x" * 64,
        "x" * 100_000,
    ),
    *("datasets/d", "datasets/..", "datasets/../d", "datasets//versions/", "datasets/d\0", "datasets/absent"),
    *("datasets/d/uploads/u", "datasets/d/uploads/../log", "datasets/d/versions/v", "datasets/d/versions/.."),
    *("operations/x", "operations/../x", "file:///etc/passwd", "file:///in/../etc", "s3://..", "s3://b/k", "http://x"),
    *("int64", "struct<>", "timestamp[us, tz=../..]", "decimal128(99, 99)", "n > 0", "__import__('os')", "(" * 2000),
    *("(a+)+$", "(?=a)", "[", "os:system", "utf-8", "rot13", "0" * 64, "00000000-0000-4000-8000-000000000000", "uid"),
)
NUMBERS = (0.0, -0.0, 0.5, -1.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
_MAX_NESTED = 5
_KIND = FieldDescriptor


def hostile(message: Message, random_: random.Random, nesting: int = 0, *, flood: Sequence[int] = ()) -> Any:
    """Fill the message, and return it: fields of all kinds, absent, empty, repeated too often, extreme. Now and then
    one is repeated as often as one of `flood` says."""
    for field in message.DESCRIPTOR.fields:
        in_oneof = field.containing_oneof
        if random_.random() < 0.4 or (in_oneof is not None and message.WhichOneof(in_oneof.name)):
            continue
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            values, key = getattr(message, field.name), random_.choice(NAMES)
            if hasattr(values, "get_or_create"):  # of messages, which exist once they are looked at
                hostile(values[key], random_, nesting + 1)
                for number in range(_flood(flood, random_)):
                    values[str(number)].SetInParent()
            else:
                values[key] = random_.choice(NAMES)
        elif field.is_repeated:
            count = random_.choice((1, 2, 2, 3, 101 if nesting < 1 else 3))
            values = getattr(message, field.name)
            for _ in range(count):
                if field.message_type is None:
                    values.append(_scalar(field, random_))
                else:
                    hostile(values.add(), random_, nesting + 1, flood=flood)
            # Of the shortest there are: what they cost is their number.
            shortest = values[0] if field.message_type is None and values[0] in (b"", "", 0, 1) else None
            if field.message_type is not None:
                shortest = type(values[0])()
            values.extend([shortest] * _flood(flood, random_) if shortest is not None else [])
        elif field.message_type is None:
            setattr(message, field.name, _scalar(field, random_))
        else:
            getattr(message, field.name).SetInParent()
            if nesting < _MAX_NESTED:
                hostile(getattr(message, field.name), random_, nesting + 1, flood=flood)
    return message


def _flood(counts: Sequence[int], random_: random.Random) -> int:
    return random_.choice(counts) if counts and random_.random() < 0.03 else 0


def _scalar(field: Any, random_: random.Random) -> Any:
    if field.type == _KIND.TYPE_STRING:
        return random_.choice(NAMES)
    if field.type == _KIND.TYPE_BYTES:
        return random_.choice((b"", b"\0", b"\xff" * 1000))
    if field.type == _KIND.TYPE_BOOL:
        return random_.random() < 0.5
    if field.type == _KIND.TYPE_ENUM:
        return random_.choice((0, 1, 2, 99, -1))
    if field.type == _KIND.TYPE_DOUBLE:
        return random_.choice(NUMBERS)
    if field.type == _KIND.TYPE_FLOAT:
        return random_.choice([number for number in NUMBERS if abs(number) != 1e308])
    is_signed = field.type in (_KIND.TYPE_INT32, _KIND.TYPE_INT64, _KIND.TYPE_SINT32, _KIND.TYPE_SINT64)
    is_wide = field.type in (_KIND.TYPE_INT64, _KIND.TYPE_SINT64, _KIND.TYPE_UINT64, _KIND.TYPE_FIXED64)
    bits = 64 if is_wide else 32
    most = 2 ** (bits - is_signed) - 1
    return random_.choice((0, 1, 2, 101, most, *((-1, -most - 1) if is_signed else ())))
