"""The spec of a prediction over a version, checked as a whole: all problems are reported at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from data_service.domain.import_spec import BadRows, bad_rows_problems
from data_service.domain.split_rules import Problem
from data_service.domain.transform_spec import SOURCE_PATTERN, repeated_problems
from shared.dataset_version.manifest import name_problem
from shared.durable import fields_of
from shared.errors import MillraceError, invalid_fields
from shared.names import parse

DEFAULT_BATCH_SIZE = 64
MAX_BATCH_SIZE = 65_536
MAX_WORKERS = 1024
MAX_CPUS = 1024
MAX_PREFIX = 63
MAX_PREDICTOR = 200
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers of a prediction.

    `most` 0: as many as fit the cluster. `cpus` is also the number of the model's threads. The model runs on a GPU if
    `gpus` is above 0.
    """

    most: int = 0
    batch_size: int = DEFAULT_BATCH_SIZE
    cpus: int = 1
    gpus: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """A reference to a checkpoint.

    `folder` is the store's key prefix of its files, `sha256` the digest of its manifest; both are empty until it is
    found.
    """

    name: str
    folder: str = ""
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class PredictSpec:
    """The spec of a prediction.

    `split` and `columns` empty: all; `outputs` empty: all but the logits. `source_sha256` is the digest of the source's
    manifest at the request; `bad_rows` are those that a step cannot process. `predictor` is only for a program's
    checkpoint: `module:name` of the class in its bundle that predicts; empty: `Predictor` of the program's module.
    """

    source: str
    checkpoint: CheckpointRef
    source_sha256: str = ""
    split: str = ""
    columns: Sequence[str] = ()
    outputs: Sequence[str] = ()
    column_prefix: str = ""
    bad_rows: BadRows = field(default_factory=BadRows)
    workers: Workers = field(default_factory=Workers)
    predictor: str = ""

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "columns": list(self.columns), "outputs": list(self.outputs)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PredictSpec:
        parts = {"checkpoint": CheckpointRef, "bad_rows": BadRows, "workers": Workers}
        read = {name: part(**fields_of(part, record[name])) for name, part in parts.items()}
        return cls(**{**fields_of(cls, record), **read})


def check_prediction(spec: PredictSpec) -> None:
    """Raises `InvalidArgument` naming every field that is invalid regardless of the resources it names."""
    problems = list(_prediction_problems(spec))
    if problems:
        raise invalid_fields(problems)


def _prediction_problems(spec: PredictSpec) -> Iterator[Problem]:
    try:
        parse("source", spec.source, SOURCE_PATTERN)
    except MillraceError:
        yield "source", spec.source, f"use a name of the form {SOURCE_PATTERN}"
    if not spec.checkpoint.name:
        yield "checkpoint", "", "name a checkpoint, or a job for its best one"
    if spec.checkpoint.sha256 and not _SHA256.fullmatch(spec.checkpoint.sha256):
        yield "checkpoint_sha256", spec.checkpoint.sha256, "use the SHA-256 of its manifest in hex, or leave it out"
    for field_, names in (("columns", spec.columns), ("outputs", spec.outputs)):
        yield from repeated_problems(field_, names)
    if len(spec.column_prefix) > MAX_PREFIX:
        yield "column_prefix", spec.column_prefix, f"use at most {MAX_PREFIX} characters"
    elif problem := name_problem(f"{spec.column_prefix}prediction"):
        yield "column_prefix", spec.column_prefix, problem
    module, _, name = spec.predictor.partition(":")
    is_entry = all(part.isidentifier() for part in (*module.split("."), *name.split(".")))
    if spec.predictor and (not is_entry or len(spec.predictor) > MAX_PREDICTOR):
        yield "predictor", spec.predictor[:MAX_PREDICTOR], "use module:name of a class, e.g. serve:Predictor"
    yield from bad_rows_problems(spec.bad_rows)
    yield from _worker_problems(spec.workers)


def _worker_problems(workers: Workers) -> Iterator[Problem]:
    if not 0 <= workers.most <= MAX_WORKERS:
        yield "workers.max_workers", workers.most, f"use 1 to {MAX_WORKERS:,}, or 0 for as many as there is room for"
    if not 1 <= workers.batch_size <= MAX_BATCH_SIZE:
        yield "workers.batch_size", workers.batch_size, f"use 1 to {MAX_BATCH_SIZE:,} rows"
    if not 1 <= workers.cpus <= MAX_CPUS:
        yield "workers.cpus", workers.cpus, f"use 1 to {MAX_CPUS:,}"
    # More than one GPU would be reserved, but not used.
    if not 0 <= workers.gpus <= 1:
        yield "workers.gpus", workers.gpus, "use 0, part of a GPU, or 1"
