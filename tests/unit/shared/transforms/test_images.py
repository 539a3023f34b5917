"""Images: decoded from bytes that may be anything, resized, cropped, made grey."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shared.errors import InvalidArgument
from shared.transforms import RaggedImages, RowError, ScalarType, TensorType
from shared.transforms.steps import images as decoding
from shared.transforms.steps.images import ImageRefused, decoded, side_by_side, why_refused
from tests.unit.shared.transforms.samples import encoded, pipeline, pixels

COLOUR = pixels(1, (13, 17, 3))[0]


def decode(*images: bytes | None, mode: str = "MODE_RGB") -> RaggedImages:
    made = pipeline({"column": "x", "decodeImage": {"mode": mode}})({"x": pa.array(images, pa.binary())})["x"]
    assert isinstance(made, RaggedImages)
    return made


@pytest.mark.parametrize(
    ("file_format", "options"), [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True})]
)
def test_lossless_formats_give_back_their_pixels(file_format: str, options: dict[str, Any]) -> None:
    (image,) = decode(encoded(COLOUR, file_format, **options)).images

    assert image.tobytes() == COLOUR.tobytes()
    assert image.shape == (13, 17, 3)


@pytest.mark.parametrize("file_format", ["JPEG", "GIF"])
def test_lossy_formats_are_what_pillow_makes_of_them(file_format: str) -> None:
    data = encoded(COLOUR, file_format)

    (image,) = decode(data).images

    assert image.tobytes() == np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).tobytes()


def test_sizes_come_as_they_are_and_gray_has_one_channel() -> None:
    made = decode(encoded(COLOUR), encoded(COLOUR[:5, :2]), mode="MODE_GRAY")

    assert [image.shape for image in made.images] == [(13, 17, 1), (5, 2, 1)]
    assert made.shape == (None, None, 1)
    assert made.images[0][..., 0].tobytes() == np.asarray(Image.fromarray(COLOUR).convert("L")).tobytes()


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, with the clock
    data = encoded(COLOUR, "PNG", exif=exif.tobytes())

    (image,) = decode(data).images

    assert image.tobytes() == np.ascontiguousarray(np.rot90(COLOUR, -1)).tobytes()


def test_sixteen_bits_of_grey_keep_their_upper_eight() -> None:
    deep = np.array([[0, 255, 256, 65535]], np.uint16)

    (image,) = decode(encoded(deep, "PNG")).images

    assert image[0, :, 0].tolist() == [0, 0, 1, 255]


def test_palettes_and_transparency_become_rgb() -> None:
    colours = np.zeros((2, 2, 4), np.uint8)
    colours[..., 0], colours[..., 3] = 200, 7

    assert decode(encoded(colours)).images[0].tolist() == [[[200, 0, 0]] * 2] * 2


def huge_png(width: int, height: int) -> bytes:
    """A few bytes that claim that many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (None, "null"),
        (b"", "no image of the formats"),
        (b"hello", "no image of the formats"),
        (encoded(COLOUR, "PNG")[:-40], "broken image"),
        (encoded(COLOUR, "JPEG")[:-60], "broken image: .*truncated"),
        (encoded(COLOUR, "BMP")[:-9], "broken image"),
        (encoded(COLOUR, "TIFF")[:-500], "broken image|no image"),
        (encoded(COLOUR, "GIF")[:-30], "broken image"),
        (encoded(COLOUR, "WEBP")[:-20], "broken image|no image"),
        (encoded(COLOUR, "PPM"), "no image of the formats"),
        (encoded(COLOUR, "ICO"), "no image of the formats"),
        (huge_png(10_000, 10_000), "10000×10000 pixels; use fewer than 100,000,000"),
        (huge_png(60_000, 60_000), "too many pixels"),
        (encoded(np.zeros((2, 2), np.float32), "TIFF"), "32 bits"),
    ],
)
def test_a_row_that_is_no_good_image_is_named(broken: bytes | None, why: str) -> None:
    with pytest.raises(RowError, match=why) as refused:
        decode(encoded(COLOUR), broken)

    assert (refused.value.row, refused.value.path) == (1, "transform.steps[0]")


