"""Conversion between protobuf messages and downloaded or imported checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from typing import Any

import pyarrow as pa

from millrace.train.v1 import checkpoint_import_pb2, resources_pb2
from millrace.train.v1.train_service_pb2 import GetCheckpointResponse
from shared.dataset_version.manifest import Column, tensor_field
from shared.errors import invalid_field
from shared.idempotency import body_digest
from shared.transforms.batch import arrow_type_of
from train_service.converters.jobs import checkpoint_to_proto, job_to_proto
from train_service.converters.specs import spec_from_proto
from train_service.jobs.checkpoint_import import CheckpointImportRequest, Imported, SentFile
from train_service.jobs.run_records import CheckpointListing, FileBegin, Part

# --- Checkpoints ---

MAX_CHUNK_BYTES = 1024 * 1024


def part_to_protos(part: Part) -> Iterator[GetCheckpointResponse]:
    """Yield a part's messages, with bytes cut into chunks."""
    if isinstance(part, CheckpointListing):
        header = GetCheckpointResponse.Header(
            checkpoint=checkpoint_to_proto(part.entry),
            file_count=len(part.files),
            size_bytes=sum(one.size_bytes for one in part.files),
        )
        yield GetCheckpointResponse(header=header)
    elif isinstance(part, FileBegin):
        file = GetCheckpointResponse.File(
            path=part.file.path, size_bytes=part.file.size_bytes, sha256=part.file.sha256, offset=part.offset
        )
        yield GetCheckpointResponse(file=file)
    else:
        for start in range(0, len(part), MAX_CHUNK_BYTES):
            yield GetCheckpointResponse(chunk=part[start : start + MAX_CHUNK_BYTES])


# --- Imports ---

MAX_DIMENSIONS = 8
MAX_NUMBERS = 1 << 31
# Limits of a name map, whose rules may be costly expressions.
MAX_RULES = 100
MAX_RULE = 1_000


async def import_parts_from_proto(
    requests: AsyncIterator[Any], custom_allowed: Collection[str]
) -> AsyncIterator[CheckpointImportRequest | bytes]:
    async for request in requests:
        if request.WhichOneof("content") == "header":
            yield _request(request.header, custom_allowed)
        else:
            yield request.chunk


def imported_to_proto(imported: Imported) -> checkpoint_import_pb2.ImportCheckpointResponse:
    report = report_to_proto(imported.report)
    if imported.view is None or imported.view.newest is None:
        return checkpoint_import_pb2.ImportCheckpointResponse(report=report)
    return checkpoint_import_pb2.ImportCheckpointResponse(
        training_job=job_to_proto(imported.view),
        checkpoint=checkpoint_to_proto(imported.view.newest),
        report=report,
    )


def sources_to_proto(sources: Mapping[str, Any]) -> checkpoint_import_pb2.ImportedWeights:
    files = [checkpoint_import_pb2.ImportedFile(**file) for file in sources["files"]]
    return checkpoint_import_pb2.ImportedWeights(files=files, report=report_to_proto(sources["report"]))


def report_to_proto(report: Mapping[str, Any]) -> checkpoint_import_pb2.ImportReport:
    kind = checkpoint_import_pb2.ImportReport
    return kind(
        format=report["format"],
        key=report["key"],
        fits=report["fits"],
        fitted_count=report["fitted_count"],
        fitted=[kind.Fitted(**one) for one in report["fitted"]],
        missing_count=report["missing_count"],
        missing=report["missing"],
        missing_allowed_count=report["missing_allowed_count"],
        unexpected_count=report["unexpected_count"],
        unexpected=report["unexpected"],
        dropped_count=report["dropped_count"],
        misfit_count=report["misfits_count"],
        misfits=[kind.Misfit(**misfit) for misfit in report["misfits"]],
        non_finite_count=report["non_finite_count"],
        non_finite=[kind.NonFinite(**one) for one in report["non_finite"]],
        other_count=report["others_count"],
        others=report["others"],
    )


def _request(header: Any, custom_allowed: Collection[str]) -> CheckpointImportRequest:
    asked = header.spec
    given = _column(asked.input) if asked.HasField("input") else None
    training = resources_pb2.TrainingSpec(
        dataset_version=asked.dataset_version,
        input_column=asked.input_column or (given.name if given else ""),
        label_column=asked.label_column,
        transform=asked.transform,
        task=asked.task,
        model=asked.model if asked.HasField("model") else None,
        allow_non_finite=asked.allow_non_finite,
    )
    return CheckpointImportRequest(
        job_id=header.training_job_id,
        spec=spec_from_proto(training, custom_allowed),
        input_column=given,
        class_names=tuple(asked.class_names),
        names=_names(asked.names),
        files=[SentFile(file.path, file.size_bytes, file.sha256) for file in header.files],
        request_id=header.request_id,
        digest=body_digest(header),
        validate_only=header.validate_only,
    )


def _column(given: Any) -> Column:
    spelling = given.dtype or "float32"
    try:
        value_type = arrow_type_of(spelling)
    except ValueError:
        value_type = pa.null()
    if not (pa.types.is_integer(value_type) or pa.types.is_floating(value_type)):
        raise invalid_field("spec.input.dtype", spelling, "use a type of numbers, such as float32 or uint8")
    shape = tuple(given.shape)
    numbers = 1
    for size in shape:
        numbers *= size
    if not 1 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 1 or numbers > MAX_NUMBERS:
        remedy = f"use 1 to {MAX_DIMENSIONS} sizes from 1 up, of at most {MAX_NUMBERS:,} numbers"
        raise invalid_field("spec.input.shape", list(shape)[: MAX_DIMENSIONS + 1], remedy)
    name = given.name or "image"
    return Column(name=name, arrow_type=str(tensor_field(name, value_type, shape).type), shape=list(shape))


def _names(names: Any) -> dict[str, Any]:
    for path, texts in (("drop", names.drop), ("allow_missing", names.allow_missing), ("renames", names.renames)):
        if len(texts) > MAX_RULES:
            raise invalid_field(f"spec.names.{path}", f"{len(texts)} of them", f"use at most {MAX_RULES}")
    renames = [{"prefix": one.prefix, "pattern": one.pattern, "replacement": one.replacement} for one in names.renames]
    for index, rename in enumerate(renames):
        if not rename["prefix"] and not rename["pattern"]:
            raise invalid_field(f"spec.names.renames[{index}]", "", "give a prefix or a pattern")
    texts = [names.key, *names.drop, *names.allow_missing, *(text for one in renames for text in one.values())]
    if any(len(text) > MAX_RULE for text in texts):
        raise invalid_field("spec.names", "a longer text", f"use at most {MAX_RULE:,} characters for each")
    return {
        "key": names.key,
        "renames": renames,
        "drop": list(names.drop),
        "allow_missing": list(names.allow_missing),
    }
