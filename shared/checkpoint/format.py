"""The files of a checkpoint, written first, and the manifest that names each with its size and SHA-256.

A model's checkpoint:

    model.safetensors       weights and buffers
    optimizer.safetensors   state of optimizer and scheduler: no pickles, so that loading runs no code
    manifest.json           position, metrics, model, preprocessing and lineage; canonical JSON

A program's checkpoint has the files that a user's own training function reported, which only the program can read:

    r{rank:04d}/{path}      a file, as that rank reported it
    manifest.json           which of them count, with size and SHA-256, and where the run was; canonical JSON

A program's files are opaque, and may be pickles: a matching digest proves that they are the reported files, not that
they are safe. Millrace itself never loads one.

A checkpoint counts only once the registry names it with its manifest's digest.

A download has the manifest first, then the files that it names. A reader needs no knowledge of their contents: each
file has a path, size and SHA-256. All processes of a node share one copy, as long as one of them lives:

    {root}/{manifest_sha256}/         the files, each compared with its digest; read-only
    {root}/{manifest_sha256}.lock     held by every process that uses them, and by the process that makes or removes
                                      them
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from shared.checkpoint import reading
from shared.checkpoint.reading import (
    Readable,
    StoredFile,
    StoredTensor,
    Wanted,
    blocks_of,
    digests_of,
    read_index,
    read_pieces,
    read_rows,
    read_whole,
    whole_path,
)
from shared.dataset_version.manifest import Column
from shared.durable import fields_of
from shared.errors import DataLoss, FailedPrecondition, Unavailable
from shared.model_spec import ModelSpec, TargetScaling
from shared.storage import ObjectMissing, ObjectStore
from shared.transforms import Pipeline, Schema, TensorSpec, TensorType, schema_of_columns
from shared.transforms.records import ModelInput, UnusableColumn, record_of_columns

# --- A model's checkpoint ---

FORMAT = "millrace.checkpoint/3"
# For a model with a scaled target: a release that does not know the scaling would answer in the wrong unit.
FORMAT_SCALED = "millrace.checkpoint/3-scaled-target"
# For a model that a user's own code builds: a release that does not know these could not build it.
FORMAT_OWN_MODEL = "millrace.checkpoint/5-own-model"
# For a model whose ranks wrote a file each. A release that does not know these finds no weights.
FORMAT_SHARDED = "millrace.checkpoint/6-sharded"
# For a user's own model that reads several columns, sharded or not. Earlier releases look for one column.
FORMAT_SEVERAL_INPUTS = "millrace.checkpoint/7-several-inputs"
MODEL_FORMATS = (FORMAT, FORMAT_SCALED, FORMAT_OWN_MODEL, FORMAT_SHARDED, FORMAT_SEVERAL_INPUTS)
# For a user's own training function, see `shared.checkpoint.format`. Earlier releases skip it.
PROGRAM_FORMAT = "millrace.checkpoint/4-program"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
MANIFEST = "manifest.json"
# The error reason for a checkpoint that may be whole, but is of a format that this release does not read.
OTHER_FORMAT = "OTHER_FORMAT"
# The error reason for a checkpoint that only the program which reported it can read.
PROGRAM_CHECKPOINT = "PROGRAM_CHECKPOINT"


@dataclass(frozen=True, kw_only=True)
class CoveragePart:
    """An object with the row ids that were consumed in the steps [first_step, end_step). `path` is its key."""

    path: str
    sha256: str
    first_step: int
    end_step: int
    row_count: int


@dataclass(frozen=True, kw_only=True)
class CheckpointContent:
    """The content of a model's checkpoint.

    `step` counts the optimizer steps that are in it, `epoch` is that of the next step. `ingested` are the columns of
    the rows as ingested. `transforms` are all transforms applied to them since, a frozen `Transform` each, oldest
    first: those that made the dataset version, and last the training's own, which outputs `input_column`, the model's
    input. `class_names` names the classes 0, 1, … of a classifier, if its dataset version does. `coverage` names the
    records of every row that led to it, in the order of the steps; loading a checkpoint does not read them.
    """

    training_job: str
    dataset_version: str
    dataset_manifest_sha256: str
    step: int
    epoch: int
    seed: int
    metrics: dict[str, float]
    model: ModelSpec
    ingested: Sequence[Column]
    transforms: Sequence[dict[str, Any]]
    input_column: str
    # The columns of a model of several inputs, for which `input_column` is empty.
    input_columns: Sequence[str] = ()
    class_names: Sequence[str] = ()
    # Set for a regression; None: the model's outputs are in the target's own unit.
    target_scaling: TargetScaling | None = None
    # The source of the initial weights and the digest of its manifest; empty: the weights were drawn at random.
    initial_checkpoint: str = ""
    initial_checkpoint_sha256: str = ""
    coverage: Sequence[CoveragePart] = ()
    # The number of NaN of the training split in each `ingested` column, as far as known. None: unknown for all columns,
    # as in checkpoints of earlier releases.
    nan_counts: Mapping[str, int] | None = None
    # For imported weights: the files that they came in, `path`, `size_bytes` and `sha256` each.
    imported: Sequence[Mapping[str, Any]] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that the model reads."""
        return tuple(self.input_columns) or (self.input_column,)

    def model_input(self, schema: Schema) -> ModelInput | None:
        """Return one row of the model's input, of columns as the last step leaves them.

        Return None if they are not what the model reads: for one input float32 of a fixed shape.
        """
        if self.input_columns:
            try:
                return record_of_columns(schema, self.input_columns, "input_columns")
            except UnusableColumn:
                return None
        made = schema[self.input_column]
        if not isinstance(made, TensorType) or made.dtype != "float32" or None in made.shape:
            return None
        return TensorSpec(self.input_column, made.dtype, tuple(length or 0 for length in made.shape))

    @property
    def ingested_schema(self) -> Schema:
        return schema_of_columns(self.ingested)

    def serving(self) -> Pipeline:
        """Return the pipeline from raw rows, as ingested, to the model's input: all row-wise steps and no others.

        Raises `InvalidArgument` if the steps do not fit the columns.
        """
        whole = reduce(Pipeline.then, map(Pipeline.from_config, self.transforms), Pipeline([]))
        return whole.serving(self.inputs, self.ingested_schema)

    @property
    def _format(self) -> str:
        if self.input_columns:
            return FORMAT_SEVERAL_INPUTS
        if self.model.is_own:
            return FORMAT_OWN_MODEL
        return FORMAT if self.target_scaling is None else FORMAT_SCALED

    def as_manifest(self) -> dict[str, Any]:
        return {
            "format": self._format,
            "training_job": self.training_job,
            "dataset_version": self.dataset_version,
            "dataset_manifest_sha256": self.dataset_manifest_sha256,
            "step": self.step,
            "epoch": self.epoch,
            "seed": self.seed,
            "metrics": self.metrics,
            "model": self.model.as_config(),
            "ingested": [asdict(column) for column in self.ingested],
            "transforms": list(self.transforms),
            "input_column": self.input_column,
            **({"input_columns": list(self.input_columns)} if self.input_columns else {}),
            "class_names": list(self.class_names),
            **({} if self.target_scaling is None else {"target_scaling": self.target_scaling.as_config()}),
            "initial_checkpoint": self.initial_checkpoint,
            "initial_checkpoint_sha256": self.initial_checkpoint_sha256,
            "coverage": [asdict(part) for part in self.coverage],
            "nan_counts": None if self.nan_counts is None else dict(self.nan_counts),
            **({"imported": [dict(file) for file in self.imported]} if self.imported else {}),
        }

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> CheckpointContent:
        return cls(
            **{key: manifest[key] for key in ("training_job", "dataset_version", "dataset_manifest_sha256")},
            **{key: manifest[key] for key in ("step", "epoch", "seed", "metrics", "transforms", "input_column")},
            **{key: manifest.get(key, "") for key in ("initial_checkpoint", "initial_checkpoint_sha256")},
            input_columns=tuple(manifest.get("input_columns", ())),
            class_names=tuple(manifest.get("class_names", ())),
            model=ModelSpec.from_config(manifest["model"]),
            target_scaling=TargetScaling.from_config(manifest.get("target_scaling")),
            ingested=[Column(**fields_of(Column, column)) for column in manifest["ingested"]],
            coverage=tuple(CoveragePart(**fields_of(CoveragePart, part)) for part in manifest["coverage"]),
            nan_counts=manifest.get("nan_counts"),
            imported=tuple(manifest.get("imported", ())),
        )