def test_rows_are_cut_by_the_pixels_that_their_images_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PIXELS_AT_ONCE", 2 * 13 * 17)
    one, large = encoded(COLOUR), huge_png(300, 300)
    photos = pa.array([one, one, one, large, None, one, b"hello", one, one])
    more = pa.array([*[None] * 6, one, None, None])

    assert side_by_side([photos], 9) == [(0, 2), (2, 3), (3, 4), (4, 8), (8, 9)]
    assert side_by_side([photos, more], 9) == [(0, 2), (2, 3), (3, 4), (4, 7), (7, 9)]
    assert side_by_side([pa.chunked_array([photos[:4], photos[4:]])], 9) == side_by_side([photos], 9)
    assert side_by_side([photos[:0]], 0) == [(0, 0)]
    assert side_by_side([], 9) == [(0, 9)]


def test_an_image_is_looked_at_in_one_mode_at_a_time_without_a_copy() -> None:
    data = encoded(np.zeros((1000, 1000), np.uint8))
    tracemalloc.start()  # which sees numpy's memory
    assert why_refused(data) is None
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1e6


@given(data=st.data(), file_format=st.sampled_from(["JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP"]))
def test_any_bytes_are_an_image_or_refused(data: st.DataObject, file_format: str) -> None:
    whole = bytearray(encoded(COLOUR, file_format))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])

    try:
        image = decoded(cut, gray=False)
    except ImageRefused:
        return
    assert image.dtype == np.uint8
    assert image.shape[2] == 3


def resize(images: Any, **message: Any) -> Any:
    return pipeline({"column": "x", "resize": message})({"x": images})["x"]


@pytest.mark.parametrize("shape", [(40, 30), (40, 30, 1), (40, 30, 3), (40, 30, 2), (40, 30, 4)])
@pytest.mark.parametrize("size", [(7, 11), (64, 48), (40, 30)])
def test_resizing_is_pillows_antialiased_bilinear_for_any_channels(
    shape: tuple[int, ...], size: tuple[int, int]
) -> None:
    images = pixels(3, shape)

    made = resize(images, height=size[0], width=size[1])

    assert made.shape == (3, *size, *shape[2:])
    for image, out in zip(images.reshape(3, 40, 30, -1), made.reshape(3, *size, -1), strict=True):
        for channel in range(image.shape[2]):
            plane = Image.fromarray(image[..., channel]).resize(size[::-1], Image.Resampling.BILINEAR)
            assert out[..., channel].tobytes() == np.asarray(plane).tobytes()


def test_resizing_is_within_a_level_of_torchvisions_antialiasing() -> None:
    import torch
    from torchvision.transforms.v2 import functional

    image = pixels(1, (50, 41, 3))[0]

    theirs = functional.resize(torch.from_numpy(image).permute(2, 0, 1), [13, 29], antialias=True)

    ours = resize(image[None], height=13, width=29)[0]
    difference = np.abs(ours.astype(int) - theirs.permute(1, 2, 0).numpy().astype(int))
    assert difference.max() <= 1


@pytest.mark.parametrize(("shape", "made"), [((40, 30), (26, 20)), ((30, 41), (20, 27)), ((9, 9), (20, 20))])
def test_the_shorter_side_is_set_and_the_other_keeps_the_aspect_ratio(
    shape: tuple[int, int], made: tuple[int, int]
) -> None:
    assert resize(pixels(2, shape), height=20, shorterSideOnly=True).shape == (2, *made)
    ragged = resize(RaggedImages((pixels(1, (*shape, 3))[0],), (None, None, 3)), height=20, shorterSideOnly=True)
    assert [image.shape for image in ragged.images] == [(*made, 3)]


def test_an_image_that_resizing_would_blow_up_is_refused_by_its_row() -> None:
    images = RaggedImages((pixels(1, (4, 4, 3))[0], pixels(1, (1, 4000, 3))[0]), (None, None, 3))

    with pytest.raises(RowError, match="would become 800000×200 pixels") as refused:
        resize(images, height=200, shorterSideOnly=True)

    assert refused.value.row == 1


def test_the_middle_is_cropped_and_smaller_images_get_zeros() -> None:
    image = np.arange(1, 21, dtype=np.uint8).reshape(1, 4, 5)

    def crop(height: int, width: int) -> Any:
        return pipeline({"column": "x", "centerCrop": {"height": height, "width": width}})({"x": image})["x"].tolist()

    assert crop(2, 3) == [[[7, 8, 9], [12, 13, 14]]]
    assert crop(3, 2) == [[[2, 3], [7, 8], [12, 13]]]
    assert crop(1, 7) == [[[0, 6, 7, 8, 9, 10, 0]]]
    assert crop(6, 1) == [[[0], [3], [8], [13], [18], [0]]]


