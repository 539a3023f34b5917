"""Reads tools/renames.toml, and maps identifiers, one-word strings and files to their new names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

MAP = Path(__file__).with_name("renames.toml")
SOURCE_SUFFIXES = (".py", ".pyi", ".proto")
CAMEL_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+")

Style = Literal["lower", "upper", "camel"]


class RenameError(Exception):
    """The map or the tree does not allow the renames. The message has a line per problem."""


@dataclass(frozen=True)
class Word:
    """A word inside an identifier: the underscores before it, its letters, and its capitalisation."""

    separator: str
    text: str
    style: Style


@cache
def split_words(identifier: str) -> tuple[Word, ...]:
    """Split `snake_case`, `UPPER_CASE` and `CamelCase`; a mixed name is split by underscores first."""
    words: list[Word] = []
    separator = ""
    for piece in re.split(r"(_+)", identifier):
        if not piece:
            continue
        if piece.startswith("_"):
            separator = piece
        elif piece.islower() or piece.isupper() or piece.isdigit():
            words.append(Word(separator, piece, "upper" if piece.isupper() else "lower"))
            separator = ""
        else:
            for text in CAMEL_WORD.findall(piece):
                words.append(Word(separator, text, "camel"))
                separator = ""
    return (*words, Word(separator, "", "lower")) if separator else tuple(words)


@dataclass(frozen=True)
class WordRule:
    """Replaces `old` by `new` if it is one or more whole words of an identifier."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    keep: frozenset[str] = frozenset()
    within: tuple[str, ...] = ()
    tests: bool = True

    def applies_to(self, identifier: str, path: str) -> bool:
        if identifier.strip("_") in self.keep or not _is_within(path, self.within):
            return False
        return self.tests or not identifier.startswith("test_")

    def apply(self, words: Sequence[Word]) -> tuple[Word, ...]:
        changed: list[Word] = []
        at = 0
        while at < len(words):
            found = words[at : at + len(self.old)]
            if self._matches(found):
                changed += self._replace(found)
                at += len(self.old)
            else:
                changed.append(words[at])
                at += 1
        return tuple(changed)

    def _matches(self, found: Sequence[Word]) -> bool:
        if tuple(word.text.lower() for word in found) != self.old or len({word.style for word in found}) != 1:
            return False
        between = "" if found[0].style == "camel" else "_"
        return all(word.separator == between for word in found[1:])

    def _replace(self, found: Sequence[Word]) -> list[Word]:
        style = found[0].style
        if style == "camel":
            starts_low = found[0].text[0].islower()
            texts = [text if starts_low and not n else text.capitalize() for n, text in enumerate(self.new)]
        else:
            texts = [text.upper() if style == "upper" else text for text in self.new]
        between = "" if style == "camel" else "_"
        return [Word(between if n else found[0].separator, text, style) for n, text in enumerate(texts)]


def _is_within(path: str, prefixes: Sequence[str]) -> bool:
    return not prefixes or path.startswith(tuple(prefixes))


@dataclass(frozen=True)
class Scoped:
    """Exact names that change only in files below some paths."""

    within: tuple[str, ...]
    names: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Renames:
    """The contents of tools/renames.toml.

    Exact names take precedence over words, and those of a scope over those of the whole tree.
    """

    words: tuple[WordRule, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    scoped: tuple[Scoped, ...] = ()
    strings: tuple[Scoped, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    keep_files: tuple[str, ...] = ()

    @staticmethod
    def load(path: Path = MAP) -> Renames:
        table = tomllib.loads(path.read_text())
        renames = Renames(
            words=tuple(_word_rules(table.get("words", ()))),
            names=table.get("names", {}),
            scoped=tuple(_scopes(table.get("scoped", ()))),
            strings=tuple(_scopes(table.get("strings", ()))),
            reasons=table.get("reasons", {}),
            environment=table.get("environment", {}),
            options=table.get("options", {}),
            files=table.get("files", {}),
            skipped=tuple(table.get("skip", ())),
            keep_files=tuple(table.get("keep_files", ())),
        )
        renames.check()
        return renames

    def check(self) -> None:
        """Raise `RenameError` if a new name would itself be renamed, because a second run would change it again."""
        problems = []
        for rule in self.words:
            new = "_".join(rule.new)
            again = self.rename(new, rule.within[0] if rule.within else "")
            if again != new:
                problems.append(f"words: {'_'.join(rule.old)} becomes {new}, which becomes {again}")
        exact = [("", old, new) for table in (self.names, self.reasons) for old, new in table.items()]
        exact += [(scope.within[0], old, new) for scope in self.scoped for old, new in scope.names.items()]
        for path, old, new in exact:
            again = self.rename(new, path)
            if again != new:
                problems.append(f"names: {old} becomes {new}, which becomes {again}")
        if problems:
            raise RenameError("\n".join(problems))

    @cached_property
    def _constants(self) -> dict[str, str]:
        return {**self.reasons, **self.environment}

    def rename(self, identifier: str, path: str) -> str:
        """Return the new name of an identifier in the file `path`, or the same one."""
        return self._rename(identifier, path)

    @cache  # noqa: B019 -- one object for each run
    def _rename(self, identifier: str, path: str) -> str:
        if identifier in self._constants:
            return self._constants[identifier]
        bare = identifier.lstrip("_")
        lead = identifier[: len(identifier) - len(bare)]
        for scope in (*self.scoped, Scoped((), self.names)):
            if _is_within(path, scope.within):
                if identifier in scope.names:
                    return scope.names[identifier]
                if bare in scope.names:
                    return lead + scope.names[bare]
        words = split_words(identifier)
        for rule in self.words:
            if rule.applies_to(identifier, path):
                words = rule.apply(words)
        return "".join(word.separator + word.text for word in words)

    def rename_string(self, text: str, path: str) -> str:
        """Return the new text of a string that is one plain word."""
        for scope in self.strings:
            if text in scope.names and _is_within(path, scope.within):
                return scope.names[text]
        return self._constants.get(text, text)

    def rename_path(self, path: str) -> str:
        """Return the new path of a file. Folders keep their names unless the map names the file itself."""
        if path in self.files:
            return self.files[path]
        if _is_within(path, self.keep_files) and self.keep_files:
            return path
        name = PurePosixPath(path)
        if name.suffix not in SOURCE_SUFFIXES:
            return path
        # A test module is named for a module, not with a sentence, so words of sentences count here, too.
        lead = "test_" if name.stem.startswith("test_") else ""
        return str(name.with_name(lead + self.rename(name.stem.removeprefix(lead), path) + name.suffix))

    def skips(self, path: str) -> bool:
        return bool(self.skipped) and path.startswith(self.skipped)


def _word_rules(table: Iterable[Mapping[str, Any]]) -> Iterator[WordRule]:
    rules = [
        WordRule(
            tuple(entry["old"].split("_")),
            tuple(entry["new"].split("_")),
            frozenset(entry.get("keep", ())),
            tuple(entry.get("in", ())),
            entry.get("tests", True),
        )
        for entry in table
    ]
    yield from sorted(rules, key=lambda rule: -len(rule.old))  # longer rules first, because they are more specific


def _scopes(table: Iterable[Mapping[str, Any]]) -> Iterator[Scoped]:
    for entry in table:
        yield Scoped(tuple(entry.get("in", ())), entry["names"])
