"""The common parts of every attempt at creating a version: its folders, and the final commit."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_service import kept_parts
from data_service.domain.layout import SplitRange
from shared.dataset_version.manifest import (
    QUARANTINE,
    REPORT,
    Attachment,
    Column,
    DataFile,
    Manifest,
    Parent,
    Prediction,
    Split,
    sha256_hex,
    shape_of,
)
from shared.dataset_version.pages import manifest_with
from shared.errors import STORE_OUTAGES, Cancelled, DataLoss, MillraceError, ResourceExhausted
from shared.jobs import AttemptContext
from shared.jobs.attempt import TRANSIENT
from shared.log import StaleAttempt
from shared.storage import ObjectStore
from shared.storage.object_store import STORE_FULL

logger = logging.getLogger(__name__)

# --- Attempt folder ---
# The folders of an attempt at creating a version: its own folder in the store, and one on the local disk.

# The folder below an attempt's own for the pins of uploads, which its tasks read.
PINS = "pins"
# The delay before a full disk is tried again.
FULL_RETRY_S = 30.0
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def attempt_folder(context: AttemptContext, *, keeps_parts: bool = False) -> Iterator[tuple[str, Path]]:
    """Provides the attempt's folder in the store, and a local scratch folder that is deleted afterwards.

    First deletes the folders of lost attempts. If the body fails, deletes what it wrote, so that nothing of a failed
    attempt stays readable. Raises `ResourceExhausted` if the local disk is full.

    With `keeps_parts` it first takes over the parts that lost attempts finished, unless the store is too full for the
    copies. If it is lost itself, its folder stays for the next attempt. If none follows, the sweeper deletes the folder
    once the job has ended.
    """
    folder = f"{context.folder}/data/a{context.attempt:05d}-{uuid.uuid4().hex[:8]}"
    try:
        if keeps_parts:
            _take_over_parts(context, folder)
        _sweep_lost_attempts(context)
        with scratch_folder() as scratch:
            yield folder, scratch
        if keeps_parts:
            # Later, because this attempt may still be lost before its commit.
            context.afterwards(partial(_forget_parts, context.store, folder))
    except BaseException as error:
        if not (keeps_parts and _may_be_taken_over(context, error)):
            with suppress(MillraceError):
                context.store.delete_folder(folder)
        if isinstance(error, OSError) and error.errno in FULL:
            raise ResourceExhausted(
                "the disk of the node that makes the version is full; free some space in its temporary folder",
                reason="SCRATCH_FULL",
                retry_after_s=FULL_RETRY_S,
            ) from error
        raise


def _take_over_parts(context: AttemptContext, folder: str) -> None:
    own, first = f"a{context.attempt:05d}", f"a{context.job.first_attempt:05d}"
    lost = [name for name in context.store.folders(f"{context.folder}/data") if first <= name < own]
    sources = [f"{context.folder}/data/{name}" for name in reversed(lost)]
    try:
        if count := kept_parts.take_over(context.store, sources, folder, context.raise_if_stopped):
            logger.info("%d finished parts of lost attempts are taken over", count)
    except ResourceExhausted as error:
        if error.specific_reason != STORE_FULL:
            raise
        # The folders of the lost attempts take the room, and are deleted next. If this attempt ended here, they would
        # stay, and each later attempt would end in the same way.
        logger.warning("the object store has no room for copies of finished parts; all parts are done again")
        context.store.delete_folder(folder)


def _may_be_taken_over(context: AttemptContext, error: BaseException) -> bool:
    """Returns whether another attempt of the job may follow that is to find this one's parts."""
    if isinstance(error, MillraceError):
        # A full store needs the space, if only to record how the attempt ended.
        is_full = error.specific_reason == STORE_FULL
        return isinstance(error, TRANSIENT) and not isinstance(error, Cancelled) and not is_full
    return not isinstance(error, StaleAttempt) or context.is_superseded


def _forget_parts(store: ObjectStore, folder: str) -> None:
    try:
        kept_parts.forget(store, folder)
        store.delete_folder(f"{folder}/{PINS}")
    except STORE_OUTAGES as error:
        logger.warning("records of parts stay in %s until the sweeper deletes them: %s", folder, error.message)


def _sweep_lost_attempts(context: AttemptContext) -> None:
    """Deletes the folders of earlier attempts.

    The log has fenced them, so they cannot be committed any more.
    """
    own = f"a{context.attempt:05d}"
    for attempt in context.store.folders(f"{context.folder}/data"):
        if attempt < own:
            context.store.delete_folder(f"{context.folder}/data/{attempt}")


# --- Commit ---
# The last step of every job that creates a version: writes the report, the quarantined rows, and then the manifest.


