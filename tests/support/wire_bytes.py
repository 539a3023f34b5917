"""Protobuf messages as bytes that no generated code would write."""

from __future__ import annotations

from google.protobuf.wrappers_pb2 import BytesValue


def inside(tag: bytes, data: bytes) -> bytes:
    """The field of that tag that holds `data`, which must not be empty."""
    assert data
    return tag + BytesValue(value=data).SerializeToString()[1:]
