"""A tar of a folder of images, read from front to back: an upload is read while it grows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from data_service.domain.globs import is_hidden
from data_service.domain.tar_members import TarError, TarMember, members
from data_service.sources.content import blaming, content
from data_service.sources.images import SCHEMA, ClassNames, ImageBatch, is_image_name, problem_of
from data_service.sources.interface import BadRowSink, excerpt_of
from data_service.sources.source_files import SourceFile


class ImageTar:
    """The last two parts of a member's path are its class and its name. Members that are no images by their suffix, and
    hidden ones, are left alone; hostile ones (`tar_members`) damage the whole. An image that is in no folder is a bad
    row. Opening reads all names: labels need every class."""

    schema = SCHEMA

    def __init__(self, file: SourceFile, classes: ClassNames) -> None:
        """Raises `InvalidArgument` for a damaged archive, or one without an image."""
        self._file = file
        self._classes = classes
        found: set[str] = set()
        with self._members() as all_members:
            images = 0
            for member in all_members:
                parent, _ = _class_and_name(member)
                images += 1
                if parent and parent not in found:
                    found.add(parent)
                    classes.add([parent])
        if not images:
            raise file.corrupt("it has no image in a folder of a class")

    @property
    def class_names(self) -> list[str] | None:
        return self._classes.names

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        batch = ImageBatch()
        with self._members() as images:
            for member in images:
                parent, name = _class_and_name(member)
                data = member.read()
                problem = problem_of(data) if parent else "it lies in no folder of a class"
                if problem is not None:
                    bad.add(self._file.uri, f"member {member.name}", problem, excerpt_of(data))
                    continue
                batch.add(data, self._classes.label(parent), f"{parent}/{name}")
                if batch.full and (table := batch.taken()) is not None:
                    yield table
        if (table := batch.taken()) is not None:
            yield table

    @contextmanager
    def _members(self) -> Iterator[Iterator[TarMember]]:
        """The members that are images by their names."""
        with content(self._file) as stream, blaming(self._file, "tar"):
            try:
                yield (member for member in members(stream) if _is_image(member))
            except TarError as error:
                raise self._file.corrupt(str(error)) from None


def _class_and_name(member: TarMember) -> tuple[str, str]:
    parts = member.name.split("/")
    return (parts[-2] if len(parts) > 1 else ""), parts[-1]


def _is_image(member: TarMember) -> bool:
    return is_image_name(member.name) and not any(map(is_hidden, _class_and_name(member)))
