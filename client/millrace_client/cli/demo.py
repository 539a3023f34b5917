"""`millrace demo`: finds the digits, sees to a stack, and runs the stages."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from millrace_client.addresses import millrace_home
from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.options import address_options, connected, json_option
from millrace_client.cli.output import console, print_json, silent
from millrace_client.demo import place, run
from millrace_client.demo.digits import Digits, NoDigits, find_digits
from millrace_client.demo.story import Story


@click.command(cls=PlainCommand)
@click.option("--keep", is_flag=True, envvar="KEEP", help="Leave the stack up at the end.  [KEEP=1]")
@click.option(
    "--mnist-uri",
    metavar="URI",
    help="The folder with MNIST's IDX files as the data service sees it, e.g. file:///import/mnist/MNIST/raw.",
)
@click.option("--epochs", default=0, metavar="N", help="Default: by the number of training images.")
@click.option(
    "--output",
    default=Path("demo-output"),
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the pictures go.",
)
@address_options
@json_option
def demo(keep: bool, mnist_uri: str | None, epochs: int, output: Path, as_json: bool, **values: Any) -> None:
    """From raw digits to a served model, on this machine.

    Starts a stack with an empty store of its own and stops it at the end, unless one runs already, here or at the
    addresses that arguments or the environment name.
    """
    with silent(as_json):
        story = Story()
        figures = _run(story, keep, mnist_uri, epochs, output, values)
    if as_json:
        print_json({**figures, "wall_s": story.wall_s, "total_s": story.total_s()})


def _run(
    story: Story, keep: bool, mnist_uri: str | None, epochs: int, output: Path, values: dict[str, Any]
) -> dict[str, Any]:
    console().print("[bold]Millrace[/]: from raw digits to a served model")
    elsewhere = place.is_elsewhere(values["data_address"], values["train_address"], values["inference_address"])
    digits = None if mnist_uri else _find(story)
    roots = (digits.folder,) if digits else _local_folder(mnist_uri)
    with nullcontext() if elsewhere else place.a_stack(story, roots, keep=keep):
        if digits is not None:
            mnist_uri = digits.folder.as_uri() if elsewhere else place.readable_uri(digits)
        assert mnist_uri is not None
        suffixes = (digits.suffix,) if digits else (".gz", "")
        with connected(values) as millrace:
            figures = run.run(millrace, story, folder_uri=mnist_uri, suffixes=suffixes, epochs=epochs, output=output)
        if keep:
            run.print_how_to_talk(figures["model"], figures["dataset_version"])
    console().print()
    story.print_wall_times()
    console().print(f"[bold]{run.summary(figures, story.total_s())}[/]")
    return figures


def _local_folder(uri: str | None) -> tuple[Path, ...]:
    """The folder that a `file:` URI names, for a stack of our own to read; of others none."""
    parts = urlsplit(uri or "")
    return (Path(unquote(parts.path)),) if parts.scheme == "file" else ()


def _find(story: Story) -> Digits:
    with console().status("looking for digits …"):
        try:
            digits = find_digits(millrace_home() / "digits")
        except NoDigits as error:
            raise CommandFailed(str(error), remedy="set MNIST_ROOT to a folder with MNIST's four IDX files") from None
    story.tell(f"digits from {digits.source}")
    return digits
