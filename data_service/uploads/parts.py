"""How an upload that clients put by URL is cut into parts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import invalid_field

DEFAULT_PART_BYTES = 64 * 1024 * 1024
MIN_PART_BYTES = 5 * 1024 * 1024
MAX_PART_BYTES = 5 * 1024 * 1024 * 1024
MAX_PARTS = 10_000


@dataclass(frozen=True)
class PresignedPut:
    """What a client asks for; a part size of 0 means 64 MiB."""

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
    part_size = wanted.part_size_bytes or DEFAULT_PART_BYTES
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
