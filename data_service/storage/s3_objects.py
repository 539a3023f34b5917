"""Lists and opens objects on an S3 endpoint; paths are `bucket/key`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO, cast

from pyarrow import fs

from data_service.domain.import_spec import source_not_found
from shared.errors import InvalidArgument, Unavailable, invalid_field


class S3Objects:
    def __init__(self, filesystem: fs.FileSystem) -> None:
        self._filesystem = filesystem

    def size_and_time(self, field: str, uri: str, path: str) -> tuple[int, int]:
        """Return the size in bytes, and when it was modified in nanoseconds since the epoch.

        Raises `NotFound`, `Unavailable`, and `InvalidArgument` if access is denied.
        """
        try:
            info = self._filesystem.get_file_info(path)
        except OSError as error:
            raise _unanswered(field, uri, error) from None
        if info.type != fs.FileType.File:
            raise source_not_found(field, uri)
        return int(info.size), info.mtime_ns or 0

    def open(self, field: str, uri: str, path: str) -> BinaryIO:
        try:
            opened: BinaryIO = self._filesystem.open_input_file(path)
        except FileNotFoundError:
            raise source_not_found(field, uri) from None
        except OSError as error:
            raise _unanswered(field, uri, error) from None
        return opened

    def lister(self, field: str, uri: str) -> Callable[[str], list[tuple[str, bool, int, int]]]:
        """Return a function that lists one folder as (name, is a folder, size in bytes, time of modification in ns).

        The list is empty if the folder does not exist.
        """

        def entries(path: str) -> list[tuple[str, bool, int, int]]:
            try:
                infos = self._filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
            except OSError as error:
                raise _unanswered(field, uri, error) from None
            return [
                (info.base_name, info.type == fs.FileType.Directory, max(info.size or 0, 0), info.mtime_ns or 0)
                for info in infos
            ]

        return entries


def has_size_and_time(opened: BinaryIO, size_bytes: int, modified_ns: int) -> bool:
    """Return whether an open object has this size and time, by the answer to its opening.

    That answer has whole seconds, and a list may have fractions of them.
    """
    answered = cast(Any, opened)
    if answered.size() != size_bytes:
        return False
    modified = answered.metadata().get("Last-Modified")
    if modified is None or not modified_ns:
        return True
    return abs(datetime.fromisoformat(modified.decode()).timestamp() - modified_ns / 1e9) < 1


def _unanswered(field: str, uri: str, error: OSError) -> InvalidArgument | Unavailable:
    if "ACCESS_DENIED" in str(error):
        return invalid_field(field, uri, "the server's S3 credentials may not read it")
    return Unavailable(f"{field}: the S3 endpoint does not answer for {uri}", retry_after_s=1.0)
