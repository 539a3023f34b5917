"""How an upload that clients put by URL is cut into parts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import invalid_field

DEFAULT_PART_BYTES = 64 * 1024 * 1024
MIN_PART_BYTES = 5 * 1024 * 1024
MAX_PART_BYTES = 5 * 1024 * 1024 * 1024
# With their URLs they are one message of less than 4 MiB, also where host, bucket and key are as long as can be.
MAX_PARTS = 2_000
_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class PresignedPut:
    """What a client asks for; a part size of 0 means 64 MiB, or as many more as it takes for `MAX_PARTS`."""

    size_bytes: int
    part_size_bytes: int = 0


@dataclass(frozen=True)
class Part:
    """`size_bytes` from `offset` on, to be put to `url`."""

    offset: int
    size_bytes: int
    url: str = ""


def parts_of(wanted: PresignedPut) -> list[Part]:
    """All of one size but the last, and without their URLs. Raises `InvalidArgument`."""
    if wanted.size_bytes < 1:
        raise invalid_field("presigned.size_bytes", wanted.size_bytes, "name the size of all parts together, 1 or more")
    if wanted.size_bytes > MAX_PARTS * MAX_PART_BYTES and not wanted.part_size_bytes:
        raise invalid_field("presigned.size_bytes", wanted.size_bytes, f"use at most {MAX_PARTS * MAX_PART_BYTES}")
    part_size = wanted.part_size_bytes or max(DEFAULT_PART_BYTES, _least_part_bytes(wanted.size_bytes))
    if not MIN_PART_BYTES <= part_size <= MAX_PART_BYTES:
        raise invalid_field(
            "presigned.part_size_bytes", part_size, f"use 0, or {MIN_PART_BYTES} to {MAX_PART_BYTES} bytes"
        )
    if wanted.size_bytes > MAX_PARTS * part_size:
        raise invalid_field(
            "presigned.part_size_bytes", part_size, f"{wanted.size_bytes} bytes must make at most {MAX_PARTS} parts"
        )
    return [
        Part(offset, min(part_size, wanted.size_bytes - offset)) for offset in range(0, wanted.size_bytes, part_size)
    ]


def _least_part_bytes(size_bytes: int) -> int:
    """In whole MiB, of a part of at most `MAX_PARTS`."""
    return -(-size_bytes // (MAX_PARTS * _MEBIBYTE)) * _MEBIBYTE
