"""Where the demonstration runs: services that are up already, or a stack of its own that ends with it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace_client.addresses import millrace_home, resolve
from millrace_client.cli.output import console
from millrace_client.cli.stack import start_with_progress
from millrace_client.demo.digits import Digits
from millrace_client.demo.story import Story
from millrace_client.stack import launch
from millrace_client.stack.plan import StackOptions


def is_elsewhere(data: str | None, train: str | None, inference: str | None) -> bool:
    """Whether arguments or the environment name services that somebody else runs."""
    origins = resolve(data=data, train=train, inference=inference).origins
    return bool({"argument", "environment"} & set(origins.values()))


@contextmanager
def a_stack(story: Story, import_roots: tuple[Path, ...], *, keep: bool) -> Iterator[None]:
    """Uses the stack that runs here, or starts one with an empty store of its own and ends it, whatever happens."""
    home = millrace_home()
    if launch.running_record(home) is not None:
        story.tell("uses the stack that is already running, and leaves it running")
        yield
        return
    store = _empty_store(home)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with story.stage("Start the stack"):
            options = StackOptions(store=store, import_roots=import_roots)
            stack = start_with_progress(home, options, lifeline=True)
            story.tell(f"Ray and the data, train and inference services answer; logs in {_short(home / 'logs')}")
        yield
        if keep:
            stack.keep()
            return
    except BaseException:
        _end(home)
        raise
    with story.stage("Stop the stack"):
        _end(home)
        story.tell("nothing of it is left running")


def _end(home: Path) -> None:
    """Stops the stack. A second Ctrl-C does not interrupt it: the lifeline would end the stack all the same."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with console().status("stopping the stack …"):
            launch.stop(home)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _empty_store(home: Path) -> str:
    """A folder for this demonstration alone, empty; MILLRACE_STORE, where it is set, stays as it is."""
    if os.environ.get("MILLRACE_STORE"):
        return ""
    folder = home / "demo-store"
    shutil.rmtree(folder, ignore_errors=True)
    return folder.as_uri()


def readable_uri(digits: Digits) -> str:
    """The digits' folder as a URI below a root of the running stack; copies them below one where they are not."""
    record = launch.running_record(millrace_home())
    folder = digits.folder
    if record is not None and not any(folder.is_relative_to(root) for root in record.import_roots):
        folder = Path(record.import_roots[0]) / "digits"
        folder.mkdir(parents=True, exist_ok=True)
        for file in digits.files():
            shutil.copyfile(file, folder / file.name)
    return folder.as_uri()


def _short(path: Path) -> Any:
    """Relative to the working directory where it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
