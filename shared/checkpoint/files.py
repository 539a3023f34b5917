"""The files of any checkpoint, a model's or a program's, as they are handed out: the manifest, then what it names.

A reader needs no knowledge of what is in them: each is known by its path, size and SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.checkpoint.format import MANIFEST, OTHER_FORMAT, PROGRAM_FORMAT, Readable, read_manifest
from shared.checkpoint.program import ProgramContent
from shared.errors import DataLoss
from shared.storage import ObjectMissing

# Where the manifest lies among a program's files, which may have a `manifest.json` of their own.
PROGRAM_MANIFEST = "millrace-manifest.json"
FORMATS = "millrace.checkpoint/"
# A file is read in pieces of this many bytes: a checkpoint may be larger than the memory.
PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class CheckpointFile:
    """`path` is where it lies in a checkpoint that was downloaded, `key` where it lies in the store."""

    path: str
    key: str
    size_bytes: int
    sha256: str


def files_of(store: Readable, folder: str, manifest_sha256: str) -> list[CheckpointFile]:
    """The manifest, then the files that it names, in its order. `folder` is where the checkpoint lies in the store.

    A program's own file goes before the manifest where both have the path `PROGRAM_MANIFEST`; the manifest is then left
    out. Raises `DataLoss` where the manifest is missing, another than the registry names, or of an unknown format.
    """
    key = f"{folder}/{MANIFEST}"
    manifest, manifest_bytes = read_manifest(store, folder, manifest_sha256)
    if not str(manifest.get("format", "")).startswith(FORMATS):
        raise DataLoss(
            f"{key} has the format {manifest.get('format')!r}, which this release does not know",
            reason=OTHER_FORMAT,
            metadata={"file": key},
        )
    is_program = manifest["format"] == PROGRAM_FORMAT
    named = _of_program(folder, manifest) if is_program else _of_model(folder, manifest["files"])
    own_path = PROGRAM_MANIFEST if is_program else MANIFEST
    if any(one.path == own_path for one in named):
        return named
    return [CheckpointFile(own_path, key, manifest_bytes, manifest_sha256), *named]


def read_file(store: Readable, file: CheckpointFile, offset: int = 0) -> Iterator[bytes]:
    """The bytes of a file from `offset` on, in pieces of `PIECE_BYTES`.

    A file that is read from its beginning is compared with its digest: `DataLoss` comes behind the last piece. One that
    is read from an offset is for the reader to compare, who has the bytes before it. Raises `DataLoss` as well where
    the object is missing or too short.
    """
    digest, start = hashlib.sha256(), offset
    try:
        while start < file.size_bytes:
            piece = store.get_range(file.key, start, min(PIECE_BYTES, file.size_bytes - start))
            if not offset:
                digest.update(piece)
            start += len(piece)
            yield piece
    except ObjectMissing:
        raise _lost(file.key, "is missing") from None
    if not offset and digest.hexdigest() != file.sha256:
        raise _lost(file.key, "does not have the digest that its manifest names")


def _of_model(folder: str, files: Sequence[Mapping[str, Any]]) -> list[CheckpointFile]:
    return [CheckpointFile(one["path"], f"{folder}/{one['path']}", one["size_bytes"], one["sha256"]) for one in files]


def _of_program(folder: str, manifest: Mapping[str, Any]) -> list[CheckpointFile]:
    return [
        CheckpointFile(one.path, f"{folder}/{one.object}", one.size_bytes, one.sha256)
        for one in ProgramContent.from_manifest(manifest).files
    ]


def _lost(key: str, what: str) -> DataLoss:
    return DataLoss(f"{key} {what}", metadata={"file": key})
