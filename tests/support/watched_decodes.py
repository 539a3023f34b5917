"""How much is decoded side by side."""

from __future__ import annotations

from typing import Any

import pytest

from shared.transforms.steps.images import DecodeImage


def watched_decodes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Get from now on, for each call that decodes images of any size, the pixels of each of its images."""
    decoded: list[list[int]] = []
    work = DecodeImage.work

    def watched(self: DecodeImage, column: Any, keys: Any) -> Any:
        made: Any = work(self, column, keys)
        decoded.append([image.shape[0] * image.shape[1] for image in made.images])
        return made

    monkeypatch.setattr(DecodeImage, "work", watched)
    return decoded
