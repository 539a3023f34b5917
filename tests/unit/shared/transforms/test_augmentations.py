"""Augmentations: drawn from (seed, epoch, row id, place) and nothing else, evenly, and left out of evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from shared.transforms import RowKeys
from tests.unit.shared.transforms.samples import pipeline, pixels

IMAGES = pixels(500, (6, 5))
IDS = np.arange(500, dtype=np.int64)
FLIP: dict[str, Any] = {"column": "x", "randomFlip": {"horizontalProbability": 0.5}}


def augmented(images: Any, *steps: dict[str, Any], seed: int = 1, epoch: int = 0, ids: Any = None) -> Any:
    built = pipeline(*({"column": "x", **step} for step in steps))
    return built({"x": images}, RowKeys(seed, epoch, IDS[: len(images)] if ids is None else ids))["x"]


@pytest.mark.parametrize("other", [{"seed": 2}, {"epoch": 1}, {"ids": IDS + 500}, {"seed": 2**64 - 1}])
def test_another_seed_epoch_or_row_draws_anew(other: dict[str, Any]) -> None:
    first, second = augmented(IMAGES, FLIP), augmented(IMAGES, FLIP, **other)

    same = (first == second).all(axis=(1, 2)).mean()
    assert 0.35 < same < 0.65


def test_two_steps_of_one_kind_draw_apart() -> None:
    twice = augmented(IMAGES, FLIP, FLIP)

    back = (twice == IMAGES).all(axis=(1, 2)).mean()
    assert 0.35 < back < 0.65


FROZEN_DRAWS = [
    [0.5847078392558036, 0.4695593771637885],
    [0.6777636649803664, 0.22084245891605092],
    [0.26092825322636326, 0.7313736493701295],
]


def test_draws_do_not_change_between_releases() -> None:
    draws = RowKeys(7, 3, np.array([0, 1, 2**40], np.int64)).at(5).uniform(2)

    assert draws.tolist() == FROZEN_DRAWS


def test_draws_are_even_and_independent() -> None:
    draws = RowKeys(0, 0, np.arange(100_000, dtype=np.int64)).at(0).uniform(3)

    assert (draws >= 0).all()
    assert (draws < 1).all()
    counts = np.stack([np.bincount((column * 20).astype(int), minlength=20) for column in draws.T])
    assert (np.abs(counts - 5000) < 350).all()  # five deviations
    together = np.corrcoef(np.column_stack([draws, np.roll(draws, 1, axis=0)]).T)
    assert (np.abs(together - np.eye(6)) < 0.02).all()


def test_evaluation_leaves_images_alone_and_crops_the_centre() -> None:
    steps = [
        {"column": "x", "randomFlip": {"verticalProbability": 1}},
        {"column": "x", "randomRotation": {"degrees": 90}},
        {"column": "x", "colorJitter": {"brightness": 1}},
        {"column": "x", "randomCrop": {"height": 4, "width": 3, "padding": 2}},
    ]

    made = pipeline(*steps)({"x": IMAGES})["x"]

    assert made.tobytes() == np.ascontiguousarray(IMAGES[:, 1:5, 1:4]).tobytes()


def test_random_crops_take_every_place_and_nothing_but_the_padded_image() -> None:
    image = np.arange(1, 13, dtype=np.uint8).reshape(3, 4)
    padded = np.pad(image, 1)
    wanted = {padded[top : top + 2, left : left + 3].tobytes() for top in range(4) for left in range(4)}

    made = augmented(np.repeat(image[None], 500, 0), {"randomCrop": {"height": 2, "width": 3, "padding": 1}})

    assert {crop.tobytes() for crop in made} == wanted


def test_a_crop_larger_than_the_image_is_padded_with_zeros() -> None:
    made = augmented(IMAGES[:1] | 1, {"randomCrop": {"height": 9, "width": 5}})

    assert made.shape == (1, 9, 5)
    assert made[0, 1:7].tobytes() == (IMAGES[0] | 1).tobytes()
    assert not made[0, [0, 7, 8]].any()


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3), (6, 5, 2)])
def test_certain_flips_mirror_every_image(shape: tuple[int, ...]) -> None:
    images = pixels(4, shape)

    assert (augmented(images, {"randomFlip": {"horizontalProbability": 1}}) == images[:, :, ::-1]).all()
    assert (augmented(images, {"randomFlip": {"verticalProbability": 1}}) == images[:, ::-1]).all()


def test_flips_happen_as_often_as_asked() -> None:
    made = augmented(IMAGES, {"randomFlip": {"horizontalProbability": 0.2}})

    assert 0.13 < (made != IMAGES).any(axis=(1, 2)).mean() < 0.27


def test_rotations_stay_within_the_angle_and_turn_both_ways() -> None:
    image = np.zeros((41, 41), np.uint8)
    image[20, 21:] = 255  # a ray to the right

    made = augmented(np.repeat(image[None], 200, 0), {"randomRotation": {"degrees": 60}})

    ends = made[:, :, 35].argmax(axis=1).astype(int) - 20  # where it passes, 15 to the right of the middle
    seen = made[:, :, 35].any(axis=1)
    assert np.abs(ends[seen]).max() <= np.ceil(15 * np.tan(np.radians(60)))
    assert (ends[seen] > 2).any()
    assert (ends[seen] < -2).any()


@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["brightness", "contrast", "saturation"]))
def test_color_jitter_is_pillows_enhancement_within_two_levels(seed: int, kind: str) -> None:
    image = pixels(1, (7, 6, 3), seed)

    made = augmented(image, {"colorJitter": {kind: 0.8}}, seed=seed)[0]

    draw = RowKeys(seed, 0, IDS[:1]).at(0).uniform(3)[0, ["brightness", "contrast", "saturation"].index(kind)]
    enhance = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "saturation": ImageEnhance.Color,
    }
    theirs = np.asarray(enhance[kind](Image.fromarray(image[0])).enhance(1 + (2 * draw - 1) * 0.8))
    assert np.abs(made.astype(int) - theirs.astype(int)).max() <= 2


def test_color_jitter_of_one_channel_is_that_of_a_plane() -> None:
    step = {"colorJitter": {"brightness": 0.5, "contrast": 0.5}}

    assert (augmented(IMAGES[..., None], step)[..., 0] == augmented(IMAGES, step)).all()
