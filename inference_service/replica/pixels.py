"""How many pixels of encoded images a replica decodes for one request and for one batch.

A few kilobytes may hold 100 megapixels, which take seconds of the model's thread and hundreds of megabytes. Headers
tell how many there are, before any is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inference_service.domain.tensors import Array
from shared.errors import MillraceError, ResourceExhausted

# Of one request's rows in one batch: some 5 s of decoding. A single image is refused from 100 megapixels on.
REQUEST_PIXELS = 150_000_000
# Of all requests' in one batch. As many requests as a batch has rows may have their share of it, whatever others send.
BATCH_PIXELS = 4 * REQUEST_PIXELS
RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class Beyond:
    """Rows of requests that are not decoded at all: `refused` has for each request its last row, and what is wrong with
    the request, `crowded` those that may well find room in another batch. `skipped` are all of their rows."""

    refused: dict[int, str]
    crowded: dict[int, MillraceError]
    skipped: frozenset[int]


def beyond_limits(pixels: Array, requests: Sequence[int], name: str) -> Beyond:
    """`pixels` are those of each row, (rows); `requests` how many rows each request has, `name` the tensors'."""
    ends = np.cumsum(requests)
    sums = [int(pixels[end - rows : end].sum()) for rows, end in zip(requests, ends, strict=True)]
    refused: dict[int, str] = {}
    crowded: dict[int, MillraceError] = {}
    skipped: set[int] = set()
    left = sum(one for one in sums if one <= REQUEST_PIXELS)
    # The greatest first: so a request with small images never gives way to others.
    for place in sorted(range(len(sums)), key=lambda place: -sums[place]):
        row = int(ends[place]) - 1
        if sums[place] > REQUEST_PIXELS:
            refused[row] = (
                f"{name}: the images of the request's rows up to this one have {sums[place]:,} pixels together; send "
                f"at most {REQUEST_PIXELS:,}: fewer images in one request, or smaller ones"
            )
        elif left > BATCH_PIXELS:
            left -= sums[place]
            crowded[row] = ResourceExhausted(
                f"{name}: other requests' images have taken the room for pixels of this batch; try again, or send "
                "fewer images in one request, or smaller ones",
                reason="TOO_MANY_PIXELS",
                retry_after_s=RETRY_AFTER_S,
            )
        else:
            continue
        skipped.update(range(row + 1 - requests[place], row + 1))
    return Beyond(refused, crowded, frozenset(skipped))
