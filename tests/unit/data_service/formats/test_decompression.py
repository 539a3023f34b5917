from __future__ import annotations

import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.formats import interface
from data_service.formats.interface import DecompressionError, decompressed


def read_all(data: bytes) -> bytes:
    stream = decompressed(io.BytesIO(data))
    pieces = []
    while piece := stream.read(1000):
        pieces.append(piece)
    return b"".join(pieces)


@given(content=st.binary(max_size=5000))
def test_gzip_is_recognised_by_its_bytes(content: bytes) -> None:
    assert read_all(gzip.compress(content)) == content


@given(content=st.binary(max_size=5000).filter(lambda data: not data.startswith(b"\x1f\x8b")))
def test_other_bytes_come_as_they_are(content: bytes) -> None:
    assert read_all(content) == content


def test_members_follow_each_other() -> None:
    assert read_all(gzip.compress(b"one") + gzip.compress(b"two")) == b"onetwo"


@given(cut=st.integers(2, 60))
def test_a_truncated_file_is_refused(cut: int) -> None:
    whole = gzip.compress(bytes(range(256)))
    with pytest.raises(DecompressionError):
        read_all(whole[: min(cut, len(whole) - 1)])


@given(position=st.integers(10, 250))
def test_a_flipped_byte_is_refused_or_harmless(position: int) -> None:
    content = bytes(range(256))
    data = bytearray(gzip.compress(content))
    data[position] ^= 0xFF
    with pytest.raises(DecompressionError):
        read_all(bytes(data))


def test_a_bomb_is_refused_before_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "FREE_BYTES", 100_000)
    with pytest.raises(DecompressionError, match="200 times its size"):
        read_all(gzip.compress(b"\0" * 2_000_000))
