"""What waiting jobs keep for themselves, as an attempt reads it that could take more workers."""

from __future__ import annotations

from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from train_service.domain.capacity import STRICT_PACK, Claim
from train_service.placement import EXPIRED_S, REFRESHED_S, QueueRecord

FIRST = Claim(bundle={"CPU": 1.0, "GPU": 1.0}, workers=2, strategy=STRICT_PACK, job="trainingJobs/first")
NEXT = Claim(bundle={"CPU": 1.0}, workers=1, strategy=STRICT_PACK, job="trainingJobs/next")


def test_an_attempt_reads_the_claims_that_the_reconciler_wrote(store: ObjectStore) -> None:
    assert QueueRecord(store).read() == []
    QueueRecord(store).write([FIRST, NEXT])
    assert QueueRecord(store).read() == [FIRST, NEXT]
    QueueRecord(store).write([])
    assert QueueRecord(store).read() == []


def test_claims_are_written_when_they_change_and_now_and_then(store: ObjectStore) -> None:
    now = 0.0
    counted = CountingStore(store)
    record = QueueRecord(counted, lambda: now)

    def writes(claims: list[Claim], at: float) -> int:
        nonlocal now
        now = at
        counted.forget()
        record.write(claims)
        return len(counted.requests)

    # A reconciler that has just started does not know what an earlier one wrote.
    assert writes([], 0.0) == 1
    assert writes([], 2 * REFRESHED_S) == 0
    assert writes([FIRST], 2 * REFRESHED_S) == 1
    assert writes([FIRST], 2.5 * REFRESHED_S) == 0
    assert writes([FIRST], 3 * REFRESHED_S) == 1
    assert writes([], 3 * REFRESHED_S) == 1


def test_claims_of_a_reconciler_that_is_gone_expire(store: ObjectStore) -> None:
    QueueRecord(store, lambda: 0.0).write([FIRST])
    assert QueueRecord(store, lambda: EXPIRED_S).read() == [FIRST]
    assert QueueRecord(store, lambda: EXPIRED_S + 1).read() == []
