"""Retries during an outage of the store: training stalls until the store is back, and does not fail."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shared.errors import STORE_OUTAGES

logger = logging.getLogger(__name__)

T = TypeVar("T")

# An attempt fails after this time. Its checkpoints stay, and the next attempt waits as long.
OUTAGE_TIMEOUT_S = 600.0
RETRY_DELAY_S = 1.0

_lock = threading.Lock()
# By thread: the number of its nested store calls, and the thread that it waits for.
_calls: Counter[int] = Counter()
_waits: dict[int, int] = {}


def retry_on_outage(call: Callable[[], T], what: str, outage_timeout_s: float = OUTAGE_TIMEOUT_S) -> T:
    """Return the result of `call`, repeated while the store does not answer or is full.

    Raises the last error after `outage_timeout_s`. `call` must be safe to repeat, whether or not the call before had an
    effect.
    """
    give_up_at = time.monotonic() + outage_timeout_s
    with store_call():
        while True:
            try:
                return call()
            except STORE_OUTAGES as error:
                if time.monotonic() > give_up_at:
                    raise
                logger.warning("%s; %s waits for the store", error.message, what)
                time.sleep(RETRY_DELAY_S)


def waits_for_store(thread: int) -> bool:
    """Return whether this thread (by its `ident`) is in a `store_call`, or waits for a thread that is.

    Other threads that use the store, e.g. for a checkpoint written beside the steps, do not excuse this thread's stall.
    """
    seen: set[int] = set()
    with _lock:
        while thread not in seen:
            if _calls.get(thread):
                return True
            seen.add(thread)
            thread = _waits.get(thread, thread)
    return False


@contextmanager
def store_call() -> Iterator[None]:
    """Mark a wait for the store, or for a thread that only works for it.

    The wait has its own timeout, so the waiting thread does not count as hung.
    """
    thread = threading.get_ident()
    _count(thread, 1)
    try:
        yield
    finally:
        _count(thread, -1)


@contextmanager
def waiting_for(other: threading.Thread) -> Iterator[None]:
    """Mark a wait for a thread that does more than call the store. Not to be nested."""
    thread, ident = threading.get_ident(), other.ident
    if ident is not None:
        with _lock:
            _waits[thread] = ident
    try:
        yield
    finally:
        with _lock:
            _waits.pop(thread, None)


def _count(thread: int, by: int) -> None:
    with _lock:
        _calls[thread] += by
        if not _calls[thread]:
            del _calls[thread]
