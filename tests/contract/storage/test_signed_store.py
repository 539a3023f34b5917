"""`SignedStore` on a real S3 server: what it reads and writes by signed addresses is what `ObjectStore` has there."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import urllib3

from shared.errors import DataLoss, FailedPrecondition, ResourceExhausted, Unavailable
from shared.settings import StoreSettings
from shared.storage import ObjectMissing, ObjectStore, open_store, presigning
from shared.storage.object_store import unresponsive_store
from shared.storage.presigning import MultipartUploads, Presigner, SignedStore
from tests.support.peak_memory import growth_here
from tests.support.s3_fault_proxy import (
    NONE,
    failing,
    fault_proxy,
    full,
    resetting,
    slow_and_cut,
    stalling,
    unresponsive,
)
from tests.support.waiting import wait_until

MIB = 1024 * 1024


class Signer:
    """Signs whatever it is asked for, with the store's keys."""

    def __init__(self, settings: StoreSettings, valid_for_s: float = 600.0) -> None:
        self.presigner = Presigner(settings, for_clients=False)
        self.uploads = MultipartUploads(open_store(settings))
        self.valid_for_s = valid_for_s
        self.asked: list[str] = []
        self.refusal: FailedPrecondition | None = None

    def __call__(self, body: dict[str, Any], _timeout_s: float) -> dict[str, Any]:
        kind, key = body["kind"], body.get("key", "")
        self.asked.append(kind)
        if self.refusal is not None:
            return {"error": self.refusal.as_record()}
        if kind == "sign":
            sign = self.presigner.get_url if body["method"] == "GET" else self.presigner.put_url
            return {"addresses": {key: sign(key) for key in body["keys"]}, "valid_for_s": self.valid_for_s}
        if kind == "begin_parts":
            upload_id = self.uploads.begin(key)
            return {"upload_id": upload_id, **self.parts(key, upload_id, 1)}
        if kind == "sign_parts":
            return self.parts(key, body["upload_id"], body["first"])
        if kind == "complete_parts":
            try:
                self.uploads.complete(key, body["upload_id"], body["etags"], body["size_bytes"])
            except Unavailable as error:
                return {"error": error.as_record()}
            return {}
        assert kind == "abort_parts", kind
        self.uploads.abort(key, body["upload_id"])
        return {}

    def parts(self, key: str, upload_id: str, first: int) -> dict[str, Any]:
        urls = [self.presigner.part_url(key, upload_id, number) for number in (first, first + 1)]
        return {"first": first, "addresses": urls, "valid_for_s": self.valid_for_s}


@pytest.fixture
def plain(s3_store: StoreSettings) -> ObjectStore:
    """The same store, opened with its keys."""
    return open_store(s3_store)


@pytest.fixture
def signer(s3_store: StoreSettings) -> Signer:
    return Signer(s3_store)


@pytest.fixture
def signed(signer: Signer) -> Iterator[SignedStore]:
    store = SignedStore(signer)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def long_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes over a request, what is to succeed at last does."""
    monkeypatch.setattr(presigning, "RETRY_FOR_S", 240.0)
    monkeypatch.setattr(presigning, "RETRY_PART_FOR_S", 240.0)


@pytest.fixture
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a store that stays away."""
    monkeypatch.setattr(presigning, "RETRY_FOR_S", 1.0)
    monkeypatch.setattr(presigning, "RETRY_PART_FOR_S", 1.0)


def of_pieces(data: bytes, size: int = 3 * MIB) -> Callable[[], Iterator[bytes]]:
    return lambda: (data[begin : begin + size] for begin in range(0, len(data), size))


@pytest.mark.parametrize("key", ["one", "a/deep/er/key", "space, #hash, ?mark and %2F", "größe", "a+b=c&d[1]~{x}"])
def test_both_stores_have_the_same_object_at_the_same_key(signed: SignedStore, plain: ObjectStore, key: str) -> None:
    signed.put(key, b"by an address")
    assert plain.get(key) == b"by an address"
    plain.put(key, b"by the keys")
    assert signed.get(key) == b"by the keys"


def test_ranges_are_cut_out_exactly(signed: SignedStore, plain: ObjectStore) -> None:
    plain.put("key", bytes(range(100)))
    ranges = [(0, 100), (10, 5), (7, 0), (99, 1)]
    assert [bytes(one) for one in signed.get_ranges("key", ranges)] == [
        bytes(one) for one in plain.get_ranges("key", ranges)
    ]
    assert signed.get_range("key", 3, 2) == b"\x03\x04"


@pytest.mark.parametrize(("start", "length"), [(8, 5), (10, 1), (50, 1)])
def test_a_range_beyond_the_end_is_an_error_and_never_short(
    signed: SignedStore, plain: ObjectStore, start: int, length: int
) -> None:
    plain.put("key", b"0123456789")
    with pytest.raises(DataLoss, match="key ends before"):
        signed.get_range("key", start, length)


def test_a_missing_object_is_reported(signed: SignedStore) -> None:
    with pytest.raises(ObjectMissing):
        signed.get("nothing")
    with pytest.raises(ObjectMissing):
        signed.get_ranges("nothing", [(0, 1), (5, 1)])


