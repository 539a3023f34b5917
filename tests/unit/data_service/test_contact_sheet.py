from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest
from PIL import EpsImagePlugin, Image

from data_service import reading as contact_sheet_module
from data_service.reading import CELL_PX, COLUMNS, GAP_PX, Tile, contact_sheet, draw, is_drawable
from shared.dataset_version.manifest import tensor_array
from tests.support.broken_images import tiff_with_a_text_for_its_offsets


def opened(png: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    return image


def test_small_images_are_enlarged_by_whole_pixels() -> None:
    tile = np.zeros((28, 28), np.uint8)
    tile[0, 0] = 255
    sheet = np.asarray(opened(draw([("train", [Tile(tile, "7")])])).convert("L"))
    corner = np.argwhere(sheet == 0).min(axis=0)
    bright = sheet[corner[0] : corner[0] + CELL_PX, GAP_PX : GAP_PX + CELL_PX]
    assert (sheet == 255).any()
    assert bright.shape == (CELL_PX, CELL_PX)


def test_a_narrow_or_low_image_stands_in_the_middle_of_its_cell() -> None:
    for shape in ((40, 10), (10, 40)):
        sheet = np.asarray(opened(draw([("", [Tile(np.zeros(shape, np.uint8), "")])])).convert("L"))
        dark = np.argwhere(sheet == 0)
        (top, left), (bottom, right) = dark.min(axis=0), dark.max(axis=0)
        assert abs((left - GAP_PX) - (GAP_PX + CELL_PX - 1 - right)) <= 1
        assert (bottom - top > right - left) == (shape[0] > shape[1])


def test_rows_wrap_after_ten() -> None:
    tile = Tile(np.zeros((8, 8), np.uint8), "")
    one, two = (opened(draw([("a", [tile] * count)])).height for count in (COLUMNS, COLUMNS + 1))
    assert two > one


def test_large_and_coloured_images_are_shrunk() -> None:
    tiles = [Tile(np.zeros((300, 500, 3), np.uint8), "a"), Tile(np.zeros((2000, 3, 1), np.uint8), "b")]
    assert opened(draw([("train", tiles)])).width == GAP_PX + COLUMNS * (CELL_PX + GAP_PX)


@pytest.mark.parametrize(
    ("value_type", "shape", "drawable"),
    [
        ("uint8", [28, 28], True),
        ("uint8", [28, 28, 1], True),
        ("uint8", [28, 28, 3], True),
        ("uint8", [3, 28, 28], False),
        ("uint8", [784], False),
        ("float", [28, 28], False),
    ],
)
def test_only_grey_and_colour_bytes_are_images(value_type: str, shape: list[int], drawable: bool) -> None:
    assert is_drawable(value_type, shape) is drawable


def encoded(size: tuple[int, int], form: str, colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, form)
    return buffer.getvalue()


def test_encoded_images_of_unequal_sizes_become_equal_tiles() -> None:
    files = [encoded((400, 300), "JPEG"), encoded((20, 90), "PNG", "blue"), b"no image", None]
    tables, names = {"train": pa.table({"image": files, "label": [0, 1, 1, 7]})}, {"label": ["ants", "bees"]}
    sheet = contact_sheet(tables, names)
    pixels = np.asarray(opened(sheet).convert("RGB")).astype(int)
    first, second = (pixels[:, GAP_PX + at * (CELL_PX + GAP_PX) :][:, :CELL_PX] for at in (0, 1))
    assert (first[..., 0] - first[..., 2] > 200).sum() == CELL_PX * 63
    assert (second[..., 2] - second[..., 0] > 200).sum() > 0
    assert sheet == contact_sheet(
        {"train": pa.table({"image": files, "label": [0, 1, 1, 7]})}, {"label": ["ants", "bees"]}
    )


def test_each_image_column_has_a_block_of_its_own() -> None:
    one = pa.table({"left": [encoded((8, 8), "PNG")]})
    both = one.append_column("right", pa.array([encoded((8, 8), "PNG", "blue")]))
    pixels = np.asarray(opened(contact_sheet({"train": both})).convert("RGB")).astype(int)
    assert (pixels[..., 0] - pixels[..., 2] > 200).sum() == (pixels[..., 2] - pixels[..., 0] > 200).sum() > 0
    assert opened(contact_sheet({"train": both})).height > opened(contact_sheet({"train": one})).height
    many = pa.table({str(number): [encoded((8, 8), "PNG")] for number in range(100)})
    assert opened(contact_sheet({"train": many})).height < 10 * opened(contact_sheet({"train": one})).height


def test_a_label_beyond_what_python_can_say_is_shown_all_the_same() -> None:
    labels = pa.array([2**62], pa.timestamp("us"))
    assert opened(contact_sheet({"train": pa.table({"image": [encoded((8, 8), "PNG")], "label": labels})}))


def test_an_image_whose_decoder_fails_in_its_own_way_is_left_out() -> None:
    files = [tiff_with_a_text_for_its_offsets(), encoded((8, 8), "PNG")]
    assert opened(contact_sheet({"train": pa.table({"image": files})}))


def test_bytes_that_are_no_images_make_no_sheet() -> None:
    assert contact_sheet({"train": pa.table({"x": [b"abc", None], "y": [1, 2]})}) == b""


@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8, 3), (1, 8, 8)])
def test_float_tensors_are_drawn_as_they_are_or_rescaled(shape: tuple[int, ...]) -> None:
    plain = np.linspace(0, 1, 192, dtype=np.float32)[: np.prod(shape)].reshape(shape)
    for image in (plain, plain * 6 - 3, np.full(shape, np.nan, np.float32)):
        assert opened(contact_sheet({"train": pa.table({"x": tensor_array(image[None])})})).width > CELL_PX


