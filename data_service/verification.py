"""Reads every stored byte of a committed version again and reports all differences from the commit."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from shared.dataset_version import ROW_ID, DatasetVersion, RowGroup, VersionReader
from shared.dataset_version.manifest import ROW_ID_FIELD, DataFile, sha256_hex
from shared.dataset_version.version import MANIFEST, check_not_deleted
from shared.errors import DataLoss
from shared.storage import ObjectMissing, ObjectStore

# The bytes in memory at a time, besides one decoded row group.
READ_BYTES = 4 * 1024 * 1024
# A message is sent at least after this many bytes.
REPORT_EVERY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Damage:
    """A damaged file; `path` is relative to the version's folder."""

    path: str
    description: str


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The progress; `damages` are those found since the previous message."""

    files_checked: int = 0
    files_total: int = 0
    bytes_checked: int = 0
    rows_checked: int = 0
    damages: list[Damage] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    bytes_checked: int = 0
    rows_checked: int = 0
    damage: Damage | None = None


def verify(store: ObjectStore, version: DatasetVersion) -> Generator[Verified, None, None]:
    """Checks each file's size and SHA-256, each page's checksum, and the rows and row ids of each group.

    The manifest is one of the files. Damage is reported, never raised. Raises `Unavailable`, and `NotFound` if the
    version is deleted meanwhile: missing files are then no damage.
    """
    manifest = version.manifest
    state = Verified(files_total=1 + len(manifest.files) + len(manifest.attachments))
    yield state
    reported_bytes = 0
    for steps in _files(store, version):
        for step in steps:
            if step.damage:
                check_not_deleted(store, version)
            state = replace(
                state,
                bytes_checked=state.bytes_checked + step.bytes_checked,
                rows_checked=state.rows_checked + step.rows_checked,
                damages=[step.damage] if step.damage else [],
            )
            if step.damage or state.bytes_checked - reported_bytes >= REPORT_EVERY_BYTES:
                yield state
                reported_bytes = state.bytes_checked
        state = replace(state, files_checked=state.files_checked + 1, damages=[])
        yield state


def _files(store: ObjectStore, version: DatasetVersion) -> Iterator[Iterator[_Step]]:
    yield _manifest(store, version)
    for file in version.manifest.files:
        yield _data_file(store, version, file)
    for attachment in version.manifest.attachments:
        yield _bytes_of(store, version, attachment.path, attachment.size_bytes, attachment.sha256)


def _manifest(store: ObjectStore, version: DatasetVersion) -> Iterator[_Step]:
    """Checks the manifest, which may have been read long ago."""
    try:
        data = store.get(f"{version.folder}/{MANIFEST}")
    except ObjectMissing:
        yield _Step(damage=Damage(MANIFEST, "is gone"))
        return
    if sha256_hex(data) != version.manifest_sha256:
        yield _Step(damage=Damage(MANIFEST, f"its SHA-256 is {sha256_hex(data)}, not {version.manifest_sha256}"))
    yield _Step(bytes_checked=len(data))


def _data_file(store: ObjectStore, version: DatasetVersion, file: DataFile) -> Iterator[_Step]:
    yield from _bytes_of(store, version, file.path, file.size_bytes, file.sha256)
    if store.size(f"{version.folder}/{file.path}") is None:
        check_not_deleted(store, version)
        return  # reported already; each of its groups would report it again
    # A reader of this file alone, so that another file's damage does not count here, and no cached footer is used.
    reader = VersionReader(store, replace(version, manifest=replace(version.manifest, files=[file])))
    try:
        schema = reader.schema
    except DataLoss as error:
        yield _Step(damage=Damage(file.path, error.message))
        return
    if columns := _other_columns(version, schema):
        yield _Step(damage=Damage(file.path, columns))
    first = file.first_row_id
    for group_index, rows in enumerate(file.row_groups):
        yield _row_group(reader, file.path, RowGroup(0, group_index, first, rows))
        first += rows


def _other_columns(version: DatasetVersion, schema: pa.Schema) -> str:
    """Returns the problem if the file's columns are not those of the manifest; else empty."""
    found = [(one.name, str(one.type)) for one in schema]
    wanted = [*((column.name, column.arrow_type) for column in version.columns), (ROW_ID, str(ROW_ID_FIELD.type))]
    if found == wanted:
        return ""
    return f"has the columns {found}, not {wanted}"


def _bytes_of(store: ObjectStore, version: DatasetVersion, path: str, size_bytes: int, sha256: str) -> Iterator[_Step]:
    key = f"{version.folder}/{path}"
    found = store.size(key)
    if found is None:
        yield _Step(damage=Damage(path, "is gone"))
        return
    if found != size_bytes:
        yield _Step(damage=Damage(path, f"has {found:,} bytes, not {size_bytes:,}"))
    digest = hashlib.sha256()
    for start in range(0, found, READ_BYTES):
        try:
            data = store.get_range(key, start, min(READ_BYTES, found - start))
        except (ObjectMissing, DataLoss):
            yield _Step(damage=Damage(path, "changed while it was read"))
            return
        digest.update(data)
        yield _Step(bytes_checked=len(data))
    if found == size_bytes and digest.hexdigest() != sha256:
        yield _Step(damage=Damage(path, f"its SHA-256 is {digest.hexdigest()}, not {sha256}"))


def _row_group(reader: VersionReader, path: str, group: RowGroup) -> _Step:
    place = f"row group {group.group_index}"
    try:
        table = reader.read(group, reader.schema.names)
    except DataLoss as error:
        return _Step(damage=Damage(path, f"{place}: {_why(error)}"))
    ids = table.column(ROW_ID).to_numpy()
    wanted = np.arange(group.first_row_id, group.first_row_id + group.row_count)
    wrong = np.flatnonzero(ids != wanted)
    if wrong.size:
        at = int(wrong[0])
        return _Step(
            rows_checked=table.num_rows,
            damage=Damage(path, f"{place}: row {at} has the id {int(ids[at])}, not {int(wanted[at])}"),
        )
    return _Step(rows_checked=table.num_rows)


def _why(error: DataLoss) -> str:
    """Returns the reason; Arrow reports a wrong checksum only by its text."""
    cause = error.__cause__
    if isinstance(cause, (pa.ArrowException, OSError)) and "CRC" in str(cause):
        return "a page's checksum is wrong"
    return error.message if cause is None else "it cannot be decoded"