def test_many_reads_ask_once_for_an_address_and_again_before_it_expires(
    signed: SignedStore, signer: Signer, plain: ObjectStore
) -> None:
    plain.put("key", b"0123456789")
    for _ in range(5):
        signed.get_ranges("key", [(0, 1), (3, 1)])
    assert signer.asked == ["sign"]
    signer.valid_for_s = 0.0
    signed._address("GET", "key", anew=True)
    signed.get("key")
    assert signer.asked == ["sign"] * 3


def test_an_address_that_the_store_takes_for_expired_is_signed_anew(
    signer: Signer, signed: SignedStore, plain: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.put("key", b"value")
    with monkeypatch.context() as brief:
        brief.setattr(presigning, "VALID_FOR", timedelta(seconds=1))
        expiring = signer.presigner.get_url("key")
    # The store's own clock counts.
    wait_until(lambda: urllib3.request("GET", expiring).status != 200, "the address to expire")
    addresses = iter([expiring, signer.presigner.get_url("key")])
    monkeypatch.setattr(signer.presigner, "get_url", lambda _: next(addresses))

    assert signed.get("key") == b"value"
    assert signer.asked == ["sign", "sign"]


def test_an_address_that_is_never_accepted_is_reported_with_object_and_remedy(s3_store: StoreSettings) -> None:
    store = SignedStore(Signer(replace(s3_store, s3_secret_key="another")))
    with pytest.raises(Unavailable, match=r"it refuses GET of a/key by a signed address .*clocks") as raised:
        store.get("a/key")
    assert raised.value.specific_reason == "STORE_REFUSED"
    assert "another" not in raised.value.message
    store.close()


def test_a_refusal_of_the_signer_is_raised(signed: SignedStore, signer: Signer) -> None:
    signer.refusal = FailedPrecondition("rank 1 may not write x", reason="KEY_REFUSED")
    for call in (lambda: signed.put("x", b""), lambda: signed.get("x"), lambda: signed.put_pieces("x", of_pieces(b""))):
        with pytest.raises(FailedPrecondition, match="may not write x"):
            call()


def test_a_signer_that_does_not_answer_is_an_outage() -> None:
    def absent(_body: dict[str, Any], _timeout_s: float) -> dict[str, Any]:
        raise TimeoutError("no answer")

    with pytest.raises(Unavailable, match="no signer answers") as raised:
        SignedStore(absent).get("key")
    assert raised.value.specific_reason == "STORE_UNAVAILABLE"


@pytest.mark.parametrize("size", [0, 1, 16 * MIB, 16 * MIB + 1, 70 * MIB + 5])
def test_pieces_become_one_object_whatever_its_size(
    signed: SignedStore, signer: Signer, plain: ObjectStore, size: int
) -> None:
    data = os.urandom(size)
    signed.put_pieces("large", of_pieces(data))
    assert plain.size("large") == size
    assert plain.get("large") == data
    # 18 MiB make a part of 3-MiB pieces, and an answer has the addresses of two parts.
    assert signer.asked.count("sign_parts") == (1 if size > 36 * MIB else 0)


def test_parts_that_are_sent_are_let_go(signed: SignedStore) -> None:
    signed.put_pieces("warm", of_pieces(bytes(40 * MIB)))

    def pieces() -> Iterator[bytes]:
        for _ in range(150):
            yield bytes(3 * MIB)

    gc.collect()
    with growth_here() as growth:
        signed.put_pieces("large", pieces)
    # Of 450 MiB the parts that are under way, the next one, and what urllib3 holds of them.
    assert growth() < 200 * MIB


def test_a_part_is_sent_again_through_an_outage_and_the_upload_is_not_begun_anew(
    s3_store: StoreSettings, plain: ObjectStore
) -> None:
    data = os.urandom(60 * MIB)
    with fault_proxy(s3_store) as proxy:
        signer = Signer(proxy.settings(s3_store))
        store = SignedStore(signer)
        proxy.fault = resetting("request", MIB, nth=2, methods=frozenset({"PUT"}))
        store.put_pieces("large", of_pieces(data))
        assert proxy.struck == 1
        proxy.fault = failing(503, share=0.4, methods=frozenset({"PUT"}))
        store.put_pieces("other", of_pieces(data))
        store.close()
    assert signer.asked.count("begin_parts") == 2
    assert plain.get("large") == data
    assert plain.get("other") == data


def test_an_upload_whose_end_is_not_answered_is_ended_again(
    signed: SignedStore, signer: Signer, plain: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, calls = signer.uploads.complete, []

    def fail_at_first(*arguments: Any) -> None:
        calls.append(arguments)
        complete(*arguments)
        if len(calls) == 1:
            raise unresponsive_store("large")  # after the server has done it

    monkeypatch.setattr(signer.uploads, "complete", fail_at_first)
    signed.put_pieces("large", of_pieces(bytes(40 * MIB)))
    assert (len(calls), plain.size("large")) == (2, 40 * MIB)
    assert "abort_parts" not in signer.asked


@pytest.mark.usefixtures("short_retries")
def test_an_upload_that_fails_leaves_neither_object_nor_parts(s3_store: StoreSettings, plain: ObjectStore) -> None:
    with fault_proxy(s3_store) as proxy:
        signer = Signer(proxy.settings(s3_store))
        store = SignedStore(signer)
        proxy.fault = failing(503, methods=frozenset({"PUT"}))
        with pytest.raises(Unavailable, match="does not answer"):
            store.put_pieces("folder/large", of_pieces(bytes(60 * MIB)))
        assert signer.asked[-1] == "abort_parts"
        store.close()
    assert not plain.exists("folder/large")
    page = MultipartUploads(plain)._client._list_multipart_uploads("millrace", prefix=s3_store.url.split("/")[-1])
    assert page.uploads == []


def test_a_store_without_room_says_so(s3_store: StoreSettings) -> None:
    with fault_proxy(s3_store) as proxy:
        store = SignedStore(Signer(proxy.settings(s3_store)))
        proxy.fault = full()
        with pytest.raises(ResourceExhausted, match="the object store is full"):
            store.put("key", b"value")
        store.close()


def test_a_store_that_is_silent_for_a_while_is_waited_for(
    s3_store: StoreSettings, plain: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presigning, "SILENCE_TIMEOUT", timedelta(seconds=0.5))
    plain.put("key", b"value")
    with fault_proxy(s3_store) as proxy:
        store = SignedStore(Signer(proxy.settings(s3_store)))
        proxy.fault = unresponsive()

        def come_back() -> None:
            wait_until(lambda: proxy.requests > 1, "two tries")
            proxy.fault = NONE

        back = threading.Thread(target=come_back)
        back.start()
        assert store.get("key") == b"value"
        back.join()
        store.close()


@pytest.mark.usefixtures("short_retries")
def test_a_store_that_stays_silent_is_an_outage(s3_store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presigning, "WRITTEN_TIMEOUT_S", 0.3)
    with fault_proxy(s3_store) as proxy:
        store = SignedStore(Signer(proxy.settings(s3_store)))
        proxy.fault = unresponsive()
        with pytest.raises(Unavailable, match="does not answer"):
            store.put("key", b"other")
        store.close()


def test_a_read_that_falls_silent_goes_on(
    s3_store: StoreSettings, plain: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence is noticed as late as requests are repeated, as with the limits of a service."""
    monkeypatch.setattr(presigning, "SILENCE_TIMEOUT", timedelta(seconds=5))
    monkeypatch.setattr(presigning, "RETRY_FOR_S", 5.0)
    data = os.urandom(4 * MIB)
    plain.put("key", data)
    with fault_proxy(s3_store) as proxy:
        store = SignedStore(Signer(proxy.settings(s3_store)))
        proxy.fault = stalling(MIB, nth=1)
        assert store.get_range("key", 0, len(data)) == data
        assert (proxy.struck, proxy.requests) == (1, 2)
        store.close()


def test_a_part_that_the_store_has_lost_begins_the_upload_anew_by_its_caller(
    signed: SignedStore, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = signer.parts

    def lose(key: str, upload_id: str, first: int) -> dict[str, Any]:
        signer.uploads.abort(key, upload_id)
        return parts(key, upload_id, first)

    monkeypatch.setattr(signer, "parts", lose)
    with pytest.raises(Unavailable, match="is not there any more") as raised:
        signed.put_pieces("large", of_pieces(bytes(40 * MIB)))
    assert raised.value.specific_reason == "STORE_CONFLICT"


def test_ending_an_upload_again_is_no_error(s3_store: StoreSettings, plain: ObjectStore) -> None:
    uploads, presigner = MultipartUploads(plain), Presigner(s3_store)
    upload_id = uploads.begin("key")
    store = SignedStore(Signer(s3_store))
    answer = store._send("key", "PUT", lambda _: presigner.part_url("key", upload_id, 1), [b"value"])
    for _ in range(2):
        uploads.complete("key", upload_id, [answer.headers["ETag"]], 5)
    assert plain.get("key") == b"value"
    # As where the answer to the first call was lost, and a server that forgets what it has ended.
    uploads.complete("key", "an-upload-that-is-gone", [answer.headers["ETag"]], 5)
    with pytest.raises(Unavailable, match="is not there any more"):
        uploads.complete("another", "an-upload-that-is-gone", [answer.headers["ETag"]], 5)
    store.close()


@pytest.mark.usefixtures("short_retries")
def test_a_range_is_read_over_a_slow_line_that_breaks(s3_store: StoreSettings, plain: ObjectStore) -> None:
    """It takes longer than a request is repeated for, and no connection brings more than a quarter of it."""
    data = os.urandom(4 * MIB)
    plain.put("large", data)
    with fault_proxy(s3_store) as proxy:
        store = SignedStore(Signer(proxy.settings(s3_store)))
        proxy.fault = slow_and_cut(MIB, MIB)
        assert store.get_range("large", 1, len(data) - 1) == data[1:]
        store.close()