class Checkpoint:
    """A checkpoint whose manifest was verified. Files are verified as they are read."""

    def __init__(self, store: ObjectStore, folder: str, manifest: dict[str, Any]) -> None:
        self._store = store
        self._folder = folder
        self._files = {file["path"]: file for file in manifest["files"]}
        self.content = CheckpointContent.from_manifest(manifest)

    def read(self, path: str) -> bytes:
        """Return a file's bytes, put together from its shards if there are some.

        Raises `DataLoss` if it is missing or differs from the manifest.
        """
        if path not in self._files and any(whole_path(file) == path for file in self._files):
            return bytes(read_whole(self._store, self.stored(path)))
        return b"".join(self._pieces(path))

    def tensors(self, path: str) -> dict[str, StoredTensor]:
        """Return where the tensors of `path` lie, by name, without reading them.

        Raises `DataLoss` if a file is missing, damaged, or longer than the manifest says.
        """
        files = self.stored(path)
        for file in files:
            self._refuse_longer(file)
        return read_index(self._store, files)[0]

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Read rows of `tensors` right into memory. Raises `DataLoss`: what was filled must then not be used."""
        read_rows(self._store, wanted)

    def verify(self) -> None:
        """Read every file once, without keeping it. Raises `DataLoss`."""
        for path in self._files:
            for _ in self._pieces(path):
                pass

    def stored(self, path: str) -> list[StoredFile]:
        """Return the files that have the tensors of `path`: that file, or its shards, rank 0's first."""
        found = [file for file in sorted(self._files) if whole_path(file) == path]
        if not found:
            raise _lost(self._folder, path, "is not in the manifest")
        return [StoredFile.from_manifest(self._folder, self._files[one]) for one in found]

    def _pieces(self, path: str) -> Iterator[bytes]:
        if path not in self._files:
            raise _lost(self._folder, path, "is not in the manifest")
        file = StoredFile.from_manifest(self._folder, self._files[path])
        self._refuse_longer(file)
        return read_pieces(self._store, file)

    def _refuse_longer(self, file: StoredFile) -> None:
        found = self._store.size(file.key)
        if found is not None and found > file.size_bytes:
            raise _lost(self._folder, file.key.removeprefix(f"{self._folder}/"), "is longer than its manifest says")


