"""Small files that would take much memory, or lead elsewhere, if what they say were believed."""

from __future__ import annotations

import gzip
import io
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.support.images import encoded
from tests.support.peak_memory import MEBIBYTE


def parquet_bomb() -> bytes:
    """Fifty gigabytes of text in kilobytes: 5,000 rows that share one value of ten megabytes."""
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(5000, np.int32)), pa.array(["x" * 10_000_000]))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"s": text}), sink, compression="zstd")
    return bytes(sink.getvalue())


def gzip_bomb() -> bytes:
    """A tar of two images of 200 MiB of zeros each; gzip's members follow each other."""
    zeros = gzip.compress(bytes(10 * MEBIBYTE))
    headers = []
    for name in ("a/1.png", "a/2.png"):
        member = tarfile.TarInfo(name)
        member.size = 200 * MEBIBYTE
        headers.append(gzip.compress(member.tobuf()))
    return b"".join(header + zeros * 20 for header in headers)


def many_pixels() -> bytes:
    """A hundred megapixels, in a good PNG of kilobytes."""
    buffer = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(buffer, "PNG")
    return buffer.getvalue()


def tar_with(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A good image, and after it a member of that name: a link leads to /etc/passwd."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        image = encoded()
        for path in ("ants/good.png", name):
            member = tarfile.TarInfo(path)
            if path == name and kind != tarfile.REGTYPE:
                member.type, member.linkname = kind, "/etc/passwd"
            else:
                member.size = len(image)
            archive.addfile(member, io.BytesIO(image))
    return buffer.getvalue()


def many_columns() -> bytes:
    """CSV, of one row."""
    count = 1_000_000
    return ",".join(f"c{index}" for index in range(count)).encode() + b"\n" + b"1," * (count - 1) + b"1\n"


def parquet_that_claims(rows: int, of_group: int, rows_there: int = 1000) -> bytes:
    """One row group of `rows_there` rows; the file's footer claims `rows`, and `of_group` for the group."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": np.arange(rows_there)}), sink, write_statistics=False, store_schema=False)
    data: bytes = sink.getvalue().to_pybytes()
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    pages, footer = data[: -8 - footer_bytes], data[-8 - footer_bytes : -8]
    # The file's number, that of the column's values, and the group's.
    before, column, group, after = footer.split(_number(rows_there))
    footer = before + _number(rows) + column + _number(rows_there) + group + _number(of_group) + after
    return pages + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def parquet_that_aborts() -> bytes:
    """A file of whose column chunk Arrow cannot return the metadata: it throws, and nothing catches that."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": [1, None, 3]}), sink, compression="none")
    data: bytes = sink.getvalue().to_pybytes()
    # The histogram of definition levels, here [1, 2], among the column's size statistics: two numbers become one.
    histogram = b"\x19\x26\x02\x04"
    assert data.count(histogram) == 1
    return data.replace(histogram, b"\x19\x16\x82\x00")


def parquet_that_lies_at(offset: int) -> bytes:
    """A column of a thousand rows; its footer claims that its first page is at `offset`, and not at byte 4."""
    sink = pa.BufferOutputStream()
    table = pa.table({"n": np.arange(1000)})
    options = {"use_dictionary": False, "write_statistics": False, "store_schema": False, "compression": "none"}
    pq.write_table(table, sink, **options)
    data: bytes = sink.getvalue().to_pybytes()
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    pages, footer = data[: -8 - footer_bytes], data[-8 - footer_bytes : -8]
    # The bytes of the column before and after compression, and then the offset.
    stored = _number(len(pages) - 4)
    claim = stored + stored + b"\x26" + _number(4)[1:]
    assert footer.count(claim) == 1
    footer = footer.replace(claim, stored + stored + b"\x26" + _number(offset)[1:])
    return pages + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def arrow_that_claims(rows: int, batches: int, column_type: pa.DataType, rows_there: int = 4242) -> bytes:
    """An Arrow file of record batches that have `rows_there` rows each, and claim to have `rows`."""
    table = pa.table({"n": pa.nulls(rows_there, column_type)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        for _ in range(batches):
            writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    # The rows of a batch, those of its column, and its nulls. No other number of these files is the same.
    claims = data.count(rows_there.to_bytes(8, "little"))
    assert claims == 3 * batches
    return data.replace(rows_there.to_bytes(8, "little"), rows.to_bytes(8, "little", signed=True))


def _number(number: int) -> bytes:
    """The next field, an i64, as Thrift's compact protocol has it."""
    rest, data = 2 * number if number >= 0 else -2 * number - 1, b"\x16"
    while rest > 127:
        data += bytes([rest & 127 | 128])
        rest >>= 7
    return data + bytes([rest])
