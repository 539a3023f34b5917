"""Renames identifiers, messages, error reasons, variables and files by tools/renames.toml, over the whole tree.

`python tools/rename.py` may be run again at any time: new names stay unchanged. In Python only names change, in code
and inside f-strings, and strings that are dotted paths or the names in `getattr` and similar calls. In prose, only
spans in backticks change, and words that can only be identifiers (with an underscore or two capitals). A string that is
one plain word may be a key in a stored record, so it changes only if the map has it under [[strings]].

The script refuses to give two names of one scope the same new name, and reports the place.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.rename_map import MAP, RenameError, Renames
from tools.rename_text import IMPORT_ROOTS, Change, FileRenamer, Modules

ROOT = Path(__file__).resolve().parent.parent

# --- clashes --------------------------------------------------------------------------------------------------------


def find_clashes(text: str, path: str, rename: Callable[[str], str]) -> Iterator[str]:
    """Yield the places where two names of one scope would become the same."""
    for node in ast.walk(ast.parse(text)):
        lines: dict[str, int] = {}
        for name, line in _names_in(node):
            lines[name] = min(line, lines.get(name, line))
        by_new: dict[str, str] = {}
        for name in sorted(lines):
            new = rename(name)
            other = by_new.setdefault(new, name)
            if other != name:
                yield f"{path}:{lines[name]}: {other} and {name} would both be {new}"


def _names_in(scope: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a function uses, or that a class or a module binds, with their lines."""
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        for node in ast.walk(scope):
            if isinstance(node, ast.Name):
                yield node.id, node.lineno
            elif isinstance(node, ast.arg):
                yield node.arg, node.lineno
    elif isinstance(scope, ast.ClassDef):
        yield from _bound_in(scope.body)
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr, node.lineno
    elif isinstance(scope, ast.Module):
        yield from _bound_in(scope.body)


def _bound_in(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name, statement.lineno
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0], statement.lineno
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, statement.lineno


# --- the tree -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The changes of a map: new texts by path, moves, each old name with its place, and clashes."""

    texts: Mapping[str, str]
    moves: Mapping[str, str]
    changes: tuple[Change, ...]
    clashes: tuple[str, ...]


def list_files(root: Path) -> list[str]:
    """Return the existing files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted({path for path in listed.split("\0") if path and (root / path).is_file()})


def make_plan(root: Path, renames: Renames) -> Plan:
    files = list_files(root)
    modules = Modules(files, renames)
    moves = {path: new for path in files if (new := renames.rename_path(path)) != path}
    paths = _paths_in_text(moves, modules, files)
    texts: dict[str, str] = {}
    changes: list[Change] = []
    clashes: list[str] = []
    for path in files:
        if renames.skips(path) or not _is_text(root / path):
            continue
        text = (root / path).read_text()
        renamer = FileRenamer(path, renames, modules, paths)
        renamed = renamer.rename(text)
        changes += renamer.changes
        if renamer.changes and renamed != text:
            texts[path] = renamed
            if path.endswith(".py"):
                clashes += find_clashes(text, path, renamer.new_name(text))
    moves = {old: new for old, new in moves.items() if not renames.skips(old)}
    changes += [Change(old, 0, PurePosixPath(old).name, PurePosixPath(new).name) for old, new in moves.items()]
    clashes += [f"{old}: {new} is there already" for old, new in moves.items() if new in files]
    return Plan(texts, moves, tuple(changes), tuple(clashes))


def _paths_in_text(moves: Mapping[str, str], modules: Modules, files: Sequence[str]) -> dict[str, str]:
    """Return the ways in which text names a file that moves.

    These are its path, its path below an import root, its dotted module, and its name if that is unique.
    """
    paths = dict(moves)
    for old, new in moves.items():
        for root in (*IMPORT_ROOTS, "protos/"):
            if old.startswith(root):
                paths[old.removeprefix(root)] = new.removeprefix(root)
    paths |= {old: new for old, new in modules.moved.items() if "." in old}
    of_name = Counter(PurePosixPath(path).name for path in files)
    for old, new in moves.items():
        if of_name[PurePosixPath(old).name] == 1:
            paths[PurePosixPath(old).name] = PurePosixPath(new).name
    return dict(sorted(paths.items(), key=lambda pair: -len(pair[0])))


def _is_text(path: Path) -> bool:
    if path.is_symlink():
        return False
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def apply_plan(root: Path, plan: Plan) -> None:
    for path, text in plan.texts.items():
        (root / path).write_text(text)
    for old, new in plan.moves.items():
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        tracked = (
            subprocess.run(["git", "ls-files", "--error-unmatch", old], cwd=root, capture_output=True).returncode == 0
        )
        if tracked:
            subprocess.run(["git", "mv", old, new], cwd=root, check=True)
        else:
            (root / old).rename(root / new)


def sort_and_format(root: Path, plan: Plan) -> None:
    """Sort imports and `__all__`, and wrap lines, with ruff in the changed files."""
    changed = sorted(plan.moves.get(path, path) for path in {*plan.texts, *plan.moves} if path.endswith(".py"))
    if changed:
        ruff = [sys.executable, "-m", "ruff"]
        subprocess.run([*ruff, "check", "--quiet", "--select", "I,RUF022", "--fix", *changed], cwd=root, check=True)
        subprocess.run([*ruff, "format", "--quiet", *changed], cwd=root, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Renames the whole tree as tools/renames.toml says.")
    parser.add_argument("--dry-run", action="store_true", help="only say what would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree; this one by default")
    parser.add_argument("--map", type=Path, default=MAP, help="the map; tools/renames.toml by default")
    given = parser.parse_args(arguments)
    try:
        plan = make_plan(given.root, Renames.load(given.map))
        if plan.clashes and not given.dry_run:
            raise RenameError("\n".join(plan.clashes))
    except RenameError as error:
        print(error, file=sys.stderr)
        return 1
    if given.dry_run:
        for change in plan.changes:
            print(f"{change.path}:{change.line}: {change.old} -> {change.new}")
        for clash in plan.clashes:
            print(f"clash: {clash}")
    else:
        apply_plan(given.root, plan)
        sort_and_format(given.root, plan)
    print(f"{len(plan.changes)} names in {len(plan.texts)} files, {len(plan.moves)} files moved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
