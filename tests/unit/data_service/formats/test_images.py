from __future__ import annotations

import gzip
import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from PIL import Image

from data_service.formats import images as image_rules
from data_service.formats import interface
from data_service.formats.images import ClassNames, ImageTar
from shared.errors import InvalidArgument, NotFound
from shared.transforms.steps.images import ImageRefused, decoded
from tests.support.damage import truncations
from tests.support.images import encoded, tar_of
from tests.support.import_sources import found_file, opened, source_of, table_of, whole
from tests.support.real_data import real_data


def write(folder: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return f"{folder.as_uri()}/"


FILES = {f"{name}/{i}.png": encoded(colour=i) for name in ("bees", "ants") for i in range(3)}


@pytest.mark.parametrize("kind", ["image_folder", "image_tar", "gzipped tar"])
def test_classes_are_numbered_in_the_order_of_their_names(tmp_path: Path, kind: str) -> None:
    if kind == "image_folder":
        uri = write(tmp_path / "in", FILES)
    else:
        data = tar_of({f"./train/{name}": data for name, data in FILES.items()})
        (tmp_path / "a.tar").write_bytes(gzip.compress(data) if kind == "gzipped tar" else data)
        uri = (tmp_path / "a.tar").as_uri()
    source = source_of(uri, "image_folder" if kind == "image_folder" else "image_tar")
    (one,) = opened(tmp_path, source)
    table = table_of(one.rows)
    assert one.rows.class_names == ["ants", "bees"]
    rows = {row["path"]: (row["image"], row["label"]) for row in table.to_pylist()}
    assert rows == {name: (data, int(name.startswith("bees"))) for name, data in FILES.items()}


def test_labels_use_the_classes_of_all_sources(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"b/x.png": encoded()})
    (tmp_path / "second.tar").write_bytes(tar_of({"c/x.png": encoded(), "a/y.png": encoded()}))
    sources = [source_of(first, "image_folder"), source_of((tmp_path / "second.tar").as_uri(), "image_tar")]
    table, _ = whole(tmp_path, *sources)
    assert dict(zip(table["path"].to_pylist(), table["label"].to_pylist(), strict=True)) == {
        "b/x.png": 1,
        "c/x.png": 2,
        "a/y.png": 0,
    }


def test_names_are_distinguished_by_their_bytes(tmp_path: Path) -> None:
    uri = write(tmp_path, {"e\u0301/x.png": encoded(), "\u00e9/x.png": encoded(), "Z/x.png": encoded()})
    (one,) = opened(tmp_path, source_of(uri, "image_folder"))
    assert one.rows.class_names == ["Z", "e\u0301", "\u00e9"]


def test_hidden_files_and_other_suffixes_are_left_alone(tmp_path: Path) -> None:
    files = {"a/x.png": encoded(), "a/Thumbs.db": b"x", "a/._x.png": b"x", "_b/x.png": b"x", ".c/x.png": b"x"}
    uri = write(tmp_path / "in", files)
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    for source in (source_of(uri, "image_folder"), source_of((tmp_path / "a.tar").as_uri(), "image_tar")):
        (one,) = opened(tmp_path, source)
        assert table_of(one.rows)["path"].to_pylist() == ["a/x.png"]
        assert one.rows.class_names == ["a"]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP"])