def test_grayscale_is_pillows_luma() -> None:
    images = pixels(2, (16, 16, 3))

    made = pipeline({"column": "x", "grayscale": {}})({"x": images})["x"]

    for image, out in zip(images, made, strict=True):
        assert out[..., 0].tobytes() == np.asarray(Image.fromarray(image).convert("L")).tobytes()


def test_images_of_unequal_sizes_have_one_shape_after_a_resize_or_a_crop() -> None:
    data = pa.array([encoded(COLOUR), encoded(COLOUR[:4])])
    for step in ({"resize": {"height": 6, "width": 5}}, {"centerCrop": {"height": 6, "width": 5}}):
        built = pipeline({"column": "x", "decodeImage": {}}, {"column": "x", **step}, {"column": "x", "toFloat": {}})

        assert built.output({"x": ScalarType(pa.binary())})["x"] == TensorType("float32", (3, 6, 5))
        assert built({"x": data})["x"].shape == (2, 3, 6, 5)
        assert built({"x": data[:0]})["x"].shape == (0, 3, 6, 5)


GRAY_TYPE, COLOUR_TYPE = TensorType("uint8", (4, 4)), TensorType("uint8", (None, None, 3))


@pytest.mark.parametrize(
    ("step", "column"),
    [
        ({"decodeImage": {}}, GRAY_TYPE),
        ({"decodeImage": {}}, ScalarType(pa.string())),
        ({"resize": {"height": 1, "width": 1}}, ScalarType(pa.binary())),
        ({"resize": {"height": 1, "width": 1}}, TensorType("float32", (4, 4))),
        ({"centerCrop": {"height": 1, "width": 1}}, TensorType("uint8", (4,))),
        ({"grayscale": {}}, GRAY_TYPE),
        ({"grayscale": {}}, TensorType("uint8", (4, 4, 4))),
        ({"toFloat": {}}, COLOUR_TYPE),
        ({"colorJitter": {"saturation": 0.5}}, GRAY_TYPE),
        ({"randomFlip": {"horizontalProbability": 1}}, TensorType("int32", (4, 4))),
    ],
)
def test_a_column_that_is_no_image_is_refused_before_any_row(step: dict[str, Any], column: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pipeline({"column": "x", **step}).output({"x": column})

    assert refused.value.fields[0][0].startswith("transform.steps[0]")


@pytest.mark.parametrize(
    ("step", "at"),
    [
        ({"resize": {"width": 3}}, "resize.height"),
        ({"resize": {"height": 3}}, "resize.width"),
        ({"resize": {"height": 8193, "width": 1}}, "resize.height"),
        ({"resize": {"height": 1, "width": -1}}, "resize.width"),
        ({"resize": {"height": 1, "width": 1, "shorterSideOnly": True}}, "resize.width"),
        ({"centerCrop": {"height": 1}}, "center_crop.width"),
        ({"decodeImage": {"mode": 7}}, "decode_image.mode"),
        ({"randomCrop": {"height": 1, "width": 1, "padding": 513}}, "random_crop.padding"),
        ({"randomCrop": {"width": 1}}, "random_crop.height"),
        ({"randomFlip": {}}, "random_flip"),
        ({"randomFlip": {"horizontalProbability": 1.5}}, "random_flip.horizontal_probability"),
        ({"randomFlip": {"verticalProbability": "NaN"}}, "random_flip.vertical_probability"),
        ({"randomRotation": {}}, "random_rotation.degrees"),
        ({"randomRotation": {"degrees": 180.5}}, "random_rotation.degrees"),
        ({"colorJitter": {}}, "color_jitter"),
        ({"colorJitter": {"contrast": -0.1}}, "color_jitter.contrast"),
    ],
)
def test_a_step_of_images_that_makes_no_sense_is_refused_by_its_field(step: dict[str, Any], at: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pipeline({"column": "x", **step})

    assert refused.value.fields[0][0] == f"transform.steps[0].{at}"