def write_checkpoint(
    store: ObjectStore, folder: str, content: CheckpointContent, files: Mapping[str, bytes | memoryview]
) -> tuple[str, int]:
    """Write files, then the manifest, below `folder`. Return the manifest's digest and the total bytes."""
    for path, data in files.items():
        store.put(f"{folder}/{path}", data)  # in parts if it is large
    named = [
        {"path": path, "size_bytes": len(data), "sha256": sha256(data), **blocks_of(data)}
        for path, data in sorted(files.items())
    ]
    return _write_manifest(store, folder, content.as_manifest(), named)


def write_weights(store: ObjectStore, folder: str, content: CheckpointContent, weights: Path) -> tuple[str, int]:
    """Write a checkpoint as `write_checkpoint` does, from a local file of weights, which may exceed the memory."""
    with weights.open("rb") as file:
        named = {"path": WEIGHTS, **digests_of(file)}
    store.upload_file(weights, f"{folder}/{WEIGHTS}")
    return _write_manifest(store, folder, content.as_manifest(), [named])


def write_sharded(
    store: ObjectStore, folder: str, content: CheckpointContent, shards: Sequence[Mapping[str, Any]]
) -> tuple[str, int]:
    """Write the manifest of a checkpoint whose shards are written: `path` and `digests_of` each."""
    manifest = content.as_manifest()
    if not content.input_columns:
        manifest["format"] = FORMAT_SHARDED
    return _write_manifest(store, folder, manifest, sorted(shards, key=lambda one: one["path"]))


def _write_manifest(
    store: ObjectStore, folder: str, manifest: Mapping[str, Any], named: Sequence[Mapping[str, Any]]
) -> tuple[str, int]:
    encoded = json.dumps({**manifest, "files": named}, sort_keys=True, separators=(",", ":")).encode()
    store.put(f"{folder}/{MANIFEST}", encoded)
    return sha256(encoded), len(encoded) + sum(one["size_bytes"] for one in named)


def read_manifest(store: Readable, folder: str, manifest_sha256: str) -> tuple[dict[str, Any], int]:
    """Return the manifest of a checkpoint of any format, and its size in bytes.

    Raises `DataLoss` if it is missing, or not the one that the registry names.
    """
    try:
        encoded = store.get(f"{folder}/{MANIFEST}")
    except ObjectMissing:
        raise _lost(folder, MANIFEST, "is missing") from None
    if sha256(encoded) != manifest_sha256:
        raise _lost(folder, MANIFEST, "does not have the digest that its job's log names")
    return json.loads(encoded), len(encoded)


