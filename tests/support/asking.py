"""Clients that ask without a pause, and remember what they got."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.support.waiting import wait_until


class Load:
    """`ask()` is called from `clients` threads, one call after the other; what it returns is counted in `answers`."""

    def __init__(self, ask: Callable[[], str], clients: int) -> None:
        self._ask = ask
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        self.errors: list[Exception] = []
        self._ended = [0] * clients
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int, within_s: float = 120) -> Counter[str]:
        """Returns after so many more answers, with those."""
        before = self.answers.copy()
        wanted = before.total() + more
        wait_until(lambda: self.answers.total() >= wanted or self.errors, f"{more} more answers", within_s)
        return self.answers - before

    def wait_for_those_under_way(self, within_s: float = 120) -> None:
        """Returns once no call is under way any more that is now."""
        before = self._ended.copy()
        wait_until(
            lambda: all(map(operator.gt, self._ended, before)) or self.errors, "what had been asked before", within_s
        )

    def _run(self, client: int) -> None:
        while not self._stop.is_set():
            try:
                answer: Any = self._ask()
            except Exception as error:  # a wrong answer, too, is what the test wants to hear of
                self.errors.append(error)
            else:
                with self._lock:
                    self.answers[answer] += 1
            self._ended[client] += 1
