"""Encoded images as rows, from a folder or from a tar.

They are checked by decoding them, and labelled by their class folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from data_service.domain.import_spec import is_hidden
from data_service.formats import interface
from data_service.formats.interface import BadRowSink, RowSource, blaming, content, excerpt_of, is_compressed
from data_service.storage.source_files import SourceFile
from shared.errors import InvalidArgument, shown
from shared.transforms.steps.images import why_refused

# --- Tar members ---
# Reads tar archives from front to back: every member's name and content, without writing any file.
#
# Source: POSIX.1-2017 pax (ustar interchange format, extended headers), and GNU tar's manual for its long names and
# base-256 numbers. Links, devices, sparse files and names that lead out of the archive are refused: no data set needs
# them.

BLOCK = 512
MAX_MEMBER_BYTES = 256 * 1024 * 1024
MAX_MEMBERS = 5_000_000
MAX_NAME_BYTES = 64 * 1024
MAX_PAX_BYTES = 1024 * 1024
PIECE_BYTES = 1024 * 1024

_FOLDER, _LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"5", b"L", b"K", b"x", b"g"
_FILES = (b"\0", b"0", b"7")
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}


class TarError(ValueError):
    """The bytes are no complete tar archive, or a member is not allowed; the text says which and why."""


@dataclass(frozen=True)
class TarMember:
    """A regular file in a tar.

    `name` is its path, without `.` and empty parts; names that are no UTF-8 are refused. Its content is available until
    the next member is requested. Its headers begin at byte `begin` of the archive.
    """

    name: str
    size_bytes: int
    begin: int
    _stream: _Content

    def read(self) -> bytes:
        """Return the whole content; may be called once.

        Raises `TarError` if the archive ends within it.
        """
        return self._stream.read_all()


def members(archive: BinaryIO, begin: int = 0, end: int | None = None) -> Iterator[TarMember]:
    """Yield every regular file, in order, up to the very end of the stream.

    The stream begins at byte `begin` of the archive, with the headers of a member. With `end`, only the members whose
    headers begin before this byte are read. Raises `TarError`.
    """
    stream = _Counted(archive, begin)
    count = 0
    extended: dict[str, str] = {}
    while True:
        if not extended:
            begin = stream.position
            if end is not None and begin >= end:
                return
        header = _some(stream, BLOCK)
        if not header:
            raise TarError("it ends without an end marker" if begin or count or extended else "it is empty")
        if len(header) < BLOCK:
            raise TarError("it ends within a header")
        if header == bytes(BLOCK):
            break
        kind, size = header[156:157], _size_of(header, extended)
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            extended |= _extended(stream, kind, size)
            continue
        count += 1
        name = _checked_name(extended.get("path") or _name_of(header))
        _check_kind(kind, name, extended)
        if count > MAX_MEMBERS:
            raise TarError(f"it has more than {MAX_MEMBERS} members")
        if size > MAX_MEMBER_BYTES:
            raise TarError(f"member {shown(name)} has {size} bytes; at most {MAX_MEMBER_BYTES} are read")
        content = _Content(stream, name, size)
        if kind in _FILES and not name.endswith("/"):
            yield TarMember(name, size, begin, content)
        content.skip()
        extended = {}
    while rest := stream.read(PIECE_BYTES):
        if rest.count(0) != len(rest):
            raise TarError("it goes on after its end marker")


class _Counted:
    """A stream that counts its bytes from `position` on."""

    def __init__(self, stream: BinaryIO, position: int) -> None:
        self._stream = stream
        self.position = position

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.position += len(data)
        return data


class _Content:
    def __init__(self, stream: _Counted, name: str, size: int) -> None:
        self._stream, self._name, self._size = stream, name, size
        self._left = size + -size % BLOCK

    def read_all(self) -> bytes:
        data = _some(self._stream, self._size)
        self._left -= len(data)
        if len(data) < self._size:
            raise self._truncated()
        return data

    def skip(self) -> None:
        while self._left:
            data = self._stream.read(min(self._left, PIECE_BYTES))
            if not data:
                raise self._truncated()
            self._left -= len(data)

    def _truncated(self) -> TarError:
        return TarError(f"it ends within member {shown(self._name)}")


def _size_of(header: bytes, extended: dict[str, str]) -> int:
    if not _sum_fits(header):
        raise TarError("a header's checksum is wrong: it is no tar archive, or damaged")
    size = _number(header[124:136])
    if header[156:157] not in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL) and "size" in extended:
        text = extended["size"]
        if not text.isascii() or not text.isdigit() or len(text) > 20:
            raise TarError("an extended header has a size that is no number")
        size = int(text)
    if header[156:157] == _FOLDER:
        return 0
    return size


def _sum_fits(header: bytes) -> bool:
    """Return whether the header's checksum is right; some old writers summed signed bytes."""
    rest = header[:148] + b" " * 8 + header[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in rest)
    try:
        return _number(header[148:156]) in (sum(rest), signed)
    except TarError:
        return False


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # base 256; a negative number begins with 0xFF
        if field[0] != 0x80:
            raise TarError("a header has a number that is out of range")
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0")
    if not text:
        return 0
    if any(byte not in b"01234567" for byte in text):
        raise TarError("a header has a number that is none")
    return int(text, 8)


