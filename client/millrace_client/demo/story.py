"""How the demonstration tells what it does: numbered stages with their wall times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from millrace_client.cli.output import console, duration_text, new_table


class Story:
    """Prints a heading for each stage and keeps how long it took."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = {}
        self._started = time.monotonic()

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """One stage; its time counts even when it fails."""
        console().print(f"\n[bold]{len(self.wall_s) + 1}  {title}[/]")
        started = time.monotonic()
        try:
            yield
        finally:
            self.wall_s[title] = time.monotonic() - started

    def tell(self, text: str) -> None:
        console().print(f"   {text}", soft_wrap=True)

    def total_s(self) -> float:
        return time.monotonic() - self._started

    def print_wall_times(self) -> None:
        table = new_table("stage", "wall time", numbers=("wall time",))
        for title, seconds in self.wall_s.items():
            table.add_row(title, duration_text(seconds))
        table.add_row("[bold]all[/]", f"[bold]{duration_text(self.total_s())}[/]")
        console().print(table)
