"""Processes that race for one log: each number has one winner, and no update is lost."""

from __future__ import annotations

from shared.resource_log import ResourceLog
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.support import racing

TIMES = 50


def test_a_counter_that_processes_race_for_ends_at_the_exact_sum(
    store_settings: StoreSettings, racers: racing.Racers
) -> None:
    racers.race(racing.count_up, store_settings, "counters/one/log", TIMES)

    store = open_store(store_settings)
    head = ResourceLog(store, "counters/one/log").head()
    assert head is not None
    assert head.state == {"sum": racing.RACERS * TIMES} | {f"{racer}": TIMES for racer in range(racing.RACERS)}
    # One record an update: contiguous, each written once and never again.
    log = ResourceLog(store, "counters/one/log")
    records = [log.read(number) for number in range(1, head.number + 1)]
    assert all(record is not None for record in records)
    assert [record.number for record in records if record] == list(range(1, racing.RACERS * TIMES + 1))
    assert [record.state["sum"] for record in records if record] == list(range(1, racing.RACERS * TIMES + 1))
    assert len({record.nonce for record in records if record}) == head.number
    assert log.read(head.number + 1) is None
    assert len(list(store.list("counters/one/log"))) == head.number
