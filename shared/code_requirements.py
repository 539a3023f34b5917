"""Requirements of a code bundle: reads them from its files, and compares them with the installed packages.

No code of the bundle is run. The client uses this module for packing, too. Only `unmet` needs more than the standard
library.
"""

from __future__ import annotations

import email
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from shared.errors import shown

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
    from packaging.requirements import InvalidRequirement, Requirement

    problems = []
    for text in requirements:
        bare = HASH.sub("", f" {text}").strip()
        try:
            requirement = Requirement(bare)
        except InvalidRequirement as error:
            problems.append((bare, f"it is no requirement: {str(error).splitlines()[0]}"))
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
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
