"""The start-up probe: it accepts what honours put-if-absent, and tells an operator why it refuses the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store, probe
from shared.storage.object_store import StoreRefused, ensure_bucket
from tests.support.forgetful_s3 import forgetful


def test_a_store_with_put_if_absent_is_accepted_and_left_as_it_was(store: ObjectStore) -> None:
    store.put("mine", b"kept")

    probe(store)

    assert [info.key for info in store.list()] == ["mine"]


def test_a_store_that_ignores_the_condition_is_refused(s3_store: StoreSettings) -> None:
    with forgetful(s3_store) as settings:
        store = open_store(settings)
        store.put("key", b"value")
        assert store.get("key") == b"value"  # in all else it is a good store

        with pytest.raises(StoreRefused, match="does not honour put-if-absent"):
            probe(store)


def test_a_missing_bucket_is_refused_by_name(s3_store: StoreSettings) -> None:
    with pytest.raises(StoreRefused, match=r"s3://no-such-bucket/x: .*its bucket is not there"):
        probe(open_store(replace(s3_store, url="s3://no-such-bucket/x")))


def test_wrong_credentials_are_refused_without_showing_them(s3_store: StoreSettings) -> None:
    wrong = replace(s3_store, s3_secret_key="not-the-secret")

    with pytest.raises(StoreRefused, match="credentials") as refused:
        probe(open_store(wrong))

    assert "not-the-secret" not in str(refused.value)


def test_making_the_bucket_reports_refused_credentials_and_impossible_names(s3_store: StoreSettings) -> None:
    with pytest.raises(StoreRefused, match="millrace"):
        ensure_bucket(replace(s3_store, s3_secret_key="not-the-secret"))
    with pytest.raises(StoreRefused, match="Not_A_Bucket"):
        ensure_bucket(replace(s3_store, url="s3://Not_A_Bucket/x"))


def test_making_a_bucket_that_is_there_changes_nothing(store: ObjectStore, store_settings: StoreSettings) -> None:
    store.put("key", b"value")

    ensure_bucket(store_settings)

    assert store.get("key") == b"value"
