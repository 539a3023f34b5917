from __future__ import annotations

import errno
import gc
import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from data_service.storage import source_files
from data_service.storage.source_files import SourceFile, SourceFiles
from shared.errors import InvalidArgument, NotFound, Unavailable


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


@pytest.mark.parametrize("change", ["replaced", "grown", "written in place"])
@pytest.mark.parametrize("pattern", ["a", "*"])
def test_a_file_that_changed_since_it_was_found_is_not_opened(root: Path, pattern: str, change: str) -> None:
    path = root / "a"
    path.write_bytes(b"content")
    (source,) = SourceFiles([PurePosixPath(root)], None).find_all("sources[0].csv.uri", f"{root.as_uri()}/{pattern}")
    source = pickle.loads(pickle.dumps(source))
    source.open().close()
    before = path.stat().st_mtime_ns
    if change == "replaced":
        (root / "b").write_bytes(b"another")
        (root / "b").replace(path)
    else:
        path.write_bytes(b"content." if change == "grown" else b"another")
    os.utime(path, ns=(0, before + (change != "grown")))  # within one tick of the disk's clock
    with pytest.raises(InvalidArgument, match=r"sources\[0\].csv.uri: .*/a .* it changed while it was read") as refused:
        source.open()
    assert refused.value.specific_reason == "SOURCE_CHANGED"


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


def test_a_folder_that_becomes_a_link_between_check_and_opening_is_not_followed(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_bytes(b"secret")
    (root / "folder").mkdir()
    (root / "folder" / "a").write_bytes(b"mine")
    resolve = Path.resolve

    def resolved_and_then_swapped(path: Path, strict: bool = False) -> Path:
        found = resolve(path, strict)
        if path.name == "a":
            (root / "folder").rename(root / "was")
            (root / "folder").symlink_to(tmp_path / "outside")
        return found

    monkeypatch.setattr(Path, "resolve", resolved_and_then_swapped)
    with pytest.raises((InvalidArgument, NotFound)):
        find(root, (root / "folder" / "a").as_uri())


def found(root: Path, below: str) -> list[str]:
    files = SourceFiles([PurePosixPath(root)], None).find_all("sources[0].csv.uri", f"{root.as_uri()}/{below}")
    return [file.relative for file in files]


@pytest.fixture
def tree(root: Path) -> Path:
    names = ["b.csv", "a.csv", "Z.csv", "é.csv", "x/c.csv", "x/y/d.csv", "x/y/z/e.txt", ".h.csv", "_h.csv", "_h/a.csv"]
    for name in [*names, "a*.csv", "x.y/c.csv"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"1")
    return root


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.csv", ["Z.csv", "a*.csv", "a.csv", "b.csv", "é.csv"]),
        ("?.csv", ["Z.csv", "a.csv", "b.csv", "é.csv"]),
        ("a%2A.csv", [""]),
        ("a%2A*.csv", ["a*.csv"]),
        ("x/", ["c.csv", "y/d.csv", "y/z/e.txt"]),
        ("x/**", ["c.csv", "y/d.csv", "y/z/e.txt"]),
        ("**/*.txt", ["x/y/z/e.txt"]),
        ("x/**/d.csv", ["y/d.csv"]),
        ("x/**/c.csv", ["c.csv"]),
        ("x/*/*.csv", ["y/d.csv"]),
        ("x?y/*", ["x.y/c.csv"]),
    ],
)
def test_patterns_name_files_in_the_order_of_their_bytes(tree: Path, pattern: str, names: list[str]) -> None:
    assert found(tree, pattern) == names


def test_hidden_names_are_left_out_at_any_depth(tree: Path) -> None:
    assert not [name for name in found(tree, "") if "h" in name]


@pytest.mark.parametrize("pattern", ["*.parquet", "absent/", "x/*.txt", "_h/../*"])
def test_a_uri_that_names_no_file_is_refused_by_its_field(tree: Path, pattern: str) -> None:
    with pytest.raises((NotFound, InvalidArgument), match=r"sources\[0\].csv.uri"):
        found(tree, pattern)


