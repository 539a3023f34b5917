"""Encoded images and tars for tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

from PIL import Image


def encoded(kind: str = "PNG", size: tuple[int, int] = (8, 6), colour: int = 100) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (colour, 255 - colour, 7)).save(buffer, kind)
    return buffer.getvalue()


def tar_of(files: Mapping[str, bytes], layout: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=layout) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