def test_each_format_is_an_image_and_half_of_it_is_none(kind: str) -> None:
    data = encoded(kind, (64, 64))
    assert image_rules.problem_of(data) is None
    assert image_rules.problem_of(data[: len(data) // 2]) is not None


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_file_that_is_no_image_is_a_bad_row_with_its_reason(tmp_path: Path) -> None:
    files = {
        "a/bomb.png": png_header(20_000, 5_001),
        "a/enormous.png": png_header(200_000, 200_000),
        "a/good.png": encoded(),
        "a/text.jpg": b"not an image",
        "a/empty.gif": b"",
        "a/half.jpg": encoded("JPEG", (64, 64))[:-200],
        "top.png": encoded(),
    }
    uri = write(tmp_path / "in", files)
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    for source, place in (
        (source_of(uri, "image_folder"), "file"),
        (source_of((tmp_path / "a.tar").as_uri(), "image_tar"), "member"),
    ):
        table, bad = whole(tmp_path, source)
        assert table["path"].to_pylist() == ["a/good.png"]
        assert {row.place for row in bad.rows} == {f"{place} {name}" for name in files} - {f"{place} a/good.png"}
        reasons = {row.place.split(" ")[1]: row.reason for row in bad.rows}
        assert "20000×5001 pixels" in reasons["a/bomb.png"]
        assert "pixels" in reasons["a/enormous.png"]
        assert "no image of the formats JPEG" in reasons["a/text.jpg"]
        assert "truncated" in reasons["a/half.jpg"].lower()
        assert "no folder of a class" in reasons["top.png"]


def stored(mode: str, kind: str = "TIFF") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (4, 3)).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I", "F"])
def test_images_that_an_import_keeps_can_be_decoded_in_colour_and_in_grey(mode: str) -> None:
    data = stored(mode)
    refusals = set()
    for gray in (False, True):
        try:
            decoded(data, gray)
        except ImageRefused as refused:
            refusals.add(f"it {refused}")
    problem = image_rules.problem_of(data)
    assert (problem in refusals) if refusals else (problem is None)
    assert (mode in ("LAB", "I", "F")) == bool(refusals)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_as_many_pixels_as_decoding_refuses_are_refused() -> None:
    assert "fewer than 100,000,000" in str(image_rules.problem_of(png_header(10_000, 10_000)))


def test_an_image_larger_than_a_member_may_be_is_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_rules, "MAX_IMAGE_BYTES", 50)
    assert "at most 50 are read" in str(image_rules.problem_of(bytes(51)))


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no image in a folder of a class"):
        opened(tmp_path, source_of(write(tmp_path, {"a/x.txt": b""}), "image_folder"))
    with pytest.raises(NotFound):
        opened(tmp_path, source_of(f"{tmp_path.as_uri()}/absent/", "image_folder"))


@pytest.mark.parametrize("name", ["a/../../x.png", "/a/x.png"])
def test_a_hostile_member_ends_the_import_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of({"a/x.png": encoded(), name: encoded()}))
    with pytest.raises(InvalidArgument, match=f"member '{name}'") as refused:
        opened(tmp_path, source_of((tmp_path / "a.tar").as_uri(), "image_tar"))
    assert refused.value.specific_reason == "CORRUPT_SOURCE"


class CountedReads(io.FileIO):
    """A file without a buffer, as objects are, that counts its reads: of an object each is a request."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        CountedReads.reads += 1
        return super().read(-1 if size is None else size)


def test_a_part_of_a_tar_is_read_in_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_rules, "PART_IMAGES", 100)
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of({f"a/{number}.png": encoded(colour=number % 9) for number in range(200)}))
    file = replace(found_file(path), open=lambda: cast(BinaryIO, CountedReads(path)))
    second = ImageTar(file, ClassNames()).parts()[1]
    CountedReads.reads = 0
    assert table_of(second).num_rows == 100
    assert CountedReads.reads < 5


def test_every_truncated_tar_is_refused(tmp_path: Path) -> None:
    data = tar_of(FILES).rstrip(b"\0")
    for _, part in truncations(data):
        (tmp_path / "a.tar").write_bytes(part)
        with pytest.raises(InvalidArgument):
            whole(tmp_path, source_of((tmp_path / "a.tar").as_uri(), "image_tar"))


def test_a_gzip_bomb_is_refused_before_it_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "FREE_BYTES", 100_000)
    (tmp_path / "a.tar").write_bytes(gzip.compress(tar_of({"a/x.png": bytes(20_000_000)})))
    with pytest.raises(InvalidArgument, match="200 times its size"):
        opened(tmp_path, source_of((tmp_path / "a.tar").as_uri(), "image_tar"))


def test_the_example_images_are_read_exactly() -> None:
    folder = real_data() / "ants_bees"
    table, bad = whole(folder, source_of(f"{(folder / 'train').as_uri()}/", "image_folder"))
    assert not bad.rows
    assert table.num_rows == 60
    for row in table.to_pylist():
        assert row["image"] == (folder / "train" / row["path"]).read_bytes()
        assert row["label"] == ["ants", "bees"].index(row["path"].split("/")[0])
