from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_service.formats import interface
from data_service.formats.idx import IdxPair
from shared.errors import InvalidArgument
from tests.support.damage import truncations
from tests.support.idx import digits, idx_bytes, write_idx
from tests.support.import_sources import Quarantine, found_file, source_of, table_of, whole


def pair(folder: Path) -> IdxPair:
    return IdxPair(found_file(folder / "images", "idx.images_uri"), found_file(folder / "labels", "idx.labels_uri"))


def test_an_idx_pair_gives_its_images_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "CHUNK_BYTES", 784 * 7)
    images, labels = digits(50)
    write_idx(tmp_path / "images", images)
    write_idx(tmp_path / "labels", labels)
    tables = list(pair(tmp_path).tables(Quarantine(fail=True)))
    assert {table.num_rows for table in tables} == {7, 1}
    table = pa.concat_tables(tables)
    assert table.schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), [28, 28])
    np.testing.assert_array_equal(table["image"].combine_chunks().to_numpy_ndarray(), images)
    assert table["label"].to_pylist() == labels.tolist()


def test_wide_labels_and_coloured_images_are_read(tmp_path: Path) -> None:
    write_idx(tmp_path / "images", np.zeros((3, 4, 5, 3), np.uint8))
    write_idx(tmp_path / "labels", np.array([-1, 70000, 5], np.int32))
    table = table_of(pair(tmp_path))
    assert table.schema.field("image").type.shape == [4, 5, 3]
    assert table["label"].to_pylist() == [-1, 70000, 5]


def test_columns_can_be_given_other_types(tmp_path: Path) -> None:
    write_idx(tmp_path / "images", digits(3)[0])
    write_idx(tmp_path / "labels", np.array([1, 200, 3], np.uint8))
    uris = {f"idx.{name}_uri": (tmp_path / name).as_uri() for name in ("images", "labels")}
    table, bad = whole(tmp_path, source_of(uris, "idx"), types={"label": "int8"})
    assert table["label"].to_pylist() == [1, 3]
    assert bad.places == ["row 2"]


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (np.zeros((3, 2, 2), np.uint8), np.zeros(4, np.uint8), "labels_uri: .* 4 labels for 3 images"),
        (np.zeros((3, 2, 2), np.int32), np.zeros(3, np.uint8), "images_uri: .* images are uint8"),
        (np.zeros(3, np.uint8), np.zeros(3, np.uint8), "images_uri: .* images are uint8"),
        (np.zeros((3, 2, 2), np.uint8), np.zeros((3, 2, 2), np.uint8), "labels_uri: .* labels are integers"),
        (np.zeros((3, 2, 2), np.uint8), np.zeros(3, np.float32), "labels_uri: .* labels are integers"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(tmp_path: Path, images: np.ndarray, labels: np.ndarray, said: str) -> None:
    write_idx(tmp_path / "images", images)
    write_idx(tmp_path / "labels", labels)
    with pytest.raises(InvalidArgument, match=said) as refused:
        pair(tmp_path)
    assert refused.value.specific_reason == "CORRUPT_SOURCE"


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_every_truncated_copy_is_refused(tmp_path: Path, packed: str) -> None:
    write_idx(tmp_path / f"whole{packed}", digits(20)[0])
    write_idx(tmp_path / "labels", digits(20)[1])
    for _, part in truncations((tmp_path / f"whole{packed}").read_bytes()):
        (tmp_path / "images").write_bytes(part)
        with pytest.raises(InvalidArgument, match="images_uri"):
            table_of(pair(tmp_path))


def test_truncated_labels_are_blamed_and_not_the_images(tmp_path: Path) -> None:
    write_idx(tmp_path / "images", np.zeros((3, 2, 2), np.uint8))
    (tmp_path / "labels").write_bytes(idx_bytes(np.zeros(3, np.uint8))[:-1])
    with pytest.raises(InvalidArgument, match=r"labels_uri: .* ends after 2"):
        table_of(pair(tmp_path))


def test_a_header_that_claims_four_billion_rows_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 28, 28) + b"\0" * 784)
    (tmp_path / "labels").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 2**32 - 1) + b"\0")
    with pytest.raises(InvalidArgument, match="ends after 1"):
        table_of(pair(tmp_path))
