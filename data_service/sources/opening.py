"""Opens what an import's request names, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

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
from data_service.sources.source_files import SourceFile, SourceFiles


def open_sources(
    sources: Sequence[Source],
    files: SourceFiles,
    column_types: Mapping[str, str],
) -> list[OpenSource]:
    """One source of rows for each file (pair, image folder), in order; types are inferred over all files of a source.

    `column_types` are in the order of the request. Reads what inference needs: of CSV and JSON Lines, and of tars, all;
    of other formats the beginnings. Waits for uploads that are still open as far as that.

    Raises `NotFound`, `Unavailable`, and `InvalidArgument` naming a source's field or `column_types[i]`.
    """
    overrides = Overrides(column_types)
    classes = ClassNames()
    opened: list[OpenSource] = []
    for index, source in enumerate(sources):
        rows = _rows_of(source, f"sources[{index}]", files, overrides, classes)
        opened.extend(OpenSource(index, source.split, one) for one in rows)
    overrides.refuse_unknown()
    return opened


def _rows_of(
    source: Source, path: str, files: SourceFiles, overrides: Overrides, classes: ClassNames
) -> Iterator[RowSource]:
    def named(field: str) -> list[SourceFile]:
        return files.find_all(f"{path}.{field}", source.uris[field])

    single: dict[str, Callable[[SourceFile], RowSource]] = {
        "parquet": lambda file: ParquetRows(file, overrides.types),
        "arrow": lambda file: ArrowRows(file, overrides.types),
        "image_tar": lambda file: ImageTar(file, classes),
    }
    if source.format == "csv":
        yield from open_csv(named("csv.uri"), source.csv, overrides)
    elif source.format == "json_lines":
        yield from open_json_lines(named("json_lines.uri"), overrides)
    elif source.format == "idx":
        pair = [files.find(f"{path}.{field}", source.uris[field]) for field in ("idx.images_uri", "idx.labels_uri")]
        yield overrides.applied_to(IdxPair(*pair), pair[0])
    elif source.format == "image_folder":
        field, uri = f"{path}.image_folder.uri", source.uris["image_folder.uri"]
        images = files.find_all(field, uri, MAX_IMAGES)
        yield overrides.applied_to(ImageFolder(images, classes), images[0])
    else:
        for file in named(f"{source.format}.uri"):
            yield overrides.applied_to(single[source.format](file), file)
