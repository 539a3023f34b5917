"""Renames the names in one file: Python by tokens, protos and other files by identifiers."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.rename_map import SOURCE_SUFFIXES, RenameError, Renames

LINE_LENGTH = 120
IDENTIFIER = re.compile(r"(?<![\w$])[A-Za-z_]\w*")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\[\w*\])?(?:\.[A-Za-z_]\w*(?:\[\w*\])?)+")
ENTRY = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
CODE_SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)
FENCE = re.compile(r"^(```+)([^\n]*)\n(.*?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)
STRING_TOKEN = re.compile(r"(?P<prefix>[A-Za-z]*)(?P<quote>\"\"\"|'''|\"|')(?P<body>.*)(?P=quote)", re.DOTALL)
# Calls in which a string names an attribute, a field or a fixture, with those arguments.
NAMING_CALLS: Mapping[str, tuple[int, ...]] = {
    "getattr": (1,),
    "setattr": (1,),
    "delattr": (1,),
    "hasattr": (1,),
    "attrgetter": (0, 1, 2, 3),
    "methodcaller": (0,),
    "HasField": (0,),
    "ClearField": (0,),
    "WhichOneof": (0,),
    "parametrize": (0,),
    "usefixtures": (0, 1, 2, 3),
    "getfixturevalue": (0,),
    "broadcast": (0,),
}
# Directories, besides the root of the tree, at which a module's dotted name begins.
IMPORT_ROOTS = ("client/", "protos/gen/")


@dataclass(frozen=True)
class Change:
    """An old name at its place. `line` is 0 for the name of the file."""

    path: str
    line: int
    old: str
    new: str


class Modules:
    """The Python modules of the tree, by dotted name, and their new names."""

    def __init__(self, files: Iterable[str], renames: Renames) -> None:
        self._new: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        for path in files:
            if path.endswith(".py"):
                self._new[module_name(path)] = module_name(renames.rename_path(path))
                self._paths[module_name(path)] = path
        packages = {name.rpartition(".")[0] for name in self._new}
        for package in packages:
            while package:
                self._new.setdefault(package, package)
                package = package.rpartition(".")[0]
        self.roots = frozenset(name for name in self._new if "." not in name and name)
        self.moved = {old: new for old, new in self._new.items() if old != new}

    def is_module(self, dotted: str) -> bool:
        return dotted in self._new

    def new_name(self, dotted: str) -> str:
        return self._new[dotted]

    def path_of(self, dotted: str) -> str:
        """Return a module's file; for a folder without one, its path."""
        return self._paths.get(dotted, dotted.replace(".", "/") + "/")

    def longest_prefix(self, dotted: str) -> str:
        """Return the longest prefix of `dotted` that is a module, or an empty text."""
        while dotted and dotted not in self._new:
            dotted = dotted.rpartition(".")[0]
        return dotted


def module_name(path: str) -> str:
    for root in IMPORT_ROOTS:
        path = path.removeprefix(root)
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


