"""Which files a path with `*`, `?` and `**`, or one that ends in `/`, means.

`*` stands for any characters of one name, `?` for one character, `**` as a whole name for any number of folders, none
included. Names that begin with `.` or `_` below the folder where the pattern begins are never meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

# Deeper than people nest folders; what is deeper is refused where it is met, never left out in silence.
MAX_DEPTH = 64
ANY_FOLDERS = "**"


@dataclass(frozen=True)
class Glob:
    """`names` are the names of a path relative to a folder, percent-encoded and with wildcards."""

    names: tuple[str, ...]

    @property
    def everything(self) -> bool:
        """All files below the folder are meant."""
        return self.names == (ANY_FOLDERS,)

    @property
    def depth(self) -> int | None:
        """How many names a path has that is meant; None for any number."""
        return None if ANY_FOLDERS in self.names else len(self.names)

    def matches(self, relative: str) -> bool:
        """Walks all readings side by side: no pattern takes longer than names times wildcards."""
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
        """A `**` may also stand for no folder at all."""
        reached = set()
        for state in states:
            reached.add(state)
            while state < len(self.names) and self.names[state] == ANY_FOLDERS:
                state += 1
                reached.add(state)
        return reached


def parse_glob(quoted_path: str) -> tuple[str, Glob | None]:
    """Splits a percent-encoded path into the folder (or file) before the first wildcard, still encoded, and what is
    meant below it; None where the path names one file."""
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
    # The first place where the text behind a star fits is as good as any later one: nothing is ever tried again.
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
