from __future__ import annotations

import numpy as np

from inference_service.serve.preprocessing import BATCH_PIXELS, REQUEST_PIXELS, beyond_limits
from shared.errors import ResourceExhausted


def test_images_within_the_limits_are_not_refused() -> None:
    beyond = beyond_limits(np.full(4, REQUEST_PIXELS), [1, 1, 1, 1], "tensor 'photo'")
    assert (beyond.refused, beyond.crowded, beyond.skipped) == ({}, {}, frozenset())


def test_a_request_is_refused_for_the_pixels_of_all_its_rows() -> None:
    beyond = beyond_limits(np.array([5, REQUEST_PIXELS // 2, REQUEST_PIXELS // 2, 1]), [1, 3], "tensor 'photo'")
    assert [*beyond.refused] == [3]
    assert beyond.skipped == {1, 2, 3}
    assert not beyond.crowded


def test_of_a_batch_with_too_many_pixels_the_greatest_requests_are_to_try_again() -> None:
    pixels = np.array([7, REQUEST_PIXELS, REQUEST_PIXELS - 1, *[BATCH_PIXELS // 4 - 100] * 3])
    beyond = beyond_limits(pixels, [1, 1, 1, 1, 1, 1], "tensor 'photo'")
    assert not beyond.refused
    assert [*beyond.crowded] == [1]
    assert isinstance(beyond.crowded[1], ResourceExhausted)
    assert beyond.crowded[1].retry_after_s
    assert beyond.skipped == {1}
