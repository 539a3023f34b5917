"""Lists and opens local files below allowed roots.

Links are resolved first. Then the path without links is opened name by name, each relative to the one before and
without following a link. So the opened file is the checked one, even if a folder is replaced by a link meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from data_service.domain.import_spec import source_not_found
from shared.errors import InvalidArgument, Unavailable, invalid_field

_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
# Errors of a disk, of a network file system, or of a process with too many open files. Another try may meet none.
_PASSING = frozenset(
    (
        errno.EIO,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
    )
)


class LocalFiles:
    def __init__(self, roots: Sequence[PurePosixPath]) -> None:
        self._roots = [Path(root).resolve() for root in roots]

    def open(self, field: str, uri: str, path: str) -> BinaryIO:
        """Open a file.

        Raises `NotFound`, `Unavailable`, and `InvalidArgument` for anything but a regular file below a root.
        """
        # Opening a pipe must not block.
        descriptor = self._descriptor(field, uri, path, os.O_NONBLOCK)
        try:
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except OSError as error:
            os.close(descriptor)
            raise refusal(field, uri, "open", error) from None
        if not is_regular:
            os.close(descriptor)
            raise invalid_field(field, uri, "name a regular file")
        return os.fdopen(descriptor, "rb")

    def lister(self, field: str, uri: str) -> Callable[[str], list[tuple[str, bool, int, int]]]:
        """Return a function that lists one folder as (name, is a folder, size in bytes, time of modification in ns).

        Links count as their targets, as in torchvision's ImageFolder; broken links, pipes, sockets and devices are left
        out. The function raises `NotFound`, `Unavailable` and `InvalidArgument`.
        """

        def entries(path: str) -> list[tuple[str, bool, int, int]]:
            descriptor = self._descriptor(field, uri, path, os.O_DIRECTORY)
            try:
                with os.scandir(descriptor) as scanned:
                    found = [_entry(descriptor, one) for one in scanned]
            except OSError as error:
                raise refusal(field, uri, "list", error) from None
            finally:
                os.close(descriptor)
            return [one for one in found if one is not None]

        return entries

    def _descriptor(self, field: str, uri: str, path: str, flags: int) -> int:
        try:
            resolved = Path(path).resolve(strict=True)
            root = next((root for root in self._roots if resolved.is_relative_to(root)), None)
            if root is None:
                raise invalid_field(field, uri, "a link leads out of the folders of MILLRACE_IMPORT_ROOTS")
            return _open_below(root, resolved.relative_to(root).parts, os.O_RDONLY | flags)
        except (FileNotFoundError, NotADirectoryError):
            raise source_not_found(field, uri) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise refusal(field, uri, "open", error) from None


def refusal(field: str, uri: str, verb: str, error: Exception) -> InvalidArgument | Unavailable:
    """Return the error for a file or folder that the server cannot open, list or read.

    Another attempt may succeed after an error of the disk or the network.
    """
    if isinstance(error, OSError) and error.errno in _PASSING:
        return Unavailable(f"{field}: the server cannot {verb} {uri} at present: {_cause(error)}", retry_after_s=1.0)
    return invalid_field(field, uri, f"the server cannot {verb} it: {_cause(error)}")


def size_and_time_of(field: str, uri: str, opened: BinaryIO) -> tuple[int, int]:
    """Return the size in bytes, and when it was modified in nanoseconds since the epoch.

    Raises `Unavailable`.
    """
    try:
        found = os.fstat(opened.fileno())
    except OSError as error:
        opened.close()
        raise refusal(field, uri, "open", error) from None
    return found.st_size, found.st_mtime_ns


def _open_below(root: Path, names: Sequence[str], flags: int) -> int:
    """Open `root/names…` without following any link below the root."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
    try:
        for name in names[:-1]:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK, dir_fd=at)
            os.close(at)
            at = below
        return os.open(names[-1] if names else ".", flags | _NO_LINK, dir_fd=at)
    finally:
        os.close(at)


def _entry(folder: int, entry: os.DirEntry[str]) -> tuple[str, bool, int, int] | None:
    name = os.fsdecode(entry.name)
    try:
        found = os.stat(name, dir_fd=folder)
    except OSError as error:
        if error.errno in _PASSING:
            raise  # to leave the file out would lose its rows
        return None  # a broken link, or a file that was just deleted
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return None
    return name, stat.S_ISDIR(found.st_mode), found.st_size, found.st_mtime_ns


def _cause(error: Exception) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "too many links"
