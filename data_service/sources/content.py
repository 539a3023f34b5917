"""A source file's bytes, and errors about them that name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import BinaryIO, cast

import pyarrow as pa

from data_service.domain.decompression import DecompressionError, decompressed
from data_service.domain.idx import IdxError
from data_service.sources.source_files import SourceFile
from shared.errors import Unavailable, first_line


@contextmanager
def content(file: SourceFile) -> Iterator[BinaryIO]:
    """The file's bytes from the first on, gunzipped where they are gzip. Only `read(size)` is to be used."""
    with closing(file.open()) as opened:
        yield cast(BinaryIO, _Watched(decompressed(opened), file.on_read))


class _Watched:
    """Types are inferred from whole files: that, too, must end when nobody wants it any more."""

    def __init__(self, stream: BinaryIO, on_read: Callable[[], None]) -> None:
        self._stream = stream
        self._on_read = on_read

    def read(self, size: int) -> bytes:
        self._on_read()
        return self._stream.read(size)


@contextmanager
def blaming(file: SourceFile, kind: str) -> Iterator[None]:
    """Turns whatever a reader says about the bytes into an error that names the source. `kind` is the format."""
    try:
        yield
    except (IdxError, DecompressionError) as error:
        raise file.corrupt(str(error)) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if (isinstance(error, OSError) and error.errno) or "AWS Error" in str(error):
            raise Unavailable(f"{file.field}: {file.uri} cannot be read at present", retry_after_s=1.0) from error
        raise file.corrupt(f"it is not a whole {kind} file: {first_line(error)}") from None
