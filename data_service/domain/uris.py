"""Source URIs: the allowed ones, the files that a pattern matches, and the error for missing ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from urllib.parse import unquote

from shared.errors import NotFound
from shared.names import ID

# --- Globs ---
# The files that a path with `*`, `?` and `**`, or one that ends in `/`, matches.
#
# `*` matches any characters of one name, `?` one character, `**` as a whole name any number of folders, including none.
# Names that begin with `.` or `_` below the folder where the pattern begins never match.

# Deeper than people nest folders. A deeper folder is refused, never skipped silently.
MAX_DEPTH = 64
ANY_FOLDERS = "**"


@dataclass(frozen=True)
class Glob:
    """A pattern.

    `names` are the names of a path relative to a folder, percent-encoded and with wildcards.
    """

    names: tuple[str, ...]

    @property
    def everything(self) -> bool:
        """Whether all files below the folder match."""
        return self.names == (ANY_FOLDERS,)

    @property
    def depth(self) -> int | None:
        """The number of names in a matching path; None for any number."""
        return None if ANY_FOLDERS in self.names else len(self.names)

    def matches(self, relative: str) -> bool:
        """Returns whether the path matches.

        Follows all readings in parallel: no pattern takes longer than names times wildcards.
        """
        states = self._with_skips({0})
        for name in relative.split("/"):
            following = set()
            for state in states:
                if state == len(self.names):
                    continue
                if self.names[state] == ANY_FOLDERS:
                    following.add(state)
                elif _expression(self.names[state]).fullmatch(name):
                    following.add(state + 1)
            states = self._with_skips(following)
        return len(self.names) in states

    def _with_skips(self, states: Iterable[int]) -> set[int]:
        """Adds the states in which a `**` matches no folder."""
        reached = set()
        for state in states:
            reached.add(state)
            while state < len(self.names) and self.names[state] == ANY_FOLDERS:
                state += 1
                reached.add(state)
        return reached


def parse_glob(quoted_path: str) -> tuple[str, Glob | None]:
    """Splits a percent-encoded path before its first wildcard.

    Returns the folder (or file) before it, still encoded, and the pattern below it; None if the path names one file.
    """
    if quoted_path.endswith("/") and not re.search(r"[*?]", quoted_path):
        return quoted_path.rstrip("/") or "/", Glob((ANY_FOLDERS,))
    first = re.search(r"[*?]", quoted_path)
    if first is None:
        return quoted_path, None
    cut = quoted_path.rfind("/", 0, first.start()) + 1
    names = [name for name in quoted_path[cut:].split("/") if name]
    if quoted_path.endswith("/"):
        names.append(ANY_FOLDERS)
    return quoted_path[:cut].rstrip("/") or "/", Glob(tuple(names))


def is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


@lru_cache(maxsize=1024)
def _expression(name: str) -> re.Pattern[str]:
    pieces = [piece for piece in re.split(r"(\*+)", name) if piece]
    # The first position where the text after a star fits is as good as any later one, so there is no backtracking.
    parts = []
    for index, piece in enumerate(pieces):
        if not piece.startswith("*"):
            parts.append(_literal(piece) if index == 0 else "")
        elif index == len(pieces) - 1:
            parts.append(".*")
        elif index == len(pieces) - 2:
            parts.append(f".*{_literal(pieces[index + 1])}")
        else:
            parts.append(f"(?>.*?{_literal(pieces[index + 1])})")
    return re.compile("".join(parts), re.DOTALL)


def _literal(text: str) -> str:
    return "".join(
        "." if piece == "?" else re.escape(unquote(piece, errors="surrogateescape"))
        for piece in re.split(r"(\?)", text)
    )


# --- Uris ---
# Source URIs: the files that a client may import.

MAX_URI = 2048
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class UriRefused(ValueError):
    """The URI is refused; the text is the remedy."""


@dataclass(frozen=True)
class FileSource:
    """An absolute path without `..`.

    `glob` selects files below it; None: it is one file itself.
    """

    path: PurePosixPath
    glob: Glob | None = None

    @property
    def single(self) -> bool:
        return self.glob is None

    @property
    def folder(self) -> bool:
        return self.glob is not None and self.glob.everything


@dataclass(frozen=True)
class S3Source:
    """An object, or objects, on S3.

    `key` is that of one object; with a `glob`, of the folder below which it searches, which may be empty.
    """

    bucket: str
    key: str
    glob: Glob | None = None

    @property
    def single(self) -> bool:
        return self.glob is None

    @property
    def folder(self) -> bool:
        return self.glob is not None and self.glob.everything


@dataclass(frozen=True)
class UploadSource:
    """An upload: `datasets/{d}/uploads/{u}`."""

    name: str
    single = True
    folder = False


def parse_uri(uri: str) -> FileSource | S3Source | UploadSource:
    """Parses a URI; names are taken as bytes, without normalisation.

    Raises `UriRefused`.
    """
    if not uri or len(uri) > MAX_URI:
        raise UriRefused(f"use a URI of 1 to {MAX_URI} characters")
    if uri.startswith("datasets/"):
        return _upload(uri)
    scheme, colon, rest = uri.partition(":")
    if not colon or scheme not in ("file", "s3"):
        raise UriRefused("use the scheme file or s3, or the name of an upload, datasets/{d}/uploads/{u}")
    if "#" in rest:
        raise UriRefused("leave out '#'; write it as %23 in a name")
    host, raw_path = _host_and_path(rest)
    whole = _unquoted(raw_path)
    if "\0" in whole:
        raise UriRefused("no name of a file has a zero byte")
    if ".." in whole.split("/"):
        raise UriRefused(
            "use an absolute path without '..'" if scheme == "file" else "use s3://bucket/key without '..'"
        )
    folder, glob = parse_glob(raw_path)
    path = _unquoted(folder)
    if scheme == "file":
        if host:
            raise UriRefused("use file:///absolute/path: three slashes, no host")
        if not path.startswith("/"):
            raise UriRefused("use an absolute path without '..'")
        # Two leading slashes have their own meaning in POSIX.
        return FileSource(PurePosixPath("/" + path.lstrip("/")), glob)
    key = path.removeprefix("/")
    if host and not _BUCKET.fullmatch(host):
        raise UriRefused("use s3://bucket/key; a bucket's name has 3 to 63 of a-z, 0-9, '.' and '-'")
    if not host or (not key and glob is None) or not _is_utf8(key):
        raise UriRefused("use s3://bucket/key")
    return S3Source(host, key, glob)


def check_allowed(source: FileSource | S3Source | UploadSource, roots: Sequence[PurePosixPath], *, s3: bool) -> None:
    """Raises `UriRefused` unless the server may read the source.

    A file is judged by its path text: the code that opens it must resolve links.
    """
    if isinstance(source, UploadSource):
        return
    if isinstance(source, S3Source):
        if not s3:
            raise UriRefused("this server has no S3 endpoint; it reads s3:// only where its own store is s3://")
        return
    if not roots:
        raise UriRefused("this server reads no local files; start it with MILLRACE_IMPORT_ROOTS set to their folder")
    if not any(source.path.is_relative_to(root) for root in roots):
        raise UriRefused("this path is not below a folder of the server's MILLRACE_IMPORT_ROOTS; upload it instead")


def _upload(name: str) -> UploadSource:
    parts = name.split("/")
    if len(parts) != 4 or parts[2] != "uploads" or not ID.fullmatch(parts[1]) or not ID.fullmatch(parts[3]):
        raise UriRefused("use datasets/{d}/uploads/{u} for an upload")
    return UploadSource(name)


def _host_and_path(rest: str) -> tuple[str, str]:
    """Splits the text after the scheme's colon; there is a host only after two slashes."""
    if not rest.startswith("//"):
        return "", rest
    host, slash, path = rest[2:].partition("/")
    return host, slash + path


def _unquoted(text: str) -> str:
    # Python's spelling of file names: bytes that are no UTF-8 survive.
    return unquote(text, errors="surrogateescape")


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# --- Source errors ---
# Errors about files that an import names.


def source_not_found(field: str, uri: str, remedy: str = "name a file that exists") -> NotFound:
    return NotFound(
        f"{field}: {uri} does not exist",
        reason="SOURCE_NOT_FOUND",
        metadata={"field": field, "uri": uri},
        fields=[(field, remedy)],
    )
