from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from data_service.source_files import SourceFile, SourceFiles
from shared.errors import InvalidArgument, NotFound


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    return folder


def find(root: Path, uri: str) -> SourceFile:
    return SourceFiles([PurePosixPath(root)], None).find("sources[0].parquet.uri", uri)


def test_a_file_below_a_root_is_opened(root: Path) -> None:
    (root / "a b").write_bytes(b"content")
    source = find(root, (root / "a b").as_uri())
    assert source.size_bytes == 7
    with source.open() as opened:
        assert opened.read() == b"content"


def test_a_root_may_itself_be_a_link(tmp_path: Path, root: Path) -> None:
    (root / "a").write_bytes(b"x")
    (tmp_path / "link").symlink_to(root)
    assert find(tmp_path / "link", (tmp_path / "link" / "a").as_uri()).size_bytes == 1


def test_a_link_within_the_root_is_followed(root: Path) -> None:
    (root / "a").write_bytes(b"x")
    (root / "b").symlink_to(root / "a")
    assert find(root, (root / "b").as_uri()).size_bytes == 1


@pytest.mark.parametrize("through", ["file", "folder"])
def test_a_link_out_of_the_root_is_refused(tmp_path: Path, root: Path, through: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"x")
    (root / "file").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    uri = (root / ("file" if through == "file" else "folder/secret")).as_uri()
    with pytest.raises(InvalidArgument, match="a link leads out"):
        find(root, uri)


def test_a_link_that_is_set_after_the_check_is_refused_too(tmp_path: Path, root: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (root / "a").write_bytes(b"y")
    source = find(root, (root / "a").as_uri())
    (root / "a").unlink()
    (root / "a").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidArgument, match="a link leads out"):
        source.open()


def test_an_absent_file_is_not_found_by_the_name_of_its_field(root: Path) -> None:
    with pytest.raises(NotFound, match=r"sources\[0\].parquet.uri") as refused:
        find(root, (root / "absent").as_uri())
    assert refused.value.specific_reason == "SOURCE_NOT_FOUND"


def test_a_path_through_a_file_is_not_found(root: Path) -> None:
    (root / "a").write_bytes(b"x")
    with pytest.raises(NotFound):
        find(root, (root / "a" / "b").as_uri())


def test_links_that_run_in_a_circle_are_refused(root: Path) -> None:
    (root / "a").symlink_to(root / "b")
    (root / "b").symlink_to(root / "a")
    with pytest.raises(InvalidArgument, match="cannot open it"):
        find(root, (root / "a").as_uri())


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_only_a_regular_file_is_read(root: Path, kind: str) -> None:
    if kind == "folder":
        (root / "odd").mkdir()
    else:
        os.mkfifo(root / "odd")
    with pytest.raises(InvalidArgument, match="regular file"):
        find(root, (root / "odd").as_uri())
