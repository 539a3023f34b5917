"""A store that is away is waited for, and everybody can see that somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shared.errors import DataLoss, Unavailable
from tests.support.waiting import wait_until
from train_service import store_retry
from train_service.store_retry import retry_on_outage, store_call, waiting_for, waits_for_store


def this_waits() -> bool:
    return waits_for_store(threading.get_ident())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_retry, "RETRY_DELAY_S", 0.0)


def test_a_call_is_repeated_until_the_store_answers() -> None:
    tries = 0

    def call() -> str:
        nonlocal tries
        tries += 1
        assert this_waits()
        if tries < 4:
            raise Unavailable("no store")
        return "rows"

    assert retry_on_outage(call, "a row group") == "rows"
    assert tries == 4
    assert not this_waits()


def test_patience_ends_and_other_errors_are_raised_at_once() -> None:
    def away() -> None:
        raise Unavailable("no store")

    def damaged() -> None:
        raise DataLoss("flipped")

    with pytest.raises(Unavailable):
        retry_on_outage(away, "a row group", outage_timeout_s=0.01)
    with pytest.raises(DataLoss):
        retry_on_outage(damaged, "a row group")
    assert not this_waits()


def test_a_thread_waits_for_the_store_through_whom_it_waits_for_and_not_through_others() -> None:
    """A checkpoint's thread is in a call of the store; one thread waits for it, and another for one that hangs."""
    answered, hangs, go_on = threading.Event(), threading.Event(), threading.Event()

    def upload() -> None:
        with store_call():
            answered.wait(60)

    def wait_for(other: threading.Thread) -> Callable[[], None]:
        def wait() -> None:
            with waiting_for(other):
                go_on.wait(60)

        return wait

    def started(work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    uploads, stands = started(upload), started(lambda: hangs.wait(60))
    excused, not_excused = started(wait_for(uploads)), started(wait_for(stands))
    through = started(wait_for(excused))
    try:
        wait_until(lambda: waits_for_store(through.ident or 0), "the wait to be seen")
        assert waits_for_store(excused.ident or 0)
        assert not waits_for_store(not_excused.ident or 0)
        assert not this_waits()
        answered.set()
        wait_until(lambda: not waits_for_store(through.ident or 0), "the end of the wait")
    finally:
        for event in (answered, hangs, go_on):
            event.set()
