"""Opens the files that an import names: local ones below the allowed roots, and objects on the store's S3 endpoint."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from pyarrow import fs

from data_service.domain.uris import FileSource, S3Source, UriRefused, check_allowed, parse_uri
from shared.errors import InvalidArgument, NotFound, Unavailable, invalid_field
from shared.storage import ObjectStore

READ_AHEAD_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class SourceFile:
    """`field` is the request's field that names it. `open` gives a fresh seekable file each time."""

    field: str
    uri: str
    size_bytes: int
    open: Opener

    def corrupt(self, why: str) -> InvalidArgument:
        """The error for content that cannot be imported; `why` is a sentence about the file."""
        return InvalidArgument(
            f"{self.field}: {self.uri} cannot be imported: {why}",
            reason="CORRUPT_SOURCE",
            metadata={"field": self.field, "uri": self.uri},
            fields=[(self.field, why)],
        )


class Opener(Protocol):
    def __call__(self) -> BinaryIO: ...


class SourceFiles:
    """`roots` are the folders that local files may come from; `s3` is None where there is no S3 endpoint."""

    def __init__(self, roots: Sequence[PurePosixPath], s3: fs.FileSystem | None) -> None:
        self._roots = [Path(root).resolve() for root in roots]
        self._spelled_roots = list(roots)
        self._s3 = s3

    def find(self, field: str, uri: str) -> SourceFile:
        """Raises `NotFound`, or `InvalidArgument` where the source is none that may be read."""
        try:
            source = parse_uri(uri)
            check_allowed(source, self._spelled_roots, s3=self._s3 is not None)
        except UriRefused as refused:
            raise invalid_field(field, uri, str(refused)) from None
        if isinstance(source, S3Source):
            return self._object(field, uri, f"{source.bucket}/{source.key}")
        return self._local(field, uri, source)

    def _local(self, field: str, uri: str, source: FileSource) -> SourceFile:
        def opened() -> BinaryIO:
            return self._open_local(field, uri, Path(source.path))

        with opened() as file:
            size_bytes = os.fstat(file.fileno()).st_size
        return SourceFile(field, uri, size_bytes, opened)

    def _open_local(self, field: str, uri: str, path: Path) -> BinaryIO:
        """Follows links first and opens without following any, so what is opened is what was judged."""
        try:
            resolved = path.resolve(strict=True)
            if not any(resolved.is_relative_to(root) for root in self._roots):
                raise invalid_field(field, uri, "a link leads out of the folders of MILLRACE_IMPORT_ROOTS")
            # A pipe must not block us.
            descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise _not_found(field, uri) from None
        except (OSError, RuntimeError) as error:
            raise invalid_field(field, uri, f"the server cannot open it: {_cause(error)}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise invalid_field(field, uri, "name a regular file")
        return os.fdopen(descriptor, "rb")

    def _object(self, field: str, uri: str, path: str) -> SourceFile:
        assert self._s3 is not None
        filesystem = self._s3
        try:
            info = filesystem.get_file_info(path)
        except OSError as error:
            raise _unanswered(field, uri, error) from None
        if info.type != fs.FileType.File:
            raise _not_found(field, uri)
        return SourceFile(field, uri, info.size, lambda: _open_object(filesystem, field, uri, path))


def s3_of(store: ObjectStore) -> fs.FileSystem | None:
    """The whole S3 endpoint behind an `s3://` store, from which sources may come; None on a `file://` store."""
    filesystem: Any = store.filesystem()
    return filesystem.base_fs if isinstance(filesystem.base_fs, fs.S3FileSystem) else None


def _open_object(filesystem: fs.FileSystem, field: str, uri: str, path: str) -> BinaryIO:
    try:
        opened: BinaryIO = filesystem.open_input_file(path)
    except FileNotFoundError:
        raise _not_found(field, uri) from None
    except OSError as error:
        raise _unanswered(field, uri, error) from None
    return opened


def _not_found(field: str, uri: str) -> NotFound:
    return NotFound(
        f"{field}: {uri} does not exist",
        reason="SOURCE_NOT_FOUND",
        metadata={"field": field, "uri": uri},
        fields=[(field, "name a file that exists")],
    )


def _unanswered(field: str, uri: str, error: OSError) -> InvalidArgument | Unavailable:
    if "ACCESS_DENIED" in str(error):
        return invalid_field(field, uri, "the server's S3 credentials may not read it")
    return Unavailable(f"{field}: the S3 endpoint does not answer for {uri}", retry_after_s=1.0)


def _cause(error: OSError | RuntimeError) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "too many links"