def _extended(stream: _Counted, kind: bytes, size: int) -> dict[str, str]:
    """Read an extended header: a member's name, its size, whether it is sparse."""
    most = MAX_NAME_BYTES if kind in (_LONG_NAME, _LONG_LINK) else MAX_PAX_BYTES
    if size > most:
        raise TarError(f"an extended header has {size} bytes; at most {most} are read")
    content = _Content(stream, "an extended header", size)
    data = content.read_all()
    content.skip()
    if kind == _LONG_NAME:
        return {"path": _text(data.split(b"\0")[0])}
    if kind == _LONG_LINK:
        return {}
    found = dict(_pax_records(data))
    # Global headers apply to all following members; they matter only if they name or size them.
    if kind == _PAX_GLOBAL:
        if not found.keys().isdisjoint(("path", "size")):
            raise TarError("a global extended header names or sizes all members")
        return {}
    return found


def _pax_records(data: bytes) -> Iterator[tuple[str, str]]:
    """Parse records `length key=value\\n`, where the length includes itself."""
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 8)
        length = data[at:space] if space > 0 else b""
        if not length.isdigit() or int(length) <= space - at + 1 or at + int(length) > len(data):
            raise TarError("an extended header is damaged")
        key, equals, value = data[space + 1 : at + int(length) - 1].partition(b"=")
        if not equals:
            raise TarError("an extended header is damaged")
        key_text = key.decode("utf-8", "replace")
        if key_text in ("path", "size"):
            yield key_text, _text(value)
        elif key_text.startswith("GNU.sparse"):
            yield "sparse", "1"
        at += int(length)


