"""Each `millrace` command in the documents has the options and arguments that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from millrace_client.cli import millrace

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def typed_commands(page: Path) -> Iterator[str]:
    """What is typed after `$ ` in blocks of a shell, `\\` at a line's end taken away."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield line.removeprefix("$ ")


def words_for_millrace(line: str) -> list[str]:
    """The arguments of `millrace` in that line; empty where it calls something else."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words[1:] if words and Path(words[0]).name == "millrace" else []


def parse(words: list[str]) -> None:
    """Raise `click.UsageError` for a command, an option or an argument that there is not."""
    command: click.Command = millrace
    context = click.Context(millrace, info_name="millrace")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        if found is None:
            raise click.UsageError(f"there is no command {words[0]!r}")
        command, words = found, words[1:]
    context = click.Context(command)
    _, left, _ = command.make_parser(context).parse_args(words)
    if left:
        raise click.UsageError(f"arguments that it does not take: {left}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_what_the_command_line_takes(page: Path) -> None:
    for line in typed_commands(page):
        if words := words_for_millrace(line):
            try:
                parse(words)
            except click.UsageError as error:
                pytest.fail(f"{line}\n{error.format_message()}", pytrace=False)


def test_a_command_with_an_unknown_option_is_found() -> None:
    with pytest.raises(click.UsageError, match="--no-such"):
        parse(words_for_millrace("A=1 millrace train create digits --no-such 1  # a comment"))
    with pytest.raises(click.UsageError, match="not take"):
        parse(["train", "cancel", "digits", "second"])


def test_commands_are_found_in_the_documents() -> None:
    count = sum(bool(words_for_millrace(line)) for page in PAGES for line in typed_commands(page))
    assert count > 50