def load_checkpoint(store: ObjectStore, folder: str, manifest_sha256: str) -> Checkpoint:
    """Open a checkpoint that the registry names.

    Raises `DataLoss` if its manifest is missing, another, or of a format that this release does not read, and
    `FailedPrecondition` for a program's.
    """
    manifest, _ = read_manifest(store, folder, manifest_sha256)
    if manifest.get("format") == PROGRAM_FORMAT:
        raise not_a_model(folder)
    if manifest.get("format") not in MODEL_FORMATS:
        raise DataLoss(
            f"{folder}/{MANIFEST} has the format {manifest.get('format')!r}; this release reads "
            f"{' and '.join(map(repr, MODEL_FORMATS))}",
            reason=OTHER_FORMAT,
            metadata={"file": f"{folder}/{MANIFEST}"},
        )
    return Checkpoint(store, folder, manifest)


def not_a_model(name: str, fields: Sequence[tuple[str, str]] = ()) -> FailedPrecondition:
    """Return the error for a program's checkpoint in place of a model of Millrace's."""
    return FailedPrecondition(
        f"{name} was reported by a user's own training function: its files are known to that program alone, so it "
        "can be served and predicted with by its predictor, and not fine-tuned from; name a checkpoint of a job with "
        "spec.model",
        reason=PROGRAM_CHECKPOINT,
        metadata={"resource": name},
        fields=fields,
    )


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _lost(folder: str, path: str, what: str) -> DataLoss:
    return DataLoss(f"{folder}/{path} {what}", metadata={"file": f"{folder}/{path}"})


# --- A program's checkpoint ---

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
    """Write the manifest, after its files. Return its digest and the total bytes."""
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
    store: Readable, folder: str, file: ProgramFile, note_progress: Callable[[], None] = lambda: None
) -> Iterator[bytes]:
    """Yield the bytes of one file. Raises `DataLoss` after the last piece if they differ from the manifest."""
    stored = StoredFile(f"{folder}/{file.object}", file.size_bytes, file.sha256)
    return reading.read_pieces(store, stored, note_progress=note_progress)


def verify_program_checkpoint(store: Readable, folder: str, manifest_sha256: str) -> ProgramContent:
    """Read every file once. Raises `DataLoss`."""
    content = load_program_checkpoint(store, folder, manifest_sha256)
    for file in content.files:
        for _ in read_program_file(store, folder, file):
            pass
    return content


# --- Files for download ---

# The manifest's path among a program's files, which may include their own `manifest.json`.
PROGRAM_MANIFEST = "millrace-manifest.json"
FORMATS = "millrace.checkpoint/"


@dataclass(frozen=True)
class CheckpointFile:
    """A file of a checkpoint: `path` in a downloaded checkpoint, `key` in the store."""

    path: str
    key: str
    size_bytes: int
    sha256: str
    # With the digests of its blocks, where the manifest has them.
    file: StoredFile | None = field(default=None, compare=False)

    @property
    def stored(self) -> StoredFile:
        return self.file or StoredFile(self.key, self.size_bytes, self.sha256)


def files_of(store: Readable, folder: str, manifest_sha256: str) -> list[CheckpointFile]:
    """Return the manifest, then the files that it names, in its order.

    `folder` is the checkpoint's folder in the store. If a program's own file has the path `PROGRAM_MANIFEST`, it takes
    precedence, and the manifest is left out. Raises `DataLoss` if the manifest is missing, not the one that the
    registry names, or of an unknown format.
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
    """Yield the bytes of a file from `offset` on, as `read_pieces` of `shared.checkpoint.reading` does."""
    return read_pieces(store, file.stored, offset)


def _of_model(folder: str, files: Sequence[Mapping[str, Any]]) -> list[CheckpointFile]:
    found = [(file["path"], StoredFile.from_manifest(folder, file)) for file in files]
    return [CheckpointFile(path, one.key, one.size_bytes, one.sha256, one) for path, one in found]


def _of_program(folder: str, manifest: Mapping[str, Any]) -> list[CheckpointFile]:
    return [
        CheckpointFile(file.path, f"{folder}/{file.object}", file.size_bytes, file.sha256)
        for file in ProgramContent.from_manifest(manifest).files
    ]


# --- Copy on a node ---

logger = logging.getLogger(__name__)

LOCK = ".lock"
HASHED_BYTES = 1 << 20
LOCK_POLL_S = 0.05
# The longest waits for a process that makes the copy, and for those that use a damaged one.
MAKE_TIMEOUT_S = 3_600.0
IN_USE_TIMEOUT_S = 60.0
# Locks of the copies that this process uses, held until its end.
_held: dict[Path, int] = {}


def default_root() -> Path:
    """Return the folder of this user's copies."""
    return Path(f"/tmp/millrace-{os.getuid()}/checkpoints")