def _name_of(header: bytes) -> str:
    name = header[:100].split(b"\0")[0]
    prefix = header[345:500].split(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise TarError(f"member {shown(name)} has a name that is not UTF-8") from None


def _checked_name(name: str) -> str:
    if not name or "\0" in name:
        raise TarError(f"member {shown(name)} has no name, or a zero byte in it")
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        raise TarError(f"member {shown(name)} has a name of {size} bytes; at most {MAX_NAME_BYTES} are read")
    if name.startswith("/"):
        raise TarError(f"member {shown(name)} has an absolute path")
    parts = name.split("/")
    if ".." in parts:
        raise TarError(f"member {shown(name)} has '..' in its path")
    return "/".join(part for part in parts if part not in ("", ".")) + ("/" if name.endswith("/") else "")


def _check_kind(kind: bytes, name: str, extended: dict[str, str]) -> None:
    refused = "a sparse file" if "sparse" in extended else _REFUSED.get(kind)
    if refused is None and kind not in (*_FILES, _FOLDER):
        refused = f"of the unknown kind {kind!r}"
    if refused is not None:
        raise TarError(f"member {shown(name)} is {refused}; archive regular files")


def _some(stream: _Counted, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end.

    Memory grows with the bytes read, not with the size that the archive claims.
    """
    pieces = []
    while size > 0 and (piece := stream.read(min(size, PIECE_BYTES))):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


# --- Images ---
# Encoded images as rows: checked by decoding them, labelled by their class folders.

# The suffixes that torchvision's ImageFolder reads and `decode_image` supports. Other files are ignored, as in
# torchvision.
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
MAX_IMAGE_BYTES = 256 * 1024 * 1024
MAX_CLASSES = 100_000
BATCH_BYTES = 4 * 1024 * 1024
BATCH_ROWS = 256
# The maximum images of one part of a source.
PART_IMAGES = 2000

SCHEMA = pa.schema(
    [
        pa.field("image", pa.binary(), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
    ]
)


def is_image_name(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def problem_of(data: bytes) -> str | None:
    """Return why `decode_image` would refuse these bytes; None if it would not.

    Only the first frame of an animation or page of a TIFF is checked: no other is ever used.
    """
    if len(data) > MAX_IMAGE_BYTES:
        return f"it has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are read"
    try:
        refusal = why_refused(data)
    except MemoryError:  # hostile bytes can make a decoder raise this, whatever memory there is
        return "it takes more memory to decode than there is"
    return None if refusal is None else f"it {refusal}"


class ClassNames:
    """The classes of all image sources of a version.

    Labels are the classes' indices in the byte order of their names.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._sorted: list[str] | None = None
        self._labels: dict[str, int] = {}

    def add(self, names: Iterable[str]) -> None:
        """Add class names; raise `InvalidArgument` for more than `MAX_CLASSES`."""
        self._names.update(names)
        self._sorted = None
        if len(self._names) > MAX_CLASSES:
            raise InvalidArgument(
                f"sources: their images have more than {MAX_CLASSES} classes; a class is the folder that images are in",
                reason="TOO_MANY_CLASSES",
                metadata={"field": "sources"},
                fields=[("sources", f"name images of at most {MAX_CLASSES} classes")],
            )

    @property
    def names(self) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted(self._names, key=lambda name: name.encode("utf-8", "surrogateescape"))
            self._labels = {name: label for label, name in enumerate(self._sorted)}
        return self._sorted

    def label(self, name: str) -> int:
        """Return the label of a class; call it only once all sources are open.

        Another class would change the labels.
        """
        if self._sorted is None or name not in self._labels:
            _ = self.names
        return self._labels[name]


class ImageBatch:
    """Collects rows until there are enough for a table."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int, str]] = []
        self._bytes = 0

    @property
    def full(self) -> bool:
        return self._bytes >= BATCH_BYTES or len(self._rows) >= BATCH_ROWS

    def add(self, data: bytes, label: int, path: str) -> None:
        self._rows.append((data, label, path))
        self._bytes += len(data)

    def taken(self) -> pa.Table | None:
        """Return the rows so far and forget them; None if there are none."""
        if not self._rows:
            return None
        columns = zip(*self._rows, strict=True)
        arrays = [pa.array(values, kind) for values, kind in zip(columns, SCHEMA.types, strict=True)]
        self._rows, self._bytes = [], 0
        return pa.Table.from_arrays(arrays, schema=SCHEMA)


# --- Image folder ---
# A folder with a folder of images for each class, in the layout of torchvision's ImageFolder.

MAX_IMAGES = 2_000_000


class ImageFolder:
    """The images in a folder.

    `files` are all files below the folder, in order. The first folder on a file's path is its class, however deep the
    file lies. Files without an image suffix are ignored. Both are as in torchvision. An image in no class folder is a
    bad row.
    """

    schema = SCHEMA

    def __init__(self, files: Sequence[SourceFile], classes: ClassNames) -> None:
        """Raise `InvalidArgument` if no file is an image, or a name is no UTF-8."""
        self._set_images([file for file in files if is_image_name(file.relative)])
        if not self._images:
            raise files[0].corrupt("its folder has no image in a folder of a class")
        for file in self._images:
            if not _is_utf8(file.relative):
                raise file.corrupt("its name is not UTF-8, as the column path has to be")
        self._classes = classes
        classes.add({file.relative.split("/")[0] for file in self._images if "/" in file.relative})

    def _set_images(self, images: Sequence[SourceFile]) -> None:
        self._images = images
        self.row_count: int | None = sum("/" in file.relative for file in images)
        self.size_bytes = sum(file.size_bytes or 0 for file in images)

    @property
    def class_names(self) -> list[str] | None:
        return self._classes.names

    def parts(self) -> Sequence[RowSource]:
        """Divide the images into batches."""
        batches: list[list[SourceFile]] = [[]]
        size_bytes = 0
        for file in self._images:
            if size_bytes >= interface.PART_BYTES or len(batches[-1]) >= PART_IMAGES:
                batches.append([])
                size_bytes = 0
            batches[-1].append(file)
            size_bytes += file.size_bytes or 0
        return [self._only(images) for images in batches] if len(batches) > 1 else [self]

    def _only(self, images: Sequence[SourceFile]) -> ImageFolder:
        part = copy(self)
        part._set_images(images)
        return part

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        batch = ImageBatch()
        for file in self._images:
            name, slash, _ = file.relative.partition("/")
            with closing(file.open()) as opened, blaming(file, "image"):
                data = bytes(opened.read(MAX_IMAGE_BYTES + 1))
            problem = problem_of(data) if slash else "it lies in no folder of a class"
            if problem is not None:
                bad.add(file.uri, f"file {file.relative}", problem, excerpt_of(data))
                continue
            batch.add(data, self._classes.label(name), file.relative)
            if batch.full and (table := batch.taken()) is not None:
                yield table
        if (table := batch.taken()) is not None:
            yield table


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# --- Tar of images ---
# A tar of a folder of images, read from front to back: an upload is read while it grows.


class ImageTar:
    """The images in a tar.

    The last two parts of a member's path are its class and its name. Members without an image suffix, and hidden ones,
    are ignored; hostile ones (see above) fail the whole archive. An image in no folder is a bad row. Opening reads all
    names, since labels need every class.
    """

    schema = SCHEMA

    def __init__(self, file: SourceFile, classes: ClassNames) -> None:
        """Raise `InvalidArgument` for a damaged archive, or one without an image."""
        self._file = file
        self._classes = classes
        self._part: _TarPart | None = None
        found: set[str] = set()
        cutter = _TarCutter()
        with self._opened() as stream:
            can_be_divided = not is_compressed(stream)
            for member in filter(_is_image, members(stream)):
                parent, _ = _class_and_name(member)
                if can_be_divided:
                    cutter.pass_member(member)
                cutter.add(is_row=bool(parent))
                if parent and parent not in found:
                    found.add(parent)
                    classes.add([parent])
        if not cutter.image_count:
            raise file.corrupt("it has no image in a folder of a class")
        self._parts = cutter.parts()
        self.row_count: int | None = sum(part.row_count for part in self._parts)
        self.size_bytes = file.size_bytes or cutter.bytes_passed

    @property
    def class_names(self) -> list[str] | None:
        return self._classes.names

    def parts(self) -> Sequence[RowSource]:
        """Divide the archive between members, unless it is compressed."""
        return [self._only(part) for part in self._parts] if len(self._parts) > 1 else [self]

    def _only(self, part: _TarPart) -> ImageTar:
        rows = copy(self)
        rows._part, rows._parts = part, [part]
        rows.row_count = part.row_count
        rows.size_bytes = max((self.size_bytes if part.end is None else part.end) - part.begin, 0)
        return rows

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        batch = ImageBatch()
        begin, end = (self._part.begin, self._part.end) if self._part else (0, None)
        with self._opened(begin) as stream:
            for member in filter(_is_image, members(stream, begin, end)):
                parent, name = _class_and_name(member)
                data = member.read()
                problem = problem_of(data) if parent else "it lies in no folder of a class"
                if problem is not None:
                    bad.add(self._file.uri, f"member {member.name}", problem, excerpt_of(data))
                    continue
                batch.add(data, self._classes.label(parent), f"{parent}/{name}")
                if batch.full and (table := batch.taken()) is not None:
                    yield table
        if (table := batch.taken()) is not None:
            yield table

    @contextmanager
    def _opened(self, begin: int = 0) -> Iterator[BinaryIO]:
        with blaming(self._file, "tar"), content(self._file, begin) as stream:
            try:
                yield stream
            except TarError as error:
                raise self._file.corrupt(str(error)) from None


@dataclass(frozen=True)
class _TarPart:
    """The members whose headers begin in these bytes; with `end` None up to the end of the archive."""

    begin: int
    end: int | None
    row_count: int


class _TarCutter:
    """Chooses the cuts of one archive while its members are read."""

    def __init__(self) -> None:
        self._parts: list[_TarPart] = []
        self._begin = self._row_count = self._images = 0
        self.image_count = self.bytes_passed = 0

    def pass_member(self, member: TarMember) -> None:
        """Cut before this image if the part that ends there is large enough."""
        self.bytes_passed = member.begin + member.size_bytes
        if member.begin - self._begin >= interface.PART_BYTES or self._images >= PART_IMAGES:
            self._parts.append(_TarPart(self._begin, member.begin, self._row_count))
            self._begin, self._row_count, self._images = member.begin, 0, 0

    def add(self, *, is_row: bool) -> None:
        """Count an image, which is a row if it lies in the folder of a class."""
        self.image_count += 1
        self._images += 1
        self._row_count += is_row

    def parts(self) -> list[_TarPart]:
        return [*self._parts, _TarPart(self._begin, None, self._row_count)]


def _class_and_name(member: TarMember) -> tuple[str, str]:
    parts = member.name.split("/")
    return (parts[-2] if len(parts) > 1 else ""), parts[-1]


def _is_image(member: TarMember) -> bool:
    return is_image_name(member.name) and not any(map(is_hidden, _class_and_name(member)))
