"""Encoded images as rows: checked by decoding them, labelled by their class folders."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from shared.errors import InvalidArgument
from shared.transforms.steps.decoding import why_refused

# What torchvision's ImageFolder looks at, as far as `decode_image` takes it; it leaves other files alone, and so do we.
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
MAX_IMAGE_BYTES = 256 * 1024 * 1024
MAX_CLASSES = 100_000
BATCH_BYTES = 4 * 1024 * 1024
BATCH_ROWS = 256

SCHEMA = pa.schema(
    [
        pa.field("image", pa.binary(), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
    ]
)


def is_image_name(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def problem_of(data: bytes) -> str | None:
    """Why `decode_image` would not take these bytes; None where it would.

    Of an animation or a TIFF of many pages only the first is looked at: no more is ever used.
    """
    if len(data) > MAX_IMAGE_BYTES:
        return f"it has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are read"
    try:
        refusal = why_refused(data)
    except MemoryError:  # as hostile bytes can make a decoder raise, whatever memory there is
        return "it takes more memory to decode than there is"
    return None if refusal is None else f"it {refusal}"


class ClassNames:
    """The classes of all image sources of a version: labels are their places in the order of their names' bytes."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._sorted: list[str] | None = None
        self._labels: dict[str, int] = {}

    def add(self, names: Iterable[str]) -> None:
        """Raises `InvalidArgument` for more than `MAX_CLASSES`."""
        self._names.update(names)
        self._sorted = None
        if len(self._names) > MAX_CLASSES:
            raise InvalidArgument(
                f"sources: their images have more than {MAX_CLASSES} classes; a class is the folder that images are in",
                reason="TOO_MANY_CLASSES",
                metadata={"field": "sources"},
                fields=[("sources", f"name images of at most {MAX_CLASSES} classes")],
            )

    @property
    def names(self) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted(self._names, key=lambda name: name.encode("utf-8", "surrogateescape"))
            self._labels = {name: label for label, name in enumerate(self._sorted)}
        return self._sorted

    def label(self, name: str) -> int:
        """Once all sources are open: another class would move the labels."""
        if self._sorted is None or name not in self._labels:
            _ = self.names
        return self._labels[name]


class ImageBatch:
    """Rows until there are enough for a table."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int, str]] = []
        self._bytes = 0

    @property
    def full(self) -> bool:
        return self._bytes >= BATCH_BYTES or len(self._rows) >= BATCH_ROWS

    def add(self, data: bytes, label: int, path: str) -> None:
        self._rows.append((data, label, path))
        self._bytes += len(data)

    def taken(self) -> pa.Table | None:
        """The rows so far, which are then forgotten; None where there are none."""
        if not self._rows:
            return None
        columns = zip(*self._rows, strict=True)
        arrays = [pa.array(values, kind) for values, kind in zip(columns, SCHEMA.types, strict=True)]
        self._rows, self._bytes = [], 0
        return pa.Table.from_arrays(arrays, schema=SCHEMA)
