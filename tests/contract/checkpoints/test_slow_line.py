"""A checkpoint is read over a line on which it takes far longer than one request may, and which breaks again and again.

The bar is 200 MB at 1 MB/s a connection with a cut every 20 MB, where a request may take 30 s and is repeated for 10 s.
Here all is smaller: 12 MiB at 1.25 MiB/s with a cut every 1.2 MiB, 4 s a request, and 1 s of repetition.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from shared.checkpoint import load_checkpoint, write_checkpoint
from shared.checkpoint.format import WEIGHTS, files_of, read_file
from shared.settings import StoreSettings
from shared.storage import ObjectStore, object_store, open_store
from tests.support.checkpoint_samples import content
from tests.support.s3_fault_proxy import NONE, S3FaultProxy, fault_proxy, slow, slow_and_cut, stalling

MIB = 1024 * 1024
SIZE = 12 * MIB
RATE = MIB * 5 // 4
CUT_AFTER = SIZE // 10


@pytest.fixture
def behind(s3_store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ObjectStore, S3FaultProxy]]:
    """A store by way of a proxy. Its objects are written without it."""
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", timedelta(seconds=4))
    monkeypatch.setattr(object_store, "RETRY_FOR", timedelta(seconds=1))
    with fault_proxy(s3_store) as proxy:
        yield open_store(proxy.settings(s3_store)), proxy


def test_a_checkpoint_is_read_over_a_slow_line_that_breaks(
    s3_store: StoreSettings, behind: tuple[ObjectStore, S3FaultProxy]
) -> None:
    store, proxy = behind
    data = os.urandom(SIZE)
    digest, _ = write_checkpoint(open_store(s3_store), "checkpoint", content(), {WEIGHTS: data})
    checkpoint = load_checkpoint(store, "checkpoint", digest)
    proxy.fault = slow_and_cut(RATE, CUT_AFTER)
    assert checkpoint.read(WEIGHTS) == data
    assert proxy.struck > SIZE // CUT_AFTER, "no request brings more than up to the next cut"


def test_a_download_goes_on_where_the_line_broke(
    s3_store: StoreSettings, behind: tuple[ObjectStore, S3FaultProxy]
) -> None:
    store, proxy = behind
    data = os.urandom(SIZE)
    digest, _ = write_checkpoint(open_store(s3_store), "checkpoint", content(), {WEIGHTS: data})
    weights = next(one for one in files_of(store, "checkpoint", digest) if one.path == WEIGHTS)
    proxy.fault = slow_and_cut(RATE, CUT_AFTER)
    begin = 5 * MIB + 3
    assert b"".join(read_file(store, weights, begin)) == data[begin:]


def test_a_whole_object_is_read_over_a_slow_line_that_breaks(
    s3_store: StoreSettings, behind: tuple[ObjectStore, S3FaultProxy]
) -> None:
    store, proxy = behind
    data = os.urandom(SIZE // 2)
    open_store(s3_store).put("object", data)
    proxy.fault = slow_and_cut(RATE, CUT_AFTER)
    assert store.get("object") == data


def test_a_large_object_takes_one_request(s3_store: StoreSettings, behind: tuple[ObjectStore, S3FaultProxy]) -> None:
    store, proxy = behind
    data = os.urandom(SIZE // 2)
    open_store(s3_store).put("object", data)
    proxy.fault = NONE
    assert store.get("object") == data
    assert proxy.requests == 1


def test_a_checkpoint_is_written_over_a_line_that_takes_longer_for_a_part_than_a_server_may_be_silent(
    s3_store: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "SILENCE_TIMEOUT", timedelta(seconds=2))
    data = os.urandom(4 * MIB)
    with fault_proxy(s3_store) as proxy:
        store = open_store(proxy.settings(s3_store))
        proxy.fault = slow(MIB)
        store.put("object", data)
    assert open_store(s3_store).get("object") == data


def test_a_read_that_falls_silent_goes_on(s3_store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed as late as requests are repeated, as with the limits of a service."""
    monkeypatch.setattr(object_store, "SILENCE_TIMEOUT", timedelta(seconds=5))
    monkeypatch.setattr(object_store, "RETRY_FOR", timedelta(seconds=5))
    monkeypatch.setattr(object_store, "RETRY_TIMEOUT_S", 5.0)
    data = os.urandom(4 * MIB)
    open_store(s3_store).put("object", data)
    with fault_proxy(s3_store) as proxy:
        store = open_store(proxy.settings(s3_store))
        reads: list[Callable[[], bytes]] = [
            lambda: store.get_range("object", 0, len(data)),
            lambda: store.get("object"),
        ]
        for read in reads:
            proxy.fault = stalling(MIB, nth=1)
            assert read() == data
            assert (proxy.struck, proxy.requests) == (1, 2)
