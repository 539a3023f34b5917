"""Source URIs: which files a client may have imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

MAX_URI = 2048
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class UriRefused(ValueError):
    """The text is the remedy."""


@dataclass(frozen=True)
class FileSource:
    """An absolute path without `..`."""

    path: PurePosixPath


@dataclass(frozen=True)
class S3Source:
    bucket: str
    key: str


def parse_uri(uri: str) -> FileSource | S3Source:
    """Raises `UriRefused`."""
    if not uri or len(uri) > MAX_URI:
        raise UriRefused(f"use a URI of 1 to {MAX_URI} characters")
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise UriRefused("use file:///absolute/path or s3://bucket/key") from None
    if parts.query or parts.fragment:
        raise UriRefused("leave out '?' and '#'; write them as %3F and %23 in a name")
    path = unquote(parts.path)
    if "\0" in path:
        raise UriRefused("no name of a file has a zero byte")
    if parts.scheme == "file":
        if parts.netloc:
            raise UriRefused("use file:///absolute/path: three slashes, no host")
        return FileSource(_absolute(path))
    if parts.scheme == "s3":
        key = path.removeprefix("/")
        if not _BUCKET.fullmatch(parts.netloc) or not key or ".." in key.split("/"):
            raise UriRefused("use s3://bucket/key")
        return S3Source(parts.netloc, key)
    raise UriRefused("use the scheme file or s3")


def check_allowed(source: FileSource | S3Source, roots: Sequence[PurePosixPath], *, s3: bool) -> None:
    """Raises `UriRefused` unless the server may read the source. A file is judged by its spelling: whoever opens it
    must look through links."""
    if isinstance(source, S3Source):
        if not s3:
            raise UriRefused("this server has no S3 endpoint; it reads s3:// only where its own store is s3://")
        return
    if not roots:
        raise UriRefused("this server reads no local files; start it with MILLRACE_IMPORT_ROOTS set to their folder")
    if not any(source.path.is_relative_to(root) for root in roots):
        raise UriRefused("this path is not below a folder of MILLRACE_IMPORT_ROOTS of the server")


def _absolute(path: str) -> PurePosixPath:
    found = PurePosixPath(path)
    if not found.is_absolute() or ".." in found.parts:
        raise UriRefused("use an absolute path without '..'")
    # Two leading slashes are a path of their own in POSIX.
    return PurePosixPath("/" + path.lstrip("/"))