class FileRenamer:
    """Renames the contents of one file, and records them in `changes`."""

    def __init__(self, path: str, renames: Renames, modules: Modules, paths: Mapping[str, str]) -> None:
        self._path = path
        self._renames = renames
        self._modules = modules
        self._paths = paths
        self.changes: list[Change] = []
        self._line = 0

    def rename(self, text: str) -> str:
        self._line = 1
        if self._path.endswith((".py", ".pyi")):
            return wrap_prose(self.rename_python(text))
        if self._path.endswith(".md"):
            return self.rename_markdown(text)
        if self._path.endswith(".proto"):
            return wrap_prose(self.rename_proto(text), "// ")
        return "".join(map(self._rename_plain_line, text.splitlines(keepends=True)))

    # --- Python -----------------------------------------------------------------------------------------------------

    def rename_python(self, text: str) -> str:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        imported = self._imported_names(text)
        calls = _CallStack()
        lines = text.splitlines(keepends=True)
        replaced: list[tuple[tuple[int, int], tuple[int, int], str]] = []
        base = self._line
        at = 0
        while at < len(tokens):
            token = tokens[at]
            self._line = base + token.start[0] - 1
            last = at
            new = token.string
            if token.type == tokenize.NAME:
                chain, last = _dotted_chain(tokens, at)
                if chain in ("from", "import"):
                    last, spans = self._rename_import(tokens, at)
                    replaced += spans
                    new = ""
                elif token.string in self._modules.roots and "." in chain and self._modules.longest_prefix(chain):
                    new = self._rename_dotted(chain)
                    replaced.append((token.start, tokens[last].end, new))
                    new = ""
                else:
                    last = at
                    new = self._rename_name(tokens, at, imported, calls)
            elif token.type == tokenize.STRING:
                new = self._rename_string_token(token.string, calls)
            elif token.type == tokenize.COMMENT:
                new = self.rename_prose(token.string)
            if new and new != token.string:
                replaced.append((token.start, token.end, new))
            for passed in tokens[at : last + 1]:
                calls.see(passed)
            at = last + 1
        self._line = base
        return _with_replaced(lines, replaced)

    def _imported_names(self, text: str) -> dict[str, str]:
        """Return the names that the file imports from the tree, with the new names at their definitions."""
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return {}
        return {
            alias.name: self._new_import(node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in self._modules.roots
            for alias in node.names
            if alias.asname is None
        }

    def new_name(self, text: str) -> Callable[[str], str]:
        """Return the renaming of one file's names. Imported names are renamed as at their definition."""
        imported = self._imported_names(text)
        return lambda name: imported.get(name) or self._renames.rename(name, self._path)

    def _new_import(self, package: str, name: str) -> str:
        dotted = f"{package}.{name}"
        if self._modules.is_module(dotted):
            return self._modules.new_name(dotted).rpartition(".")[2]
        return self._renames.rename(name, self._modules.path_of(package))

    def _rename_name(
        self, tokens: Sequence[tokenize.TokenInfo], at: int, imported: Mapping[str, str], calls: _CallStack
    ) -> str:
        name = tokens[at].string
        is_attribute = at > 0 and tokens[at - 1].string == "."
        is_keyword = calls.depth > 0 and at + 1 < len(tokens) and tokens[at + 1].string == "="
        if name in imported and not is_attribute and not is_keyword:
            return self._note(name, imported[name])
        return self._rename_identifier(name)

    def _rename_import(
        self, tokens: Sequence[tokenize.TokenInfo], at: int
    ) -> tuple[int, list[tuple[tuple[int, int], tuple[int, int], str]]]:
        """Return the last token of the import statement that begins at `at`, and its replacements."""
        spans: list[tuple[tuple[int, int], tuple[int, int], str]] = []
        package = ""
        if tokens[at].string == "from":
            if (
                at
                and tokens[at - 1].type
                not in (
                    tokenize.NEWLINE,
                    tokenize.NL,
                    tokenize.INDENT,
                    tokenize.DEDENT,
                    tokenize.COMMENT,
                    tokenize.ENCODING,
                )
                and tokens[at - 1].string not in (":", ";")
            ):
                return at, []  # raise … from, yield from
            package, last = _dotted_chain(tokens, at + 1)
            new = self._rename_dotted(package)
            if new != package:
                spans.append((tokens[at + 1].start, tokens[last].end, new))
            at = last + 1
        at += 1
        while at < len(tokens) and tokens[at].type != tokenize.NEWLINE:
            if tokens[at].type == tokenize.NAME and tokens[at].string != "as":
                is_alias = tokens[at - 1].string == "as"
                chain, last = _dotted_chain(tokens, at)
                self._line = tokens[at].start[0]
                dotted = f"{package}.{chain}" if package else chain
                if is_alias:
                    new = self._rename_identifier(chain)
                elif package:
                    is_own = package.partition(".")[0] in self._modules.roots
                    new = self._note(chain, self._new_import(package, chain)) if is_own else chain
                else:
                    new = self._note(
                        dotted, self._modules.new_name(dotted) if self._modules.is_module(dotted) else dotted
                    )
                if new != chain:
                    spans.append((tokens[at].start, tokens[last].end, new))
                at = last
            at += 1
        return at - 1, spans

    def _rename_dotted(self, dotted: str) -> str:
        """Rename a dotted path: a module of the tree by its file's new name, the rest name by name."""
        module = self._modules.longest_prefix(dotted)
        rest = dotted[len(module) :]
        new = (self._modules.new_name(module) if module else "") + IDENTIFIER.sub(
            lambda found: self._renames.rename(found[0], self._path), rest
        )
        return self._note(dotted, new)

    def _rename_string_token(self, token: str, calls: _CallStack) -> str:
        found = STRING_TOKEN.fullmatch(token)
        assert found is not None, token
        prefix, quote, body = found["prefix"], found["quote"], found["body"]
        if "f" in prefix.lower():
            body = "".join(self._rename_f_string(body))
        else:
            body = self._rename_literal(body, is_name=calls.takes_name())
        return f"{prefix}{quote}{body}{quote}"

    def _rename_literal(self, body: str, *, is_name: bool) -> str:
        if is_name:
            return IDENTIFIER.sub(lambda found: self._rename_identifier(found[0]), body)
        if body.isidentifier() and not _is_camel(body):
            return self._note(body, self._renames.rename_string(body, self._path))
        if body in self._renames.options:
            return self._note(body, self._renames.options[body])
        if DOTTED.fullmatch(body) and not body.endswith(SOURCE_SUFFIXES):
            return self._rename_dotted(body)
        if (entry := ENTRY.fullmatch(body)) and self._modules.is_module(entry[1]):
            return f"{self._rename_dotted(entry[1])}:{self._rename_identifier(entry[2])}"
        return self.rename_python(body) if self._is_program(body) else self.rename_prose(body)

    def _is_program(self, text: str) -> bool:
        """Return whether a string is a program that imports from the tree."""
        if "\n" not in text or "import" not in text:
            return False
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return False
        imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        return any(name.partition(".")[0] in self._modules.roots for name in imported)

    def _rename_f_string(self, body: str) -> Iterator[str]:
        """Yield the pieces of an f-string: texts as other strings, expressions as code."""
        text: list[str] = []
        at = 0
        while at < len(body):
            if body.startswith(("{{", "}}"), at):
                text.append(body[at : at + 2])
                at += 2
            elif body[at] == "{":
                yield self.rename_prose("".join(text))
                text = []
                end, spec = _expression_end(body, at + 1)
                yield "{" + self._rename_expression(body[at + 1 : spec])
                yield "".join(self._rename_f_string(body[spec:end])) + "}"
                at = end + 1
            else:
                text.append(body[at])
                at += 1
        yield self.rename_prose("".join(text))

    def _rename_expression(self, code: str) -> str:
        inner = FileRenamer(self._path, self._renames, self._modules, self._paths)
        inner._line = self._line
        try:
            renamed = inner.rename_python(f"({code})")
        except (tokenize.TokenError, IndentationError):
            return code
        self.changes += inner.changes
        return renamed[1:-1]

    # --- prose, protos and other files ------------------------------------------------------------------------------

    def rename_prose(self, text: str) -> str:
        """Rename what prose quotes: spans in backticks, paths, and words that can only be identifiers."""
        pieces: list[str] = []
        at = 0
        for span in CODE_SPAN.finditer(text):
            pieces += [
                self._rename_words_like_code(text[at : span.start()]),
                span[1],
                self._rename_span(span[2]),
                span[1],
            ]
            at = span.end()
        return "".join([*pieces, self._rename_words_like_code(text[at:])])

    def _rename_span(self, span: str) -> str:
        if "/" in span or " " in span or '"' in span:
            return self._rename_words_like_code(span)
        span = self._rename_path_in_text(span)
        if span.endswith(SOURCE_SUFFIXES):
            return span  # a file name without its folder
        if DOTTED.fullmatch(span):
            return self._rename_dotted(span)
        return IDENTIFIER.sub(lambda found: self._rename_identifier(found[0]), span)

    def _rename_words_like_code(self, text: str) -> str:
        text = self._rename_path_in_text(text)
        return IDENTIFIER.sub(
            lambda found: self._rename_identifier(found[0]) if _is_like_code(found[0]) else found[0], text
        )

    def _rename_path_in_text(self, text: str) -> str:
        for old, new in self._paths.items():
            if old in text:
                pattern = rf"(?<![\w.]){re.escape(old)}(?![\w-])"
                text = re.sub(pattern, lambda found, new=new: self._note(found[0], new), text)  # type: ignore[misc]
        for old, new in self._renames.options.items():
            if old in text:
                text = re.sub(rf"(?<![\w-]){re.escape(old)}(?![\w-])", new, text)
        return text

    def rename_markdown(self, text: str) -> str:
        pieces: list[str] = []
        at = 0
        for fence in FENCE.finditer(text):
            pieces.append(self._rename_numbered(text[at : fence.start()], text, at))
            self._line = text.count("\n", 0, fence.start(3)) + 1
            code = self._rename_fence(fence[2], fence[3])
            pieces.append(f"{fence[1]}{fence[2]}\n{code}{fence[1]}")
            at = fence.end()
        return "".join([*pieces, self._rename_numbered(text[at:], text, at)])

    def _rename_numbered(self, piece: str, text: str, at: int) -> str:
        self._line = text.count("\n", 0, at) + 1
        return self.rename_prose(piece)

    def _rename_fence(self, language: str, code: str) -> str:
        if language.strip() == "python":
            try:
                return self.rename_python(code)
            except (tokenize.TokenError, IndentationError):
                pass  # an excerpt that is no whole program is read as text
        return self._rename_words_like_code(code)

    def rename_proto(self, text: str) -> str:
        lines = []
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            self._line = number
            code, slashes, comment = line.partition("//")
            pieces = re.split(r'("[^"]*")', code)
            renamed = [
                self._rename_path_in_text(piece)
                if piece.startswith('"')
                else IDENTIFIER.sub(lambda found: self._rename_identifier(found[0]), piece)
                for piece in pieces
            ]
            lines.append("".join(renamed) + slashes + self.rename_prose(comment))
        return "".join(lines)

    def _rename_plain_line(self, line: str) -> str:
        renamed = self.rename_prose(line)
        self._line += 1
        return renamed

    def _rename_identifier(self, identifier: str) -> str:
        return self._note(identifier, self._renames.rename(identifier, self._path))

    def _note(self, old: str, new: str) -> str:
        if old != new:
            self.changes.append(Change(self._path, self._line, old, new))
        return new


class _CallStack:
    """The open brackets, with the function called before each and the index of the argument."""

    def __init__(self) -> None:
        self._open: list[tuple[str, int]] = []
        self._before = ""
        self._lists_names = False

    @property
    def depth(self) -> int:
        return len(self._open)

    def see(self, token: tokenize.TokenInfo) -> None:
        if token.type == tokenize.NEWLINE:
            self._lists_names = False
        if token.string in ("__all__", "__slots__") and not self._open:
            self._lists_names = True
        if token.type == tokenize.OP:
            if token.string in "([{":
                self._open.append((self._before if token.string == "(" else "", 0))
            elif token.string in ")]}" and self._open:
                self._open.pop()
            elif token.string == "," and self._open:
                name, argument = self._open[-1]
                self._open[-1] = (name, argument + 1)
        self._before = token.string if token.type == tokenize.NAME else ""

    def takes_name(self) -> bool:
        """Return whether a string here names an attribute, a field, a test's parameter or a fixture."""
        if self._lists_names:
            return True
        innermost = self._open[-2:]
        if len(innermost) == 2 and innermost[1][0] == "" and innermost[0] == ("parametrize", 0):
            return True
        return bool(innermost) and innermost[-1][1] in NAMING_CALLS.get(innermost[-1][0], ())


def _dotted_chain(tokens: Sequence[tokenize.TokenInfo], at: int) -> tuple[str, int]:
    """Return the dotted names that begin at `at`, and the index of the last one."""
    names = [tokens[at].string]
    while at + 2 < len(tokens) and tokens[at + 1].string == "." and tokens[at + 2].type == tokenize.NAME:
        at += 2
        names.append(tokens[at].string)
    return ".".join(names), at


def _expression_end(body: str, at: int) -> tuple[int, int]:
    """Return where a replacement field's brace closes, and where its expression ends.

    `at` is the beginning of the expression; a conversion or a format may follow it.
    """
    depth, quote, spec = 0, "", -1
    while at < len(body):
        letter = body[at]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and spec < 0:
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter == "}" and not depth:
            return at, at if spec < 0 else spec
        elif letter in ")]}":
            depth -= 1
        elif not depth and spec < 0 and (letter == ":" or (letter == "!" and body[at + 1] != "=")):
            spec = at
        at += 1
    raise RenameError(f"an f-string has no end: {body[:80]}")


def _with_replaced(lines: Sequence[str], replaced: Iterable[tuple[tuple[int, int], tuple[int, int], str]]) -> str:
    """Replace each span, from (line, column) to (line, column), by its new text."""
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = "".join(lines)
    for start, end, new in sorted(replaced, reverse=True):
        text = text[: starts[start[0] - 1] + start[1]] + new + text[starts[end[0] - 1] + end[1] :]
    return text


def _is_camel(word: str) -> bool:
    return "_" not in word and len(re.findall("[A-Z]", word)) > 1 and not word.isupper()


def _is_like_code(word: str) -> bool:
    return "_" in word.strip("_") or _is_camel(word)


def wrap_prose(text: str, comment: str = "# ") -> str:
    """Wrap comments and lines of docstrings that have become too long, between words."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        indent = line[: len(line) - len(line.lstrip())]
        mark = comment if line.lstrip().startswith(comment) else ""
        if len(line) > LINE_LENGTH and (mark or _is_in_docstring(text, at)):
            cut = line.rfind(" ", len(indent) + len(mark), LINE_LENGTH + 1)
            if cut > len(indent) + len(mark):
                rest, follows = line[cut + 1 :], lines[at + 1] if at + 1 < len(lines) else ""
                flows = (
                    follows.strip() and follows.startswith(indent + mark) and not follows[len(indent + mark)].isspace()
                )
                flows = flows and not rest.endswith('"""') and follows.strip() != '"""'
                lines[at] = line[:cut]
                if flows and (mark or _is_in_docstring(text, at + 1)):
                    lines[at + 1] = f"{indent}{mark}{rest} {follows[len(indent + mark) :]}"
                else:
                    lines.insert(at + 1, f"{indent}{mark}{rest}")
                text = "\n".join(lines)
        at += 1
    return text


def _is_in_docstring(text: str, line: int) -> bool:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a proto
        return False
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            is_string = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_string and first.lineno <= line + 1 <= (first.end_lineno or first.lineno):
                return True
    return False
