"""Where an attempt at making a version writes: a folder of its own in the store, and one on local disk."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_service.scratch import scratch_folder
from shared.errors import MillraceError, ResourceExhausted
from shared.jobs import AttemptContext

# A full disk is looked at again so much later.
FULL_RETRY_S = 30.0
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def attempt_folder(context: AttemptContext) -> Iterator[tuple[str, Path]]:
    """Gives the folder in the store, and a local one for scratch that goes with the body.

    Before, what lost attempts left is taken away; and if the body fails, so is what it wrote: nothing that failed stays
    readable. Raises `ResourceExhausted` where the local disk is full.
    """
    folder = f"{context.folder}/data/a{context.attempt:05d}-{uuid.uuid4().hex[:8]}"
    try:
        _sweep_lost_attempts(context)
        with scratch_folder() as scratch:
            yield folder, scratch
    except BaseException as error:
        with suppress(MillraceError):
            context.store.delete_folder(folder)
        if isinstance(error, OSError) and error.errno in FULL:
            raise ResourceExhausted(
                "the disk of the node that makes the version is full; free some space in its temporary folder",
                reason="SCRATCH_FULL",
                retry_after_s=FULL_RETRY_S,
            ) from error
        raise


def _sweep_lost_attempts(context: AttemptContext) -> None:
    """Takes away what earlier attempts left: the log has fenced them, so none of it can be committed any more."""
    own = f"a{context.attempt:05d}"
    for attempt in context.store.folders(f"{context.folder}/data"):
        if attempt < own:
            context.store.delete_folder(f"{context.folder}/data/{attempt}")