def node_copy(store: Readable, folder: str, manifest_sha256: str, root: Path | None = None) -> Path:
    """Return the folder below `root` with the files of a checkpoint, for this process's life.

    `folder` is the checkpoint's folder in the store. An existing copy is compared with its digests, and replaced if it
    was changed. Copies that no process uses any more are removed first. Raises `DataLoss` for stored files that differ
    from what was committed, `Unavailable` if other processes make the copy or use a changed one for too long, and
    `OSError` for faults of this node's disk.
    """
    root = root or default_root()
    for one in (root.parent, root):  # both may be new, and `mode` is that of the last folder alone
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = root / manifest_sha256
    if place in _held:
        return place
    _remove_unused(root, place)
    files = files_of(store, folder, manifest_sha256)
    _held[place] = _lease(store, place, files)
    return place


def _lease(store: Readable, place: Path, files: list[CheckpointFile]) -> int:
    """Return a shared lock on a whole copy, which this process makes if there is none.

    The shared lock comes first, because other processes may hold theirs for life. Only a process that must make the
    copy takes the exclusive lock.
    """
    lock, damaged, in_use_until = _locked(place), None, float("inf")
    try:
        while True:
            # A copy without a state is missing. A large one is not read again until it was replaced.
            if (state := _state(place)) != damaged and _is_whole(place, files):
                return lock
            damaged = state
            fcntl.flock(lock, fcntl.LOCK_UN)
            if _try_lock(lock, fcntl.LOCK_EX) and _is_current(lock, place):
                if _state(place) == damaged or not _is_whole(place, files):
                    _make(store, place, files)
                in_use_until = float("inf")
            else:
                in_use_until = min(in_use_until, time.monotonic() + IN_USE_TIMEOUT_S)
                if time.monotonic() > in_use_until:
                    raise Unavailable(
                        f"the copy {place} of a checkpoint was changed while other processes use it; end them, then "
                        "try again"
                    )
                time.sleep(LOCK_POLL_S)
            # The file may have been replaced, and between two locks another process may have removed the copy.
            os.close(lock)
            lock = -1
            lock = _locked(place)
    except BaseException:
        if lock >= 0:
            os.close(lock)
        raise


def _make(store: Readable, place: Path, files: list[CheckpointFile]) -> None:
    fresh = place.with_name(f"{place.name}.{uuid.uuid4().hex}")
    try:
        for file in files:
            path = fresh / file.path
            if not path.resolve().is_relative_to(fresh.resolve()):
                raise DataLoss(f"{file.key} would lie outside of its folder", metadata={"file": file.key})
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as written:
                for piece in read_file(store, file):
                    written.write(piece)
            path.chmod(0o444)
        _remove(place)
        fresh.rename(place)
    except BaseException:
        _remove(fresh)
        raise


def _is_whole(place: Path, files: list[CheckpointFile]) -> bool:
    if not place.is_dir():
        return False
    found = {one.relative_to(place).as_posix() for one in place.rglob("*") if not one.is_dir()}
    return found == {file.path for file in files} and all(_digest(place / one.path) == one.sha256 for one in files)


def _digest(path: Path) -> str:
    if path.is_symlink():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(HASHED_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _locked(place: Path) -> int:
    """Return a shared lock on the copy, after waiting for a process that makes or removes it."""
    until = time.monotonic() + MAKE_TIMEOUT_S
    while True:
        lock = os.open(_lock_of(place), os.O_RDWR | os.O_CREAT, 0o600)
        if _try_lock(lock, fcntl.LOCK_SH) and _is_current(lock, place):
            return lock
        os.close(lock)  # another process makes the copy, or has removed it meanwhile
        if time.monotonic() > until:
            raise Unavailable(f"another process has made the copy {place} of a checkpoint for too long; try again")
        time.sleep(LOCK_POLL_S)


def _lock_of(place: Path) -> Path:
    return place.with_name(place.name + LOCK)


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _is_current(lock: int, place: Path) -> bool:
    """Return whether the locked file is still the copy's. It is removed with an unused copy."""
    try:
        return os.path.samestat(os.fstat(lock), _lock_of(place).stat())
    except FileNotFoundError:
        return False


def _state(place: Path) -> tuple[int, int] | None:
    """Return what distinguishes a copy from the one that replaces it, or None if there is none."""
    try:
        found = place.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def _remove_unused(root: Path, place: Path) -> None:
    for path in root.glob(f"*{LOCK}"):
        if path.name == place.name + LOCK:
            continue
        try:
            lock = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in root.glob(f"{path.name.removesuffix(LOCK)}*"):
                if not left.name.endswith(LOCK):
                    _remove(left)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # the copy is in use
            continue
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
