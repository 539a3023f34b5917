"""Seconds since the epoch as `google.protobuf.Timestamp`."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp


def timestamp(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1_000_000) * 1000)
