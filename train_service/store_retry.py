"""Waiting out an absent store: training stalls for as long as it is away, and does not fail."""

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

# After so long an attempt is given up; its checkpoints stay, and the next one waits as long.
OUTAGE_TIMEOUT_S = 600.0
RETRY_DELAY_S = 1.0

_lock = threading.Lock()
# By thread: how many calls of the store it is in, and the thread that it waits for.
_calls: Counter[int] = Counter()
_waits: dict[int, int] = {}


def retry_on_outage(call: Callable[[], T], what: str, outage_timeout_s: float = OUTAGE_TIMEOUT_S) -> T:
    """What `call` returns, called again and again while the store does not answer or is full. Raises its last error
    after `outage_timeout_s`. To be used for calls that may be repeated, whether or not the one before had an effect."""
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
    """Whether this thread (by its `ident`) is in a `store_call`, or waits for one that is. What others of its process
    wait for, as a checkpoint that is written beside the steps, is no reason for it to stand still."""
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
    """Around what waits for the store, or for a thread that only works for it, with a patience of its own: a thread
    that waits in it does not hang."""
    thread = threading.get_ident()
    _count(thread, 1)
    try:
        yield
    finally:
        _count(thread, -1)


@contextmanager
def waiting_for(other: threading.Thread) -> Iterator[None]:
    """Around what waits for a thread that does more than call the store. Not to be nested."""
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
