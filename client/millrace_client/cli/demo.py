"""`millrace demo`: finds the digits, provides a stack, and runs the stages.

It uses running services, or starts its own stack and stops it at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from millrace_client.addresses import millrace_home, resolve
from millrace_client.cli.command import (
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    json_option,
    print_json,
    silent,
)
from millrace_client.cli.stack import start_with_progress
from millrace_client.demo import Digits, NoDigits, Story, find_digits, print_how_to_talk, summary
from millrace_client.demo import run as run_stages
from millrace_client.stack import supervisor
from millrace_client.stack.plan import StackOptions

# --- Demo ---


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
    elsewhere = is_elsewhere(values["data_address"], values["train_address"], values["inference_address"])
    digits = None if mnist_uri else _find(story)
    roots = (digits.folder,) if digits else _local_folder(mnist_uri)
    with nullcontext() if elsewhere else a_stack(story, roots, keep=keep):
        if digits is not None:
            mnist_uri = digits.folder.as_uri() if elsewhere else readable_uri(digits)
        assert mnist_uri is not None
        suffixes = (digits.suffix,) if digits else (".gz", "")
        with connected(values) as millrace:
            figures = run_stages(millrace, story, folder_uri=mnist_uri, suffixes=suffixes, epochs=epochs, output=output)
        if keep:
            print_how_to_talk(figures["model"], figures["dataset_version"])
    console().print()
    story.print_wall_times()
    console().print(f"[bold]{summary(figures, story.total_s())}[/]")
    return figures


def _local_folder(uri: str | None) -> tuple[Path, ...]:
    """Return the folder of a `file:` URI, for the demo's own stack to read; none for other URIs."""
    parts = urlsplit(uri or "")
    return (Path(unquote(parts.path)),) if parts.scheme == "file" else ()


def _find(story: Story) -> Digits:
    with console().status("looking for digits …"):
        try:
            digits = find_digits(millrace_home() / "digits")
        except NoDigits as error:
            raise CommandFailed(str(error), remedy="set MNIST_ROOT to a folder with MNIST's four IDX files") from None
    story.say(f"digits from {digits.source}")
    return digits


# --- Where it runs ---


def is_elsewhere(data: str | None, train: str | None, inference: str | None) -> bool:
    """Return whether arguments or the environment name services outside this stack."""
    origins = resolve(data=data, train=train, inference=inference).origins
    return bool({"argument", "environment"} & set(origins.values()))


@contextmanager
def a_stack(story: Story, import_roots: tuple[Path, ...], *, keep: bool) -> Iterator[None]:
    """A stack to run the demo on.

    A running stack is used and left running. Otherwise a stack with an empty store of its own is started, and stopped
    in any case.
    """
    home = millrace_home()
    if supervisor.running_record(home) is not None:
        story.say("uses the stack that is already running, and leaves it running")
        yield
        return
    store = _empty_store(home)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with story.stage("Start the stack"):
            options = StackOptions(store=store, import_roots=import_roots)
            stack = start_with_progress(home, options, lifeline=True)
            story.say(f"Ray and the data, train and inference services answer; logs in {_short(home / 'logs')}")
        yield
        if keep:
            stack.keep()
            return
    except BaseException:
        _end(home)
        raise
    with story.stage("Stop the stack"):
        _end(home)
        story.say("nothing of it is left running")


def _end(home: Path) -> None:
    """Stop the stack. A second Ctrl-C is ignored, because the lifeline would end the stack anyway."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with console().status("stopping the stack …"):
            supervisor.stop(home)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _empty_store(home: Path) -> str:
    """Return an empty folder for this demonstration. MILLRACE_STORE, if it is set, stays unchanged."""
    if os.environ.get("MILLRACE_STORE"):
        return ""
    folder = home / "demo-store"
    shutil.rmtree(folder, ignore_errors=True)
    return folder.as_uri()


def readable_uri(digits: Digits) -> str:
    """Return the digits' folder as a URI below an import root of the running stack.

    Files outside the roots are copied below one.
    """
    record = supervisor.running_record(millrace_home())
    folder = digits.folder
    if record is not None and not any(folder.is_relative_to(root) for root in record.import_roots):
        folder = Path(record.import_roots[0]) / "digits"
        folder.mkdir(parents=True, exist_ok=True)
        for file in digits.files():
            shutil.copyfile(file, folder / file.name)
    return folder.as_uri()


def _short(path: Path) -> Any:
    """Return the path relative to the working directory if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
