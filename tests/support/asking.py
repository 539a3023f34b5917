"""Clients that ask again and again, and remember what they got."""

from __future__ import annotations

import operator
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.support.waiting import wait_until


class Load:
    """`ask()` is called from `clients` threads, one call after the other, with a pause of `pause_s` after each; what it
    returns is counted in `answers`."""

    def __init__(self, ask: Callable[[], str], clients: int, pause_s: float = 0.0) -> None:
        self._ask = ask
        self._pause_s = pause_s
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

    def wait_for(self, more: int, timeout_s: float = 240) -> Counter[str]:
        """Return after that number of further answers, with those."""
        before = self.answers.copy()
        wanted = before.total() + more
        wait_until(lambda: self.answers.total() >= wanted or self.errors, f"{more} more answers", timeout_s)
        return self.answers - before

    def wait_for_those_under_way(self, timeout_s: float = 240) -> None:
        """Return once no call is under way any more that is now."""
        before = self._ended.copy()
        wait_until(
            lambda: all(map(operator.gt, self._ended, before)) or self.errors, "what had been asked before", timeout_s
        )

    def assert_all_answered(self) -> None:
        """Fail with the errors that there were, in full."""
        counts = f"{len(self.errors)} of {len(self.errors) + self.answers.total()} calls failed"
        assert not self.errors, "\n".join([counts, *map(str, self.errors[:10])])

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
            self._stop.wait(self._pause_s)


def kill_a_replica_under_load(ask: Callable[[], str], clients: int, replicas: Callable[[], set[int]]) -> None:
    """SIGKILLs one of the two processes that `replicas` finds; no client must notice, also once another has come."""
    before = replicas()
    assert len(before) == 2
    with Load(ask, clients) as load:
        load.wait_for(50)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        load.wait_for(50)
        wait_until(lambda: len(replicas() - {victim}) == 2, "a new replica to be started", 240)
        load.wait_for(50)
    load.assert_all_answered()
