from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from millrace.data.v1 import data_service_pb2
from millrace_client.data import ArrowBytes, _payload


def message(data: bytes) -> bytes:
    return data_service_pb2.ReadVersionResponse(arrow_ipc=data).SerializeToString()


@given(st.one_of(st.binary(max_size=300), st.integers(0, 70_000).map(bytes)))
def test_the_bytes_of_a_message_are_those_that_the_parser_finds(data: bytes) -> None:
    assert bytes(_payload(message(data))) == data


@given(st.binary(max_size=50))
def test_a_message_with_more_in_it_is_left_to_the_parser(data: bytes) -> None:
    unknown_field = b"\x10\x01"
    assert bytes(_payload(message(data) + unknown_field)) == data
    assert bytes(_payload(unknown_field + message(data))) == data


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(0, 30), max_size=30))
def test_reads_of_any_size_give_the_bytes_in_their_order(pieces: list[bytes], sizes: list[int]) -> None:
    file = ArrowBytes(iter([memoryview(piece) for piece in pieces]))
    whole = b"".join(pieces)
    position = 0
    for size in sizes:
        taken = bytes(file.read(size))
        assert taken == whole[position : position + size]
        position += len(taken)


def test_a_table_is_read_without_a_copy_of_more_than_one_message_at_a_time() -> None:
    batch = pa.record_batch({"x": pa.array(range(1000), pa.int64())})
    taken = 0

    def messages() -> Iterator[memoryview]:
        nonlocal taken
        for data in (batch.schema.serialize(), batch.serialize(), batch.serialize()):
            taken += 1
            yield memoryview(data.to_pybytes())

    reader = pa.ipc.open_stream(ArrowBytes(messages()))
    assert reader.read_next_batch().equals(batch)
    assert taken == 2
    assert reader.read_all().num_rows == 1000
