"""The manifest of a checkpoint that a user's own training function reported: files that only the program can read.

    r{rank:04d}/{path}      a file, as that rank reported it
    manifest.json           which of them count, with size and SHA-256, and where the run was; canonical JSON

Files are opaque, and may be pickles: a matching digest proves that they are the reported files, not that they are safe.
Millrace itself never loads one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.checkpoint import reading
from shared.checkpoint.format import MANIFEST, OTHER_FORMAT, PROGRAM_FORMAT, read_manifest, sha256
from shared.checkpoint.reading import Readable, StoredFile
from shared.durable import fields_of
from shared.errors import DataLoss
from shared.storage import ObjectStore

KIND = "PROGRAM"


@dataclass(frozen=True, kw_only=True)
class ProgramFile:
    """A reported file: its path in the reported folder, and the rank that reported it."""

    path: str
    rank: int
    size_bytes: int
    sha256: str

    @property
    def object(self) -> str:
        """The file's key below the checkpoint's folder."""
        return f"r{self.rank:04d}/{self.path}"


@dataclass(frozen=True, kw_only=True)
class ProgramContent:
    """The content of a program's checkpoint. `report` counts the program's reports over all attempts."""

    training_job: str
    # `codeBundles/{sha256}` and `module:function`, or the path of a script.
    code_bundle: str
    entry: str
    report: int
    epoch: int
    seed: int
    world_size: int
    # Steps of rank 0's torch optimizers, over the attempts that led to the checkpoint.
    optimizer_steps: int
    # The numbers that rank 0 reported.
    metrics: Mapping[str, float]
    files: Sequence[ProgramFile]
    # Empty if the program reads its own data.
    dataset_version: str = ""
    # Positions of the dataset's shards, and the rows that they had returned: by split the result of the train service's
    # `merge_reports`.
    positions: Mapping[str, Any] = field(default_factory=dict)
    # Of a program that reads its own data: the indices that its prepared DataLoaders had given, by loader the result of
    # the train service's `merge_drawn`.
    indices: Mapping[str, Any] = field(default_factory=dict)
    # The checkpoint that the run last resumed from, and the digest of its manifest.
    parent: str = ""
    parent_manifest_sha256: str = ""
    # The number of the script's run that reported it, from 1; 0 without a script.
    fit: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def encoded(self) -> bytes:
        """Return the bytes of the manifest."""
        manifest = {"format": PROGRAM_FORMAT, "kind": KIND, **asdict(self)}
        return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> ProgramContent:
        values = fields_of(cls, manifest)
        return cls(
            **{
                **values,
                "files": tuple(ProgramFile(**fields_of(ProgramFile, file)) for file in manifest["files"]),
            }
        )


def write_manifest(store: ObjectStore, folder: str, content: ProgramContent) -> tuple[str, int]:
    """Write the manifest, after its files. Returns its digest and the total bytes."""
    encoded = content.encoded()
    store.put(f"{folder}/{MANIFEST}", encoded)
    return sha256(encoded), len(encoded) + content.size_bytes


def is_program_checkpoint(store: Readable, folder: str, manifest_sha256: str) -> bool:
    """Return whether a program reported the checkpoint. Raises `DataLoss` as `load_program_checkpoint` does."""
    return bool(read_manifest(store, folder, manifest_sha256)[0].get("format") == PROGRAM_FORMAT)


def load_program_checkpoint(store: Readable, folder: str, manifest_sha256: str) -> ProgramContent:
    """Load a program's checkpoint.

    Raises `DataLoss` if the manifest is missing, not the one that the registry names, or of another format.
    """
    key = f"{folder}/{MANIFEST}"
    manifest, _ = read_manifest(store, folder, manifest_sha256)
    if manifest.get("format") != PROGRAM_FORMAT:
        raise DataLoss(
            f"{key} has the format {manifest.get('format')!r}; of a program's checkpoint this release reads "
            f"{PROGRAM_FORMAT!r}",
            reason=OTHER_FORMAT,
            metadata={"file": key},
        )
    return ProgramContent.from_manifest(manifest)


def read_program_file(
    store: Readable, folder: str, file: ProgramFile, advanced: Callable[[], None] = lambda: None
) -> Iterator[bytes]:
    """Yield the bytes of one file. Raises `DataLoss` after the last piece if they differ from the manifest."""
    stored = StoredFile(f"{folder}/{file.object}", file.size_bytes, file.sha256)
    return reading.read_pieces(store, stored, advanced=advanced)


def verify_program_checkpoint(store: Readable, folder: str, manifest_sha256: str) -> ProgramContent:
    """Read every file once. Raises `DataLoss`."""
    content = load_program_checkpoint(store, folder, manifest_sha256)
    for file in content.files:
        for _ in read_program_file(store, folder, file):
            pass
    return content