def columns_of(schema: pa.Schema, value_names: Mapping[str, Sequence[str]]) -> list[Column]:
    """Returns the manifest's columns for a logical schema without `_row_id`."""
    return [
        Column(
            name=field.name,
            arrow_type=str(field.type),
            shape=shape_of(field.type),
            value_names=list(value_names.get(field.name, [])),
        )
        for field in schema
    ]


def commit_version(
    store: ObjectStore,
    folder: str,
    *,
    columns: Sequence[Column],
    ranges: Sequence[SplitRange],
    files: Sequence[DataFile],
    report: Mapping[str, Any],
    quarantine: Path | None,
    quarantined_row_count: int,
    parents: Sequence[Parent] = (),
    ingested: Sequence[Column] | None = None,
    transforms: Sequence[dict[str, Any]] = (),
    prediction: Prediction | None = None,
) -> dict[str, Any]:
    """Writes report, quarantined rows, pages of the files and manifest below `folder`.

    Returns the job's result, which names the manifest; only that result creates the version. `report` is a
    QualityReport as JSON, `quarantine` a local file of JSON lines. Raises `DataLoss`, and writes nothing, unless the
    files have each row id of `ranges` once.
    """
    _refuse_gaps(ranges, files)
    attachments = [_attach(store, folder, REPORT, json.dumps(report, sort_keys=True, separators=(",", ":")).encode())]
    if quarantine is not None and quarantine.stat().st_size:
        attachments.append(_attach_file(store, folder, QUARANTINE, quarantine))
    manifest = Manifest(
        columns=list(columns),
        splits=[Split(name=one.name, first_row_id=one.first_row_id, row_count=one.row_count) for one in ranges],
        files=[],
        parents=list(parents),
        ingested=list(columns if ingested is None else ingested),
        transforms=list(transforms),
        attachments=attachments,
        quarantined_row_count=quarantined_row_count,
        prediction=prediction,
    )
    # Pages of the files, if there are many, come first: the manifest names them with their digests.
    data = manifest_with(manifest, store, folder, sorted(files, key=lambda file: file.first_row_id)).to_json()
    key = f"{folder}/manifest.json"
    store.put(key, data)
    return {"manifest": key, "manifest_sha256": sha256_hex(data)}


def _refuse_gaps(ranges: Iterable[SplitRange], files: Iterable[DataFile]) -> None:
    next_row_ids = {one.name: one.first_row_id for one in ranges}
    for file in sorted(files, key=lambda file: (file.first_row_id, file.row_count)):
        expected = next_row_ids.get(file.split)
        if expected is None:
            raise _incomplete(file.split, f"{file.path} is of a split that the version lacks")
        if file.first_row_id != expected:
            raise _incomplete(file.split, f"{file.path} begins at row {file.first_row_id}, and not at {expected}")
        next_row_ids[file.split] = expected + file.row_count
    for one in ranges:
        end = one.first_row_id + one.row_count
        if next_row_ids[one.name] != end:
            raise _incomplete(one.name, f"they end at row {next_row_ids[one.name]}, and the split at {end}")


def _incomplete(split: str, what: str) -> DataLoss:
    """Returns the error of files that lack rows. Another attempt would take over the same files."""
    return DataLoss(
        f"the files of split {split!r} do not have each of its rows once: {what}; this is a fault of the service: "
        "start it anew, and report the fault if it comes again",
        reason="FILES_INCOMPLETE",
        metadata={"split": split},
    )


def _attach(store: ObjectStore, folder: str, path: str, data: bytes) -> Attachment:
    store.put(f"{folder}/{path}", data)
    return Attachment(path=path, size_bytes=len(data), sha256=sha256_hex(data))


def _attach_file(store: ObjectStore, folder: str, path: str, local: Path) -> Attachment:
    with local.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    store.upload_file(local, f"{folder}/{path}")
    return Attachment(path=path, size_bytes=local.stat().st_size, sha256=digest)


# --- Scratch ---
# Folders on the local disk for data that is not yet in the store. They are deleted after the work, or before the next
# work begins.

PREFIX = "millrace-scratch-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Provides a new folder that is deleted afterwards.

    First deletes the folders of killed processes. The owner holds a lock on the folder itself, which the kernel
    releases when the owner dies. Process numbers would not do, since containers that share a temporary folder do not
    see each other's processes.
    """
    _sweep_unowned()
    folder, lock = _owned_folder()
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        finally:
            os.close(lock)


def _owned_folder() -> tuple[Path, int]:
    """Returns a new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Another process may sweep the folder before it is locked; then it no longer exists once we have the lock.
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _sweep_unowned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # deleted just now, owned by another user, or not a folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed stays for a later sweep
        except BlockingIOError:
            continue  # its owner is alive
        finally:
            os.close(lock)
