"""Waiting for a version that the server makes: as long as that takes, and it goes on where nobody waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.data.v1 import resources_pb2
from millrace_client.cli.exits import INTERRUPTED, CommandFailed
from millrace_client.operations import Operation

AS_LONG_AS_IT_TAKES_S = math.inf


@contextmanager
def waiting(operation: Operation[resources_pb2.DatasetVersion]) -> Iterator[None]:
    """Raises `CommandFailed` where somebody ends the waiting."""
    try:
        yield
    except KeyboardInterrupt:
        version = operation.metadata.version
        going_on = f"interrupted, but the server goes on making {version}"
        listed = f"millrace data list {version.split('/')[1]} shows when it is done"
        remedy = f"{listed}; millrace data cancel {version} ends it"
        raise CommandFailed(going_on, remedy=remedy, code=INTERRUPTED) from None
