"""Waiting out an absent store: training stalls for as long as it is away, and does not fail."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shared.errors import STORE_OUTAGES

logger = logging.getLogger(__name__)

T = TypeVar("T")

# After so long an attempt is given up; its checkpoints stay, and the next one waits as long.
PATIENCE_S = 600.0
AGAIN_AFTER_S = 1.0

_lock = threading.Lock()
_waiting = 0


def patient(call: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """What `call` returns, called again and again while the store does not answer or is full. Raises its last error
    after `patience_s`. To be used for calls that may be repeated, whether or not the one before had an effect."""
    give_up_at = time.monotonic() + patience_s
    with store_call():
        while True:
            try:
                return call()
            except STORE_OUTAGES as error:
                if time.monotonic() > give_up_at:
                    raise
                logger.warning("%s; %s waits for the store", error.message, what)
                time.sleep(AGAIN_AFTER_S)


def in_store_calls() -> bool:
    """Whether a thread of this process is in a `store_call`: one that stands still may be waiting for it."""
    return _waiting > 0


@contextmanager
def store_call() -> Iterator[None]:
    """Around what waits for the store with a patience of its own: whoever waits in it does not hang."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(by: int) -> None:
    global _waiting
    with _lock:
        _waiting += by
