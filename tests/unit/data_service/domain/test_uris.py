from __future__ import annotations

import os
from pathlib import PurePosixPath

import pytest

from data_service.domain.import_spec import (
    FileSource,
    Glob,
    S3Source,
    UploadSource,
    UriRefused,
    check_allowed,
    parse_uri,
)

ROOTS = [PurePosixPath("/data/in")]


def test_files_and_objects_are_distinguished() -> None:
    assert parse_uri("file:///data/in/a%20b.gz") == FileSource(PurePosixPath("/data/in/a b.gz"))
    assert parse_uri("s3://bucket/deep/key.parquet") == S3Source("bucket", "deep/key.parquet")


@pytest.mark.parametrize(
    ("uri", "remedy"),
    [
        ("", "1 to 2048"),
        ("x" * 3000, "1 to 2048"),
        ("/data/in/a", "scheme file or s3"),
        ("http://host/a", "scheme file or s3"),
        ("datasets/d", "datasets/{d}/uploads/{u}"),
        ("datasets/d/uploads/../x", "datasets/{d}/uploads/{u}"),
        ("datasets/D/uploads/u", "datasets/{d}/uploads/{u}"),
        ("datasets/d/versions/v", "datasets/{d}/uploads/{u}"),
        ("file:///data/in/*/../../etc", "without '..'"),
        ("file:///data/in/%2e%2e/*.csv", "without '..'"),
        ("file:///data/in/*%00", "zero byte"),
        ("s3://bucket/%FF", "s3://bucket/key"),
        ("file://host/data/in/a", "no host"),
        ("file:data/in/a", "absolute path"),
        ("file:///data/in/../../etc/passwd", "without '..'"),
        ("file:///data/in/%2e%2e/%2e%2e/etc/passwd", "without '..'"),
        ("file:///data/in/a%00b", "zero byte"),
        ("file:///data/in/a#b", "leave out"),
        ("s3://bucket", "s3://bucket/key"),
        ("s3://B!/key", "s3://bucket/key; a bucket's name has 3 to 63 of a-z"),
        ("s3:///key", "use s3://bucket/key"),
        ("s3://bucket/../key", "without '..'"),
        ("file://[/a", "file:///absolute/path"),
    ],
)
def test_a_malformed_uri_is_refused_with_the_remedy(uri: str, remedy: str) -> None:
    with pytest.raises(UriRefused, match=remedy):
        parse_uri(uri)


def test_an_upload_goes_by_its_name() -> None:
    assert parse_uri("datasets/d-1/uploads/u-2") == UploadSource("datasets/d-1/uploads/u-2")
    check_allowed(parse_uri("datasets/d/uploads/u"), [], s3=False)


@pytest.mark.parametrize(
    ("uri", "path", "names"),
    [
        ("file:///data/in/", "/data/in", ("**",)),
        ("file:///data/in/*.csv", "/data/in", ("*.csv",)),
        ("file:///data/in/a%20b/**/x?.csv", "/data/in/a b", ("**", "x?.csv")),
        ("file:///data/i*n/x%2A", "/data", ("i*n", "x%2A")),
        ("file:///data/in/x*/", "/data/in", ("x*", "**")),
    ],
)
def test_folders_and_patterns_are_split_from_the_folder_that_is_searched(
    uri: str, path: str, names: tuple[str, ...]
) -> None:
    found = parse_uri(uri)
    assert found == FileSource(PurePosixPath(path), Glob(names))
    assert not found.single


def test_encoded_wildcards_are_characters_of_a_name() -> None:
    assert parse_uri("file:///data/in/a%2Ab%3F") == FileSource(PurePosixPath("/data/in/a*b?"))


def test_names_are_the_bytes_that_they_are() -> None:
    composed, decomposed = parse_uri("file:///in/%C3%A9"), parse_uri("file:///in/e%CC%81")
    assert isinstance(composed, FileSource)
    assert isinstance(decomposed, FileSource)
    assert composed != decomposed
    assert os.fsencode(parse_uri("file:///in/%FF").path) == b"/in/\xff"  # type: ignore[union-attr]


def test_files_below_a_root_are_allowed() -> None:
    check_allowed(parse_uri("file:///data/in/deep/a"), ROOTS, s3=False)


@pytest.mark.parametrize("path", ["/etc/passwd", "/data", "/data/into/a", "/data/in2/a"])
def test_files_elsewhere_are_refused(path: str) -> None:
    with pytest.raises(UriRefused, match="MILLRACE_IMPORT_ROOTS"):
        check_allowed(parse_uri(f"file://{path}"), ROOTS, s3=True)


def test_without_roots_no_file_is_read() -> None:
    with pytest.raises(UriRefused, match="MILLRACE_IMPORT_ROOTS set"):
        check_allowed(parse_uri("file:///data/in/a"), [], s3=True)


def test_without_an_endpoint_no_object_is_read() -> None:
    check_allowed(parse_uri("s3://bucket/key"), [], s3=True)
    with pytest.raises(UriRefused, match="no S3 endpoint"):
        check_allowed(parse_uri("s3://bucket/key"), [], s3=False)
