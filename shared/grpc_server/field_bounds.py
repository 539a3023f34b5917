"""Bounds how many fields a message has, before it is parsed.

A sub-message takes two bytes on the wire, and 80 in memory once it is parsed: 64 MiB of them took 2.6 GiB, and half a
minute in which the event loop did nothing else. So the fields of a message are counted first, as far as those in which
sub-messages can be; what lies in others, such as elements of a repeated number or string, is bounded by the size of the
message alone, of which parsing makes 16 times as much at the worst.
"""

from __future__ import annotations

from typing import Any

from shared.errors import invalid_field

# More than a request of any service has that means something: 10,000 columns as tensors, with flags of their nulls,
# have 120,000.
MAX_FIELDS = 2**17

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_fields(data: bytes, descriptor: Any) -> None:
    """Raises `InvalidArgument` naming the field that holds the one beyond `MAX_FIELDS` of a message that `descriptor`
    describes. Bytes that are no message pass: the parser refuses them."""
    if len(data) < 2 * MAX_FIELDS:  # no field is shorter than two bytes, nor longer than what holds it
        return
    left = MAX_FIELDS
    # What is still to be read: from where to where, of which message, and its path.
    parts = [(0, len(data), descriptor, "")]
    while parts:
        at, end, kind, path = parts.pop()
        fields = kind.fields_by_number
        try:
            while at < end:
                tag, at = _varint(data, at)
                field = fields.get(tag >> 3)
                left -= 1
                if left < 0:
                    where = f"{path}{field.name}" if field is not None else path.rstrip(".")
                    remedy = f"a message may have {MAX_FIELDS} fields in all; send less in one request"
                    raise invalid_field(where, f"more than {MAX_FIELDS} fields", remedy)
                wire_type = tag & 7
                if wire_type == _VARINT:
                    _, at = _varint(data, at)
                elif wire_type == _BYTES:
                    length, at = _varint(data, at)
                    if field is not None and _may_hold_messages(field):
                        inner = f"{path}{field.name}." if not kind.GetOptions().map_entry else path
                        parts.append((at, min(at + length, end), field.message_type, inner))
                    at += length
                elif wire_type in (_FIXED64, _FIXED32):
                    at += 8 if wire_type == _FIXED64 else 4
        except IndexError:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where the next thing begins. Raises `IndexError` where there is none."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value = byte & 0x7F
    for place in range(1, 10):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise IndexError("longer than a number may be")


def _may_hold_messages(field: Any) -> bool:
    kind = field.message_type
    return kind is not None and any(one.message_type is not None for one in kind.fields)
