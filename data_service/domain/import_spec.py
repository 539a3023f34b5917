"""What an import is asked to do, checked as a whole: every problem is told at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from data_service.domain.uris import UriRefused, check_allowed, parse_uri
from shared.errors import invalid_fields
from shared.names import SPLIT, SPLIT_REMEDY

MAX_SOURCES = 64
MAX_HOLD_OUTS = 64

Problem = tuple[str, object, str]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of one split. `uris` maps a field of the request to its URI; `format` is `idx`, `parquet` or empty."""

    split: str
    format: str
    uris: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class HoldOut:
    from_split: str
    to_split: str
    fraction: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class ImportSpec:
    sources: list[Source]
    hold_outs: list[HoldOut]

    @property
    def imported_splits(self) -> list[str]:
        """In the order in which sources first name them."""
        return list(dict.fromkeys(source.split for source in self.sources))

    @property
    def splits(self) -> list[str]:
        """All splits in the order of their row ids."""
        return [*self.imported_splits, *(one.to_split for one in self.hold_outs)]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ImportSpec:
        return cls(
            sources=[Source(**source) for source in record["sources"]],
            hold_outs=[HoldOut(**hold_out) for hold_out in record["hold_outs"]],
        )


def check(spec: ImportSpec, roots: Sequence[PurePosixPath], *, s3: bool) -> None:
    """Raises `InvalidArgument` naming every field that is wrong. `roots` are the folders that files may come from,
    `s3` says whether the server can read s3://."""
    problems = [*_source_problems(spec, roots, s3), *_hold_out_problems(spec)]
    if problems:
        raise invalid_fields(problems)


def _source_problems(spec: ImportSpec, roots: Sequence[PurePosixPath], s3: bool) -> Iterator[Problem]:
    if not 1 <= len(spec.sources) <= MAX_SOURCES:
        yield "sources", len(spec.sources), f"name 1 to {MAX_SOURCES} sources"
        return
    for index, source in enumerate(spec.sources):
        path = f"sources[{index}]"
        if not SPLIT.fullmatch(source.split):
            yield f"{path}.split", source.split, SPLIT_REMEDY
        if not source.format:
            yield path, "", "set idx or parquet"
        for field, uri in source.uris.items():
            try:
                check_allowed(parse_uri(uri), roots, s3=s3)
            except UriRefused as refused:
                yield f"{path}.{field}", uri, str(refused)


def _hold_out_problems(spec: ImportSpec) -> Iterator[Problem]:
    if len(spec.hold_outs) > MAX_HOLD_OUTS:
        yield "hold_outs", len(spec.hold_outs), f"name at most {MAX_HOLD_OUTS}"
        return
    taken = set(spec.imported_splits)
    for index, hold_out in enumerate(spec.hold_outs):
        path = f"hold_outs[{index}]"
        if hold_out.from_split not in spec.imported_splits:
            yield f"{path}.from_split", hold_out.from_split, "name the split of a source"
        if not SPLIT.fullmatch(hold_out.to_split):
            yield f"{path}.to_split", hold_out.to_split, SPLIT_REMEDY
        elif hold_out.to_split in taken:
            yield f"{path}.to_split", hold_out.to_split, "name a split that no source and no other hold-out makes"
        taken.add(hold_out.to_split)
        if not (math.isfinite(hold_out.fraction) and 0 < hold_out.fraction < 1):
            yield f"{path}.fraction", hold_out.fraction, "use a number above 0 and below 1"
