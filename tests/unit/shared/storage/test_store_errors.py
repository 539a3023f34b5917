"""What the errors of a store mean: their texts also have the key, so a key may look like any sign in them."""

from __future__ import annotations

import pytest
from obstore import exceptions

from shared.errors import ResourceExhausted, Unavailable
from shared.storage import ObjectMissing, ObjectStore
from shared.storage.object_store import _errors


@pytest.mark.parametrize(
    "key",
    ["a(code: AccessDenied)", "a 403 Forbidden", "a 507 Insufficient Storage", "a(os error 28)", "NoSuchBucket/a"],
)
def test_a_missing_object_is_missing_whatever_its_key_looks_like(store: ObjectStore, key: str) -> None:
    assert not store.exists(key)
    with pytest.raises(ObjectMissing):
        store.get(key)
    store.delete(key)

    store.put(key, b"there")
    assert store.get(key) == b"there"


def test_a_missing_bucket_is_not_taken_for_a_missing_object() -> None:
    with pytest.raises(Unavailable, match="its bucket is not there"), _errors("a"):
        raise exceptions.NotFoundError("404 Not Found: <Error><Code>NoSuchBucket</Code></Error>")


@pytest.mark.parametrize("text", ["<Code>NoSuchBucket</Code>", "a was not deleted (code: NoSuchBucket)"])
def test_a_missing_bucket_is_one_that_is_not_there_in_each_answer(text: str) -> None:
    with pytest.raises(Unavailable, match="its bucket is not there"), _errors("a"):
        raise exceptions.GenericError(text)


def test_a_refusal_and_a_full_store_are_known_by_their_texts() -> None:
    with pytest.raises(Unavailable, match="credentials"), _errors("a"):
        raise exceptions.GenericError("a was not deleted (code: AccessDenied)")
    with pytest.raises(ResourceExhausted), _errors("a"):
        raise exceptions.PermissionDeniedError("403 Forbidden: <Error><Code>XMinioStorageFull</Code></Error>")