def test_cycles_are_not_looked_for_while_files_are_found(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector looks at all files again as they become more, which takes longer than finding them."""
    states: list[bool] = []

    def noted(*arguments: Any, **fields: Any) -> SourceFile:
        states.append(gc.isenabled())
        return SourceFile(*arguments, **fields)

    monkeypatch.setattr(source_files, "SourceFile", noted)
    assert len(found(tree, "")) == len(states)
    assert not any(states)
    assert gc.isenabled()
    with pytest.raises((NotFound, InvalidArgument)):
        found(tree, "*.parquet")
    assert gc.isenabled()


def test_too_many_files_are_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "MAX_FOLDERS", 2)
    with pytest.raises(InvalidArgument, match="more than 2 folders"):
        found(tree, "")
    with pytest.raises(InvalidArgument, match="more than 3 files"):
        SourceFiles([PurePosixPath(tree)], None).find_all("f", f"{tree.as_uri()}/", most=3)


def test_a_pattern_does_not_lead_out_of_the_root_through_a_link(tmp_path: Path, tree: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.csv").write_bytes(b"secret")
    (tree / "way").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidArgument, match="a link leads out"):
        found(tree, "**/*.csv")


def test_links_to_folders_within_the_root_are_followed(tree: Path) -> None:
    (tree / "link").symlink_to(tree / "x")
    assert found(tree, "link/*.csv") == ["c.csv"]
    assert found(tree, "*/c.csv") == ["link/c.csv", "x.y/c.csv", "x/c.csv"]


def test_folders_that_run_in_a_circle_are_refused(tree: Path) -> None:
    (tree / "x" / "again").symlink_to(tree / "x")
    with pytest.raises(InvalidArgument, match=r"folders deep|cannot open it"):
        found(tree, "x/")


def test_names_that_are_no_utf_8_are_found_and_opened(tree: Path) -> None:
    Path(os.fsdecode(os.fsencode(tree) + b"/\xff.bin")).write_bytes(b"odd")
    (file,) = SourceFiles([PurePosixPath(tree)], None).find_all("f", f"{tree.as_uri()}/*.bin")
    assert file.uri.endswith("/%FF.bin")
    with file.open() as opened:
        assert opened.read() == b"odd"
    assert find(tree, file.uri).size_bytes == 3


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_only_a_regular_file_is_read(root: Path, kind: str) -> None:
    if kind == "folder":
        (root / "odd").mkdir()
    else:
        os.mkfifo(root / "odd")
    with pytest.raises(InvalidArgument, match="regular file"):
        find(root, (root / "odd").as_uri())


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "fstat", "scandir", "stat"])
def test_an_error_of_the_disk_that_may_pass_does_not_refuse_the_file(
    tree: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    (one,) = SourceFiles([PurePosixPath(tree)], None).find_all("sources[0].csv.uri", f"{tree.as_uri()}/b.*")
    real = getattr(os, call)

    def fail(what: Any, *arguments: Any, **options: Any) -> Any:
        if call in ("fstat", "scandir") or os.fspath(what).endswith("b.csv"):
            raise OSError(number, os.strerror(number))
        return real(what, *arguments, **options)

    def read() -> None:
        if call in ("open", "fstat"):
            one.open()
        else:
            SourceFiles([PurePosixPath(tree)], None).find_all("sources[0].csv.uri", f"{tree.as_uri()}/b.*")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(Unavailable, match=r"sources\[0\].csv.uri.*at present") as met:
            read()
    assert os.strerror(number) in met.value.message
    assert one.open().read() == b"1"


def test_a_file_that_may_not_be_read_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a").write_bytes(b"x")
    source = find(root, (root / "a").as_uri())

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InvalidArgument, match="the server cannot open it: Permission denied"):
        source.open()


def test_the_collector_of_cycles_runs_again_after_the_last_of_several_searches() -> None:
    pause = source_files._collector_paused
    gc.enable()
    try:
        pause.__enter__()
        pause.__enter__()
        pause.__exit__()
        assert not gc.isenabled()
        pause.__exit__()
        assert gc.isenabled()
    finally:
        gc.enable()
