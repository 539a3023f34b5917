"""Reports names in the tree that tools/renames.toml replaces. `make lint-python` runs it.

It reads identifiers, dotted paths, messages, error reasons, environment variables and file names, as tools/rename.py
does. It does not check prose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.rename import ROOT, make_plan
from tools.rename_map import MAP, RenameError, Renames
from tools.rename_text import Change


def find_old_words(root: Path, renames: Renames) -> tuple[Change, ...]:
    return make_plan(root, renames).changes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Says where a name that tools/renames.toml replaces still occurs.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree; this one by default")
    parser.add_argument("--map", type=Path, default=MAP, help="the map; tools/renames.toml by default")
    given = parser.parse_args(arguments)
    try:
        found = find_old_words(given.root, Renames.load(given.map))
    except RenameError as error:
        print(error, file=sys.stderr)
        return 1
    for change in found:
        print(f"{change.path}:{change.line}: {change.old} is called {change.new} now", file=sys.stderr)
    if found:
        print(f"{len(found)} old names; run python tools/rename.py to replace them", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
