"""Packs a folder of code into one file whose bytes depend only on the names and contents of its files.

The client packs with this module, and the services check and unpack with it, so it needs only the standard library;
`unmet` alone needs more.

A bundle is a tar archive (POSIX.1-1988 ustar) in one canonical form: regular files only, sorted by the bytes of their
paths, no owners, mode 0644, mtime 0, two blocks of zeros at the end. It is not compressed: the output of deflate
differs between builds of zlib, so the digest would differ between machines. Two properties follow. A bundle cannot be a
decompression bomb. And `check` accepts exactly the bytes that `pack` makes of the unpacked files, so unpacking and
packing again always gives the same digest.

    facts = pack(Path("project"), file)       # a folder, a wheel or one .py file
    facts = check(file)                        # of untrusted bytes
    unpack(file, Path("empty-folder"))         # checks in the same pass

All three raise `NotABundle`, whose text names the path and the remedy.

The requirements of a bundle are read from its files, and compared with the installed packages. No code of the bundle is
run.
"""

from __future__ import annotations

import email
import fnmatch
import hashlib
import io
import os
import re
import stat
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shared.errors import shown

# --- Requirements ---

# Only the first of these that a bundle has at its root is read.
DECLARING_FILES = ("requirements.lock", "requirements.txt")
METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
# Under this name a wheel's Requires-Python is a requirement like others.
PYTHON = "python"
MAX_REQUIREMENTS = 1_000
MAX_REQUIREMENT_CHARACTERS = 8_192
# Options for an installer's sources. They are not read: the node's operator decides where packages come from.
INSTALLER_OPTIONS = (
    "-i",
    "--index-url",
    "--extra-index-url",
    "--no-index",
    "-f",
    "--find-links",
    "--no-binary",
    "--only-binary",
    "--prefer-binary",
    "--require-hashes",
    "--pre",
    "--trusted-host",
    "--use-feature",
)
HASH = re.compile(r"\s--hash[= ]\S+")


class RequirementsError(ValueError):
    """A requirement that cannot be checked. The text names file, line and remedy."""


def is_declaration(path: str) -> bool:
    """Return whether `declared_requirements` reads a bundle's file of that path."""
    return path in DECLARING_FILES or METADATA.fullmatch(path) is not None


def declared_requirements(files: Mapping[str, bytes]) -> list[str]:
    """Return a bundle's requirements as written, with their hashes.

    `files` are its declarations by path. Raises `RequirementsError`.
    """
    found: dict[str, None] = {}
    for path in (*[one for one in DECLARING_FILES if one in files][:1], *filter(METADATA.fullmatch, sorted(files))):
        try:
            text = files[path].decode("utf-8-sig")
        except UnicodeDecodeError:
            raise RequirementsError(f"{path} is not UTF-8: save it as UTF-8") from None
        of_metadata = METADATA.fullmatch(path) is not None
        for requirement in _of_metadata(text) if of_metadata else _of_requirements_file(path, text):
            if len(requirement) > MAX_REQUIREMENT_CHARACTERS:
                raise RequirementsError(f"{path}: {shown(requirement)} is too long")
            found[requirement] = None
    if len(found) > MAX_REQUIREMENTS:
        raise RequirementsError(f"{len(found):,} requirements are declared; the most is {MAX_REQUIREMENTS:,}")
    return list(found)


def _of_requirements_file(path: str, text: str) -> Iterable[str]:
    """Parse pip's format: one requirement per line, `\\` continues a line, ` #` begins a comment."""
    whole, begun = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        begun = begun if whole else number
        if line.endswith("\\"):
            whole += line[:-1] + " "
            continue
        requirement, whole = " ".join((whole + line).split()), ""
        if not requirement or re.split("[= ]", requirement)[0] in INSTALLER_OPTIONS:
            continue
        if requirement.startswith("-") or re.match(r"(\.{0,2}/|[a-z][a-z0-9+]*://)", requirement, re.IGNORECASE):
            remedy = "write requirements by name and version"
            raise RequirementsError(f"{path}:{begun}: {shown(requirement)} cannot be checked: {remedy}")
        yield requirement
    if whole.strip():
        raise RequirementsError(f"{path}:{begun}: the last line goes on with '\\': take that away")


