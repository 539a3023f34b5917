"""Sources on a real S3 endpoint: listed by prefix, named by percent-encoded keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from data_service.formats import open_sources
from data_service.storage.source_files import SourceFiles, s3_of
from shared.errors import InvalidArgument, NotFound
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.support.images import encoded
from tests.support.import_sources import source_of, table_of


def test_objects_are_found_by_folder_and_pattern_and_read(s3_store: StoreSettings) -> None:
    store, base = open_store(s3_store), s3_store.url
    files = SourceFiles([], s3_of(store), store)
    for name in ("in/b.csv", "in/a b.csv", "in/x/é+c.csv", "in/_d.csv"):
        store.put(name, b"n\n1\n")
    found = files.find_all("f", f"{base}/in/")
    assert [file.relative for file in found] == ["a b.csv", "b.csv", "x/é+c.csv"]
    assert [file.relative for file in files.find_all("f", f"{base}/in/**/*c.csv")] == ["x/é+c.csv"]
    assert {files.find("f", file.uri).size_bytes for file in found} == {4}
    rows = [one.rows for one in open_sources([source_of(f"{base}/in/", "csv")], files, {})]
    assert [table_of(one)["n"].to_pylist() for one in rows] == [[1], [1], [1]]
    with pytest.raises(NotFound, match="f: s3://"):
        files.find_all("f", f"{base}/none/")


@pytest.mark.parametrize("pattern", ["a.csv", "*.csv"])
def test_an_object_that_changed_since_it_was_found_is_not_opened(s3_store: StoreSettings, pattern: str) -> None:
    store = open_store(s3_store)
    store.put("in/a.csv", b"n\n1\n")
    (found,) = SourceFiles([], s3_of(store), store).find_all("f", f"{s3_store.url}/in/{pattern}")
    found.open().close()
    second = 1_000_000_000
    size, modified_ns = cast(Any, found.open).size_and_time
    modified_ns -= modified_ns % second
    # Lists have fractions of a second, and the answer to an opening may have none.
    for fits, time in ((True, 0), (True, second // 2), (False, 2 * second), (False, -2 * second)):
        opening = replace(cast(Any, found.open), size_and_time=(size, modified_ns + time))
        if fits:
            opening().close()
        else:
            with pytest.raises(InvalidArgument, match=r"f: s3://.* it changed while it was read") as refused:
                opening()
            assert refused.value.specific_reason == "SOURCE_CHANGED"
    store.put("in/a.csv", b"n\n12\n")
    with pytest.raises(InvalidArgument, match="it changed while it was read"):
        found.open()


def test_partition_folders_of_keys_are_columns(s3_store: StoreSettings) -> None:
    store = open_store(s3_store)
    for name in ("hive/city=K%C3%B6ln/day=1/a.csv", "hive/city=a%2Fb/day=2/a b.csv", "hive/city=é+=/day=03/c.csv"):
        store.put(name, b"n\n1\n")
    files = SourceFiles([], s3_of(store), store)
    found = open_sources([source_of(f"{s3_store.url}/hive/", "csv")], files, {})
    assert [table_of(one.rows).to_pylist() for one in found] == [
        [{"n": 1, "city": "Köln", "day": 1}],
        [{"n": 1, "city": "a/b", "day": 2}],
        [{"n": 1, "city": "é+=", "day": 3}],
    ]


def test_a_folder_of_images_may_be_a_prefix(s3_store: StoreSettings) -> None:
    store = open_store(s3_store)
    store.put("images/cat/x.png", encoded())
    files = SourceFiles([], s3_of(store), store)
    (one,) = open_sources([source_of(f"{s3_store.url}/images/", "image_folder")], files, {})
    assert table_of(one.rows)["path"].to_pylist() == ["cat/x.png"]
