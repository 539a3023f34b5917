"""How an error is told in a call's trailers: below gRPC's limit of 8 KiB, or the status itself would be lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shared.errors import MillraceError
from shared.grpc_errors import status_proto

# Together, in base64 and with their keys, about 7.5 KiB at the most.
MESSAGE_BYTES = 1000
METADATA_BYTES = 1200
FIELDS_BYTES = 1800
KEY_BYTES = 120
VALUE_BYTES = 400


def details_and_status(error: MillraceError) -> tuple[str, bytes]:
    """The status's message, and the serialized `google.rpc.Status`, both cut where they are too long."""
    # Clients (grpc-status) refuse a status whose message is not the call's.
    message = _cut(error.message, MESSAGE_BYTES, percent_encoded=True)
    short = type(error).__new__(type(error))
    MillraceError.__init__(
        short,
        message,
        reason=error.specific_reason,
        metadata=dict(_within(METADATA_BYTES, error.metadata.items())),
        fields=_within(FIELDS_BYTES, error.fields),
        retry_after_s=error.retry_after_s,
    )
    return message, status_proto(short).SerializeToString()


def _within(budget: int, pairs: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """As many of the pairs, each cut, as fit."""
    for key, value in pairs:
        pair = _cut(key, KEY_BYTES), _cut(value, VALUE_BYTES)
        budget -= sum(len(text.encode()) for text in pair)
        if budget < 0:
            return
        yield pair


def _cut(text: str, limit: int, *, percent_encoded: bool = False) -> str:
    """At most `limit` bytes of the text, on the wire."""
    if len(text) < limit - 9 and text.isascii() and text.isprintable() and "%" not in text:
        return text  # a byte each
    room = limit - 9  # for the ellipsis
    for index, character in enumerate(text):
        plain = " " <= character <= "~" and character != "%"
        room -= 1 if plain else len(character.encode()) * (3 if percent_encoded else 1)
        if room < 0:
            return text[:index] + "…"
    return text