def _of_metadata(text: str) -> Iterable[str]:
    message = email.message_from_string(text)
    # A header may be folded over lines.
    found = [" ".join(str(one).split()) for one in message.get_all("Requires-Dist", [])]
    return [*(f"{PYTHON}{''.join(str(one).split())}" for one in message.get_all("Requires-Python", [])), *found]


def requirements_of_folder(folder: Path) -> list[str]:
    """Return the requirements of a bundle that is unpacked in `folder`. Raises `RequirementsError`."""
    paths = [folder / name for name in DECLARING_FILES] + sorted(folder.glob("*.dist-info/METADATA"))
    return declared_requirements(
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.exists()}
    )


def unmet(requirements: Iterable[str], installed: Callable[[str], str | None]) -> list[tuple[str, str]]:
    """Return the requirements that are not met, each with the problem.

    `installed` returns the version of a distribution, or None. Hashes are not compared, because an installed
    distribution does not know which archive it came from. A requirement whose marker is not for this machine, or for an
    extra, counts as met.
    """
    from packaging.requirements import Requirement

    problems = []
    for text in requirements:
        bare = HASH.sub("", f" {text}").strip()
        try:
            requirement = Requirement(bare)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
        except RecursionError:
            problems.append((bare, "it is no requirement: its parentheses are nested too deep"))
            continue
        # `InvalidRequirement`, a marker that compares what cannot be compared, or a number of thousands of digits.
        except ValueError as error:
            problems.append((bare, f"it is no requirement: {str(error).splitlines()[0]}"))
            continue
        if requirement.url:
            problems.append((bare, "it names an address: name a version"))
            continue
        version = installed(requirement.name)
        if version is None:
            problems.append((bare, f"{requirement.name} is not installed"))
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append((bare, f"{requirement.name} {version} is installed"))
    return problems


# --- Packing ---

MAX_BUNDLE_BYTES = 64 * 1024 * 1024
MAX_FILES = 10_000
# UTF-8 bytes. A tar header holds a name of 100 bytes and a prefix of 155.
MAX_PATH_BYTES = 240
# The total size of the files that declare requirements.
MAX_DECLARATION_BYTES = 1024 * 1024
MAX_MODULES = 1_000

IGNORE_FILE = ".millraceignore"
MAX_IGNORE_BYTES = 64 * 1024
MAX_IGNORE_PATTERNS = 1_000
# Names of files and folders that are never packed, at any depth. Folders that hold a virtual environment are not packed
# either.
SKIPPED = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    "*.pyc",
    "*.pyo",
    ".venv",
    ".tox",
    ".nox",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".ipynb_checkpoints",
    ".DS_Store",
    "*.egg-info",
)

BLOCK = 512
END = bytes(2 * BLOCK)
COPY_BYTES = 1024 * 1024
NAME_BYTES, PREFIX_BYTES = 100, 155
KINDS_OF_ENTRIES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a folder of its own",
    b"6": "a named pipe",
}