def test_a_constant_float_image_outside_0_to_1_is_drawn() -> None:
    assert contact_sheet({"t": pa.table({"x": tensor_array(np.full((1, 1, 4, 4), -2.0, np.float32))})})


def test_a_format_that_no_import_takes_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would run Ghostscript on it."""
    run: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **_: run.append(given))
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\n{} loop\n%%EOF\n"
    assert contact_sheet({"train": pa.table({"blob": [eps]})}) == b""
    beside = pa.table({"blob": [encoded((8, 8), "PNG"), eps]})
    assert opened(contact_sheet({"train": beside}))
    assert run == []


def reds(sheet: bytes) -> int:
    """How many tiles of red images are drawn."""
    pixels = np.asarray(opened(sheet).convert("RGB")).astype(int)
    return int((pixels[..., 0] - pixels[..., 2] > 200).sum()) // (80 * 80)


def test_images_beyond_the_pixels_that_a_sheet_may_decode_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact_sheet_module, "MAX_SHEET_PX", 250)
    files = [encoded((10, 10), "PNG")] * 3
    assert reds(contact_sheet({"t": pa.table({"x": files})})) == 2
    photos = [encoded((10, 10), "JPEG")] * 3
    assert reds(contact_sheet({"t": pa.table({"x": photos})})) == 3, "of which an eighth counts"


def test_values_beyond_those_that_a_sheet_may_open_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact_sheet_module, "MAX_HEADERS", 5)
    no_images = {f"bytes{number}": [b"abc", b"def"] for number in range(3)}
    assert contact_sheet({"t": pa.table({**no_images, "x": [encoded((10, 10), "PNG")] * 2})}) == b""
    assert reds(contact_sheet({"t": pa.table({"x": [encoded((10, 10), "PNG")] * 9})})) == 4


def test_a_file_that_claims_too_many_pixels_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact_sheet_module, "MAX_DECODED_PX", 100)
    files = [encoded((10, 10), "PNG"), encoded((11, 10), "PNG")]
    pixels = np.asarray(opened(contact_sheet({"t": pa.table({"x": files})})).convert("RGB")).astype(int)
    assert (pixels[..., 0] - pixels[..., 2] > 200).sum() == 80 * 80
