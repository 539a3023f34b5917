"""URLs that put objects into the store, on a real S3 server."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from shared.settings import StoreSettings
from shared.storage import open_store
from shared.storage.presigning import Presigner, presigner


def put(url: str, data: bytes) -> int:
    request = urllib.request.Request(url, data=data, method="PUT")
    # urllib adds a Content-Type of its own; no header but Content-Length is needed.
    request.add_header("Content-Type", "")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return int(answer.status)


def test_a_put_to_the_url_writes_the_object(s3_store: StoreSettings) -> None:
    url = Presigner(s3_store).put_url("a b/chunks/0")
    assert put(url, b"bytes") == 200
    store = open_store(s3_store)
    assert store.get("a b/chunks/0") == b"bytes"
    assert put(url, b"others") == 200
    assert store.get("a b/chunks/0") == b"others"


def test_the_url_is_good_for_its_own_object_only(s3_store: StoreSettings) -> None:
    url = Presigner(s3_store).put_url("a/mine")
    with pytest.raises(urllib.error.HTTPError) as raised:
        put(url.replace("a/mine", "a/other"), b"bytes")
    assert raised.value.code == 403
    assert not open_store(s3_store).exists("a/other")


def test_urls_name_the_endpoint_that_clients_see_and_no_secret() -> None:
    settings = StoreSettings(
        url="s3://bucket/prefix",
        s3_endpoint="http://minio:9000",
        s3_access_key="someone",
        s3_secret_key="their-secret",
        public_s3_endpoint="https://s3.example.com",
    )
    url = Presigner(settings).put_url("key")  # no service answers at either: it is signed offline
    assert url.startswith("https://s3.example.com/bucket/prefix/key?")
    assert "X-Amz-Expires=3600" in url
    assert "their-secret" not in url
    inner = Presigner(replace(settings, public_s3_endpoint="")).put_url("key")
    assert inner.startswith("http://minio:9000/bucket/prefix/key?")


def test_a_local_directory_has_none(file_store: StoreSettings) -> None:
    assert presigner(file_store) is None