class NotABundle(ValueError):
    """The folder cannot be packed, or the bytes are no bundle.

    `too_large` is set if the size or the number of files is the reason.
    """

    def __init__(self, message: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


@dataclass(frozen=True)
class BundleFacts:
    """Facts about a bundle.

    `sha256` and `size_bytes` are of the packed bytes, `unpacked_size_bytes` is the sum over the files. `requirements`
    are the declared ones, one each; `modules` are the sorted top-level modules.
    """

    sha256: str
    size_bytes: int
    unpacked_size_bytes: int
    file_count: int
    requirements: tuple[str, ...]
    modules: tuple[str, ...]


# Opens one file of a folder or wheel for reading.
_Opener = Callable[[], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True)
class _Source:
    path: str
    size_bytes: int
    open: _Opener


def pack(source: Path, file: BinaryIO) -> BundleFacts:
    """Write the bundle of a folder, a wheel or one Python file to `file`, from its present position.

    Raises `NotABundle` for links, devices, paths that no bundle can have, too many or too large files, and files that
    change meanwhile; `OSError` for unreadable files.
    """
    if source.is_dir():
        return _pack(_folder_files(source), file)
    if source.suffix == ".whl" and source.is_file():
        try:
            with zipfile.ZipFile(source) as wheel:
                return _pack(_wheel_files(wheel), file)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise NotABundle(f"{source} is not a wheel: {error}") from None
    if source.suffix == ".py" and source.is_file():
        return _pack([_local_source(source.name, source)], file)
    source.stat()  # raises FileNotFoundError with its name
    raise NotABundle(f"{source}: name a folder, a wheel (.whl) or a Python file (.py)")


def digest_of_folder(folder: Path) -> str:
    """Return the digest of the bundle that the folder was unpacked from, if it is unchanged.

    Only `__pycache__` is skipped. Raises as `pack`.
    """
    return _pack(_folder_files(folder, skipped=("__pycache__",), ignore_file=False), _Discarded()).sha256


def check(file: BinaryIO) -> BundleFacts:
    """Check a bundle from the file's present position to its end, in bounded memory.

    Raises `NotABundle` for anything but the canonical bytes of allowed files.
    """
    reader = _Reader(file)
    for _ in reader.entries():
        pass
    return reader.facts()


def unpack(file: BinaryIO, folder: Path) -> BundleFacts:
    """Check a bundle as `check` does, and write its files below the empty `folder`.

    After an error some of the files are there.
    """
    reader = _Reader(file)
    for path, chunks in reader.entries():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as opened:
            for chunk in chunks:
                opened.write(chunk)
    return reader.facts()


def _pack(sources: Iterable[_Source], file: BinaryIO) -> BundleFacts:
    paths = _Paths()
    # Names that are not UTF-8 contain lone surrogates. `_Paths.add` refuses them by name.
    found = sorted(sources, key=lambda one: one.path.encode(errors="surrogatepass"))
    writer = _Writer(file)
    for source in found:
        paths.add(source.path)
        with source.open() as opened:
            writer.add(source.path, source.size_bytes, opened)
    return writer.end()


class _Facts:
    """Collector of a bundle's facts while its entries are processed."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0
        self._unpacked = 0
        self._files = 0
        self._modules: set[str] = set()
        self._declarations: dict[str, bytearray] = {}
        self._declared_bytes = 0

    def begin(self, path: str, size_bytes: int) -> bytearray | None:
        """Count a file. If a buffer is returned, fill it with the file's content."""
        self._files += 1
        if self._files > MAX_FILES:
            raise NotABundle(f"more than {MAX_FILES:,} files: {_keep_out('the rest')}", too_large=True)
        self._unpacked += size_bytes
        top, _, below = path.partition("/")
        if below.endswith(".py") or (not below and path.endswith(".py")):
            name = top if below else top.removesuffix(".py")
            if name.isidentifier() and len(self._modules) < MAX_MODULES:
                self._modules.add(name)
        if not is_declaration(path):
            return None
        self._declared_bytes += size_bytes
        if self._declared_bytes > MAX_DECLARATION_BYTES:
            text = f"{path}: requirements take {self._declared_bytes:,} bytes; the most is {MAX_DECLARATION_BYTES:,}"
            raise NotABundle(text)
        return self._declarations.setdefault(path, bytearray())

    def pass_by(self, data: bytes) -> None:
        self._size_bytes += len(data)
        if self._size_bytes > MAX_BUNDLE_BYTES:
            text = f"more than {MAX_BUNDLE_BYTES >> 20} MiB; data belongs in a dataset version: {_keep_out('it')}"
            raise NotABundle(text, too_large=True)
        self._sha256.update(data)

    def end(self) -> BundleFacts:
        if not self._files:
            raise NotABundle("no file is in it: name a folder that holds your modules")
        try:
            requirements = declared_requirements({path: bytes(data) for path, data in self._declarations.items()})
        except RequirementsError as error:
            raise NotABundle(str(error)) from None
        return BundleFacts(
            self._sha256.hexdigest(),
            self._size_bytes,
            self._unpacked,
            self._files,
            tuple(requirements),
            tuple(sorted(self._modules)),
        )


class _Writer:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._facts = _Facts()

    def add(self, path: str, size_bytes: int, source: BinaryIO) -> None:
        declaration = self._facts.begin(path, size_bytes)
        self._write(_header(path, size_bytes))
        left = size_bytes
        while data := source.read(min(left, COPY_BYTES) or 1):
            left -= len(data)
            if left < 0:
                break
            self._write(data)
            if declaration is not None:
                declaration += data
        if left:
            raise NotABundle(f"{path} changed while it was packed: pack again")
        self._write(bytes(-size_bytes % BLOCK))

    def end(self) -> BundleFacts:
        facts = self._facts
        self._write(END)
        return facts.end()

    def _write(self, data: bytes) -> None:
        self._facts.pass_by(data)
        self._file.write(data)


class _Reader:
    """Strict reader of entries. Each header must equal the one that `_Writer` writes for that path and size."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._facts = _Facts()
        self._paths = _Paths()
        self._ended = False

    def entries(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Yield the path and content of each file. Unread content is skipped."""
        before = b""
        while (header := self._read(BLOCK)) != END[:BLOCK]:
            path, size_bytes = _parsed(header)
            encoded = path.encode()
            if encoded <= before:
                what = "is there twice" if encoded == before else "comes too late; files are sorted by their paths"
                raise NotABundle(f"{_quoted(path)} {what}: {REPACK}")
            before = encoded
            self._paths.add(path)
            declaration = self._facts.begin(path, size_bytes)
            content = self._content(size_bytes, declaration)
            yield path, content
            for _ in content:
                pass
            if any(self._read(-size_bytes % BLOCK)):
                raise NotABundle(f"{_quoted(path)} is followed by bytes that belong to no file: {REPACK}")
        if self._read(BLOCK) != END[:BLOCK] or self._file.read(1):
            raise NotABundle(f"bytes follow the end: {REPACK}")
        self._ended = True

    def facts(self) -> BundleFacts:
        assert self._ended
        return self._facts.end()

    def _content(self, size_bytes: int, declaration: bytearray | None) -> Iterator[bytes]:
        left = size_bytes
        while left:
            data = self._read(min(left, COPY_BYTES))
            left -= len(data)
            if declaration is not None:
                declaration += data
            yield data

    def _read(self, size_bytes: int) -> bytes:
        data = self._file.read(size_bytes) if size_bytes else b""
        if len(data) != size_bytes:
            raise NotABundle(f"it ends within an entry: {REPACK}")
        self._facts.pass_by(data)
        return data


REPACK = "pack the folder with `millrace code push`"


class _Paths:
    """The paths seen so far.

    Refuses paths that some file system cannot hold, alone or beside another path.
    """

    def __init__(self) -> None:
        self._spelled: dict[str, str] = {}
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add(self, path: str) -> None:
        if problem := path_problem(path):
            raise NotABundle(f"{_quoted(path)} {problem}")
        self._spell(path)
        self._files.add(path)
        if path in self._folders:
            raise NotABundle(f"{_quoted(path)} is a file and a folder: {REPACK}")
        folder = path.rpartition("/")[0]
        while folder and folder not in self._folders:
            if folder in self._files:
                raise NotABundle(f"{_quoted(folder)} is a file and a folder: {REPACK}")
            self._spell(folder)
            self._folders.add(folder)
            folder = folder.rpartition("/")[0]

    def _spell(self, path: str) -> None:
        other = self._spelled.setdefault(unicodedata.normalize("NFKC", path.casefold()), path)
        if other != path:
            both = f"{_quoted(path)} and {_quoted(other)}"
            raise NotABundle(f"{both} are one name where case or Unicode forms do not count: rename one")


def path_problem(path: str) -> str:
    """Explain, with a remedy, why no bundle can have a file of that path. Empty if it can."""
    parts = path.split("/")
    if not path or path.startswith("/"):
        return "is no relative path: use paths below the folder"
    if ".." in parts or "." in parts or "" in parts:
        return "has a part '..', '.' or none at all: use paths below the folder"
    if "\\" in path or any(ord(one) < 32 or ord(one) == 127 for one in path):
        return "has a backslash or a control character: rename it"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not UTF-8: rename it"
    if unicodedata.normalize("NFC", path) != path:
        return "is not in Unicode's normal form C: rename it"
    if len(encoded) > MAX_PATH_BYTES or _split_name(encoded) is None:
        return f"is longer than {MAX_PATH_BYTES} bytes, or its last part than {NAME_BYTES}: use shorter names"
    return ""


def _split_name(path: bytes) -> tuple[bytes, bytes] | None:
    """Return (prefix, name) for a tar header: the shortest prefix that leaves at most 100 bytes."""
    if len(path) <= NAME_BYTES:
        return b"", path
    cut = path.find(b"/", len(path) - NAME_BYTES - 1)
    return (path[:cut], path[cut + 1 :]) if 0 < cut <= PREFIX_BYTES else None


def _header(path: str, size_bytes: int) -> bytes:
    split = _split_name(path.encode())
    assert split is not None
    prefix, name = split
    block = b"".join(
        (
            name.ljust(NAME_BYTES, b"\0"),
            b"0000644\0",
            b"0000000\0",
            b"0000000\0",
            b"%011o\0" % size_bytes,
            b"00000000000\0",
            b" " * 8,  # the checksum field counts as spaces
            b"0",
            bytes(NAME_BYTES),
            b"ustar\x0000",
            bytes(64),
            b"0000000\0",
            b"0000000\0",
            prefix.ljust(PREFIX_BYTES, b"\0"),
            bytes(12),
        )
    )
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _parsed(header: bytes) -> tuple[str, int]:
    """Return the path and size of an entry.

    Parsing may be lenient, because the canonical header for the result must equal this one.
    """
    if header[257:262] != b"ustar":
        raise NotABundle(f"it is no tar archive in Millrace's form: {REPACK}")
    name, prefix = header[:NAME_BYTES].rstrip(b"\0"), header[345:500].rstrip(b"\0")
    try:
        path = (prefix + b"/" + name if prefix else name).decode()
    except UnicodeDecodeError:
        raise NotABundle(f"{prefix + name!r} is not UTF-8: rename it") from None
    if header[156:157] != b"0":
        kind = KINDS_OF_ENTRIES.get(header[156:157], "an entry of another kind")
        raise NotABundle(f"{_quoted(path)} is {kind}; a bundle has regular files only: {REPACK}")
    if problem := path_problem(path):
        raise NotABundle(f"{_quoted(path)} {problem}")
    digits = header[124:135]
    size_bytes = int(digits, 8) if re.fullmatch(rb"[0-7]{11}", digits) else -1
    if size_bytes > MAX_BUNDLE_BYTES:
        raise NotABundle(f"{_quoted(path)} has {size_bytes:,} bytes, more than a bundle may have", too_large=True)
    if size_bytes < 0 or header != _header(path, size_bytes):
        raise NotABundle(f"{_quoted(path)} has a header in another form than Millrace's: {REPACK}")
    return path, size_bytes


def _folder_files(root: Path, skipped: Iterable[str] = SKIPPED, *, ignore_file: bool = True) -> Iterator[_Source]:
    skips = re.compile("|".join(fnmatch.translate(one) for one in skipped))
    ignores = _ignore_patterns(root / IGNORE_FILE) if ignore_file else []
    folders = [(root, "")]
    seen = 0
    while folders:
        folder, below = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                # Some systems store é as two code points. The same folder must give the same bytes on all systems.
                path = below + unicodedata.normalize("NFC", entry.name)
                if skips.fullmatch(entry.name) or any(ignore.matches(path) for ignore in ignores):
                    continue
                kind = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(kind):
                    if ignore_file and Path(entry.path, "pyvenv.cfg").is_file():
                        continue
                    folders.append((Path(entry.path), path + "/"))
                elif stat.S_ISREG(kind):
                    seen += 1
                    if seen > MAX_FILES:  # stops before a folder of millions of files is collected
                        raise NotABundle(f"more than {MAX_FILES:,} files: {_keep_out('the rest')}", too_large=True)
                    yield _local_source(path, Path(entry.path))
                else:
                    what = "a symbolic link" if stat.S_ISLNK(kind) else "no regular file"
                    raise NotABundle(f"{_quoted(path)} is {what}: {_keep_out('it')}")


def _local_source(path: str, file: Path) -> _Source:
    return _Source(path, file.stat().st_size, lambda: file.open("rb"))


def _wheel_files(wheel: zipfile.ZipFile) -> Iterator[_Source]:
    """Yield the files as an installer puts them into site-packages.

    Scripts, headers and data files of a wheel are left out.
    """
    for info in wheel.infolist()[: MAX_FILES + 1]:  # one file too many is refused when it is packed
        if info.is_dir():
            continue
        if stat.S_ISLNK(info.external_attr >> 16):
            raise NotABundle(f"{_quoted(info.filename)} is a symbolic link: build the wheel without it")
        path = unicodedata.normalize("NFC", info.filename)
        top, _, below = path.partition("/")
        if top.endswith(".data"):
            category, _, path = below.partition("/")
            if category not in ("purelib", "platlib"):
                continue
        yield _Source(path, info.file_size, _wheel_opener(wheel, info))


def _wheel_opener(wheel: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Opener:
    # The reader returns at most the size that the wheel names, which bounds a zip bomb.
    return lambda: wheel.open(info)  # type: ignore[return-value]


def _ignore_patterns(file: Path) -> list[_IgnorePattern]:
    """Return patterns that match whole relative paths, e.g. `data/raw`.

    As in .gitignore, a pattern without '/' matches a name at any depth, and one with '/' a path from the root. `*`
    stays within a name, `**` does not. A '/' at the end has no effect here. '!' is not supported.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_IGNORE_BYTES + 1)
    except FileNotFoundError:
        return []
    if len(data) > MAX_IGNORE_BYTES:
        raise NotABundle(f"{IGNORE_FILE} has more than {MAX_IGNORE_BYTES:,} bytes: name folders instead of files")
    try:
        lines = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        raise NotABundle(f"{IGNORE_FILE} is not UTF-8: save it as UTF-8") from None
    patterns = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("!"):
            raise NotABundle(f"{IGNORE_FILE}:{number}: {line!r}: patterns that take others back are not supported")
        patterns.append(_IgnorePattern(line))
        if len(patterns) > MAX_IGNORE_PATTERNS:
            raise NotABundle(f"{IGNORE_FILE} has more than {MAX_IGNORE_PATTERNS:,} patterns: name folders instead")
    return patterns


class _IgnorePattern:
    """One line of an ignore file, matched in time proportional to the path times the pattern.

    A regular expression would try all ways to divide a path among a pattern's stars, which takes for ever from about
    ten stars on.
    """

    def __init__(self, line: str) -> None:
        pattern = unicodedata.normalize("NFC", line.strip("/"))
        at_any_depth = "/" not in line.rstrip("/")
        # The last name of a path is enough where no token matches a '/'.
        self._of_name = at_any_depth and "**" not in pattern
        if at_any_depth and not self._of_name:
            pattern = f"**/{pattern}"
        # A run of stars matches what `**` matches, and `**/**/` what `**/` matches.
        self._tokens = re.findall(r"(?:\*{2,}/)+|\*+|\?|[^*?]+", pattern)
        last = self._tokens[-1] if self._tokens else ""
        self._end = last if not last.endswith(("*", "?")) and not last.startswith("**") else ""

    def matches(self, path: str) -> bool:
        if not path.endswith(self._end):
            return False
        text = path.rpartition("/")[2] if self._of_name else path
        # The positions that the text can be matched up to, by the tokens so far.
        reached = {0}
        for token in self._tokens:
            if not reached:
                return False
            first = min(reached)
            if token == "?":
                reached = {at + 1 for at in reached if text[at : at + 1] not in ("", "/")}
            elif token == "*":
                reached = _ends_within_names(text, reached)
            elif token.endswith("*"):
                reached = set(range(first, len(text) + 1))
            elif token.startswith("**"):
                reached |= {at for at in range(first + 1, len(text) + 1) if text[at - 1] == "/"}
            else:
                reached = {at + len(token) for at in reached if text.startswith(token, at)}
        return len(text) in reached


def _ends_within_names(text: str, starts: set[int]) -> set[int]:
    """Return the positions that can be reached from those of `starts` without a '/' between."""
    ends: set[int] = set()
    for start in starts:
        slash = text.find("/", start)
        name_end = slash if slash >= 0 else len(text)
        at = start
        while at <= name_end and at not in ends:
            ends.add(at)
            at += 1
    return ends


def _keep_out(what: str) -> str:
    return f"keep {what} out by a line in {IGNORE_FILE}"


def _quoted(path: str) -> str:
    text = repr(path[:201])
    return text if len(path) <= 200 else text[:-1] + "…'"


class _Discarded(io.BytesIO):
    """A sink for bytes of which only the digest is needed."""

    def write(self, data: Any) -> int:
        return len(data)
