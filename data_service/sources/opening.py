"""Opens what an import's request names, in its order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from data_service.domain.import_spec import Source
from data_service.sources.arrow_ipc import ArrowRows
from data_service.sources.csv_rows import open_csv
from data_service.sources.idx import IdxPair
from data_service.sources.image_folder import MAX_IMAGES, ImageFolder
from data_service.sources.image_tar import ImageTar
from data_service.sources.images import ClassNames
from data_service.sources.interface import OpenSource, RowSource
from data_service.sources.json_rows import open_json_lines
from data_service.sources.overrides import Overrides
from data_service.sources.parquet import ParquetRows
from data_service.sources.partitions import HivePartitions
from data_service.sources.source_files import SourceFile, SourceFiles

# Formats of rows, whose folders may be partition columns. Images have classes for folders.
TABLES = ("parquet", "arrow", "csv", "json_lines")


def open_sources(
    sources: Sequence[Source],
    files: SourceFiles,
    column_types: Mapping[str, str],
    partitioning: str = "hive",
) -> list[OpenSource]:
    """One source of rows for each file (pair, image folder), in order; types are inferred over all files of a source.
    `partitioning` is one of `PARTITIONINGS`.

    `column_types` are in the order of the request. Reads what inference needs: of CSV and JSON Lines, and of tars, all;
    of other formats the beginnings. Waits for uploads that are still open as far as that.

    Raises `NotFound`, `Unavailable`, and `InvalidArgument` naming a source's field or `column_types[i]`.
    """
    overrides = Overrides(column_types)
    classes = ClassNames()
    opened: list[OpenSource] = []
    for index, source in enumerate(sources):
        path = f"sources[{index}]"
        if source.format in TABLES:
            found = files.find_all(f"{path}.{source.format}.uri", source.uris[f"{source.format}.uri"])
            rows = _rows_of_tables(source, found, overrides)
            if partitioning == "hive":
                rows = HivePartitions(found, overrides).added_to(rows)
        else:
            rows = _rows_of_images(source, path, files, overrides, classes)
        opened.extend(OpenSource(index, source.split, one) for one in rows)
    overrides.refuse_unknown()
    return opened


def _rows_of_tables(source: Source, files: Sequence[SourceFile], overrides: Overrides) -> Iterator[RowSource]:
    if source.format == "csv":
        yield from open_csv(files, source.csv, overrides)
    elif source.format == "json_lines":
        yield from open_json_lines(files, overrides)
    else:
        open_file = ParquetRows if source.format == "parquet" else ArrowRows
        for file in files:
            yield overrides.applied_to(open_file(file, overrides.types), file)


def _rows_of_images(
    source: Source, path: str, files: SourceFiles, overrides: Overrides, classes: ClassNames
) -> Iterator[RowSource]:
    if source.format == "idx":
        pair = [files.find(f"{path}.{field}", source.uris[field]) for field in ("idx.images_uri", "idx.labels_uri")]
        yield overrides.applied_to(IdxPair(*pair), pair[0])
    elif source.format == "image_folder":
        field, uri = f"{path}.image_folder.uri", source.uris["image_folder.uri"]
        images = files.find_all(field, uri, MAX_IMAGES)
        yield overrides.applied_to(ImageFolder(images, classes), images[0])
    else:
        for file in files.find_all(f"{path}.image_tar.uri", source.uris["image_tar.uri"]):
            yield overrides.applied_to(ImageTar(file, classes), file)
