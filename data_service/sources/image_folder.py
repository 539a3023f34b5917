"""A folder with a folder of images for each class, as torchvision's ImageFolder has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import pyarrow as pa

from data_service.sources.content import blaming
from data_service.sources.images import MAX_IMAGE_BYTES, SCHEMA, ClassNames, ImageBatch, is_image_name, problem_of
from data_service.sources.interface import BadRowSink, excerpt_of
from data_service.sources.source_files import SourceFile

MAX_IMAGES = 2_000_000


class ImageFolder:
    """`files` are all files below the folder, in their order. The first folder on a file's way is its class, however
    deep it lies; files that are no images by their suffix are left alone, both as in torchvision. An image that is in
    no class's folder is a bad row."""

    schema = SCHEMA

    def __init__(self, files: Sequence[SourceFile], classes: ClassNames) -> None:
        """Raises `InvalidArgument` where no file is an image, or a name is no UTF-8."""
        self._images = [file for file in files if is_image_name(file.relative)]
        if not self._images:
            raise files[0].corrupt("its folder has no image in a folder of a class")
        for file in self._images:
            if not _is_utf8(file.relative):
                raise file.corrupt("its name is not UTF-8, as the column path has to be")
        self._classes = classes
        classes.add({file.relative.split("/")[0] for file in self._images if "/" in file.relative})

    @property
    def class_names(self) -> list[str] | None:
        return self._classes.names

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        batch = ImageBatch()
        for file in self._images:
            name, slash, _ = file.relative.partition("/")
            with closing(file.open()) as opened, blaming(file, "image"):
                data = bytes(opened.read(MAX_IMAGE_BYTES + 1))
            problem = problem_of(data) if slash else "it lies in no folder of a class"
            if problem is not None:
                bad.add(file.uri, f"file {file.relative}", problem, excerpt_of(data))
                continue
            batch.add(data, self._classes.label(name), file.relative)
            if batch.full and (table := batch.taken()) is not None:
                yield table
        if (table := batch.taken()) is not None:
            yield table


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
