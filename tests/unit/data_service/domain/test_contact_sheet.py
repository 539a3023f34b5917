from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from data_service.domain.contact_sheet import CELL_PX, COLUMNS, GAP_PX, Tile, draw, is_drawable


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
