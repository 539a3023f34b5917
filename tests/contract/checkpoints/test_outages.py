"""A store that is away delays a checkpoint and fails nothing."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from shared.checkpoint import CheckpointRegistry, load_checkpoint
from shared.settings import StoreSettings
from shared.storage import object_store, open_store
from tests.support.s3_fault_proxy import NONE, fault_proxy, unresponsive
from tests.support.snapshots import JOB, entries, load, save_one, trained
from tests.support.waiting import wait_until
from train_service.checkpoints import writing_and_restoring
from train_service.checkpoints.writing_and_restoring import CheckpointWriter
from train_service.store_retry import waits_for_store


def test_a_store_that_is_away_in_mid_upload_is_waited_for_and_the_wait_is_reported(
    s3_store: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "RETRY_FOR", timedelta(seconds=1))
    monkeypatch.setattr(object_store, "SILENCE_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(writing_and_restoring, "REPORTED_AFTER_S", 0.5)
    warnings: list[str] = []
    model, optimizer = trained(3)
    with fault_proxy(s3_store) as proxy:
        store = open_store(proxy.settings(s3_store))
        registry = CheckpointRegistry(store, JOB)
        with CheckpointWriter(store, registry, 1, lambda _: None, warn=warnings.append) as writer:
            proxy.fault = unresponsive()
            save_one(writer, 3, model, optimizer)
            # Another request comes once nothing was heard of the first one for a second.
            wait_until(lambda: proxy.struck > 1, "that the writer asks again")
            assert not waits_for_store(threading.get_ident())  # the step goes on meanwhile
            assert entries(open_store(s3_store)) == []
            proxy.fault = NONE
            save_one(writer, 4, model, optimizer)
            writer.wait()
            assert writer.stalled_s > 0.0

    (first, second) = entries(open_store(s3_store))
    assert (first.step, second.step) == (3, 4)
    load_checkpoint(open_store(s3_store), first.folder, first.manifest_sha256).verify()
    load(open_store(s3_store), second, *trained(0))
    assert any("to reach the object store" in one for one in warnings)
