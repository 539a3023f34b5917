"""A store that does not answer: `Unavailable`, soon enough that a call can still say so before its deadline."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.grpc_server.interceptor import DEFAULT_DEADLINE_S
from shared.settings import StoreSettings
from shared.storage import ObjectExists, ObjectStore, object_store, open_store, probe
from shared.storage.object_store import SILENCE_TIMEOUT, ensure_bucket
from tests.support.s3_fault_proxy import WRITES, fault_proxy, resetting

SETTINGS = StoreSettings(url="s3://millrace/x", s3_access_key="someone", s3_secret_key="their-secret")
# As they are, before a test changes them.
RETRY_TIMEOUT_S, RETRY_FOR_S = object_store.RETRY_TIMEOUT_S, object_store.RETRY_FOR.total_seconds()

DOINGS: dict[str, Callable[[ObjectStore, Path], object]] = {
    "get": lambda store, _: store.get("key"),
    "size": lambda store, _: store.size("key"),
    "put": lambda store, _: store.put("key", b"value"),
    "put_if_absent": lambda store, _: store.put_if_absent("key", b"value"),
    "list": lambda store, _: list(store.list()),
    "folders": lambda store, _: store.folders("a"),
    "delete": lambda store, _: store.delete("key"),
    "delete_all": lambda store, _: store.delete_all(["key", "other"]),
    "upload_file": lambda store, path: store.upload_file(path, "key"),
}


@pytest.fixture
def nobody() -> Iterator[str]:
    """An endpoint where connections are refused."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # never listens
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def unresponsive() -> Iterator[str]:
    """An endpoint that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_an_outage_is_reported_before_a_calls_deadline() -> None:
    assert max(RETRY_TIMEOUT_S, RETRY_FOR_S, SILENCE_TIMEOUT.total_seconds()) < DEFAULT_DEADLINE_S


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("doing", DOINGS)
def test_an_unreachable_store_is_unavailable(nobody: str, doing: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"value")

    with pytest.raises(Unavailable) as raised:
        DOINGS[doing](open_store(replace(SETTINGS, s3_endpoint=nobody)), path)

    assert raised.value.specific_reason == "STORE_UNAVAILABLE"
    assert raised.value.retry_after_s
    # The message goes to clients; endpoints and keys are none of their business.
    assert "127.0.0.1" not in raised.value.message
    assert "their-secret" not in repr(raised.value.__cause__)


def test_a_store_that_accepts_and_keeps_silent_is_unavailable(
    unresponsive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "SILENCE_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(object_store, "RETRY_FOR", timedelta(seconds=1))

    with pytest.raises(Unavailable):
        DOINGS["get"](open_store(replace(SETTINGS, s3_endpoint=unresponsive)), tmp_path)


@pytest.mark.usefixtures("short_patience")
def test_starting_on_an_unreachable_store_names_its_endpoint(nobody: str) -> None:
    settings = replace(SETTINGS, s3_endpoint=nobody)

    with pytest.raises(Unavailable, match=nobody.removeprefix("http://")):
        ensure_bucket(settings)
    with pytest.raises(Unavailable):
        probe(open_store(settings))


@pytest.mark.parametrize("doing", ["get", "put", "put_if_absent", "delete", "delete_all", "list"])
def test_wrong_credentials_are_an_outage_to_callers_and_never_a_missing_object(
    s3_store: StoreSettings, doing: str, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable) as raised:
        DOINGS[doing](open_store(replace(s3_store, s3_secret_key="wrong")), tmp_path)

    assert raised.value.specific_reason == "STORE_REFUSED"


@pytest.mark.parametrize("doing", ["get", "put", "put_if_absent", "delete_all", "list"])
def test_a_lost_bucket_is_an_outage_and_never_a_missing_object(
    s3_store: StoreSettings, doing: str, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable) as raised:
        DOINGS[doing](open_store(replace(s3_store, url="s3://no-such-bucket/x")), tmp_path)

    assert raised.value.specific_reason == "STORE_REFUSED"


@pytest.mark.parametrize("write", ["put", "put_if_absent", "upload_file"])
def test_a_write_outlives_connections_that_break(s3_store: StoreSettings, tmp_path: Path, write: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"value")
    with fault_proxy(s3_store) as proxy:
        store = open_store(proxy.settings(s3_store))
        for _ in range(3):
            proxy.fault = resetting("request", 1, nth=1, methods=WRITES)
            DOINGS[write](store, path)
            assert proxy.struck == 1
            store.delete("key")


def test_a_writer_whose_answer_was_lost_may_meet_its_own_object(s3_store: StoreSettings) -> None:
    with fault_proxy(s3_store) as proxy:
        proxy.fault = resetting("response", nth=1, methods=WRITES)

        with pytest.raises(ObjectExists):
            open_store(proxy.settings(s3_store)).put_if_absent("key", b"value")

    assert open_store(s3_store).get("key") == b"value"
