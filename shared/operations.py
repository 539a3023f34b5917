"""Serves `google.longrunning.Operations` from a service's source of operations (here: durable jobs)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2
from grpc import aio

from shared import names
from shared.errors import NotFound, Unimplemented, invalid_field
from shared.storage import ObjectStore
from shared.storage.object_store import unresponsive_store
from shared.watching import Follower, Watches

LONGEST_WAIT_S = 60.0
# A wait is answered so long before the caller's own deadline cuts the call off.
ANSWER_S = 0.2
# How long a shorter wait goes on until the operation was read once.
FIRST_READ_S = 10.0
# Operations of a list that are read at a time.
READ_AT_ONCE = 16

Context = aio.ServicerContext[Any, Any]


class OperationSource(Protocol):
    """A service's operations, by name (`operations/{o}`). Called in threads."""

    def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:
        """Return one operation. `brief` limits it to `PAGE_BYTES`, as in lists. Raises `NotFound`."""

    def follow(self, name: str) -> Follower[operations_pb2.Operation]:
        """Open one operation for repeated reads. Raises `NotFound`."""

    def ids_after(self, after: str, most: int) -> Sequence[str]:
        """Return the next ids beyond `after` of this service's operations, in order; see `operation_ids_after`."""

    def cancel(self, name: str) -> None:
        """Request the operation's end. Raises `NotFound`."""


class OperationsServicer(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    """Servicer of Get, List, Wait and Cancel.

    Delete is UNIMPLEMENTED, because an operation is the history of a resource.
    """

    def __init__(self, source: OperationSource) -> None:
        self._source = source
        self._watches = Watches(source.follow)
        # Reads the operations of lists.
        self._pool = ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="operations")

    async def GetOperation(self, request: Any, context: Context) -> operations_pb2.Operation:
        return await asyncio.to_thread(self._source.get, _checked(request.name))

    async def ListOperations(self, request: Any, context: Context) -> operations_pb2.ListOperationsResponse:
        if request.name not in ("", "operations"):
            raise invalid_field("name", request.name, "use operations")
        if request.filter:
            raise invalid_field("filter", request.filter, "leave it empty; filters are not served")
        return await asyncio.to_thread(self._list, request.page_size, request.page_token)

    async def WaitOperation(self, request: Any, context: Context) -> operations_pb2.Operation:
        """Return the operation once it is done, or in its present state after `timeout` (default and limit: 60 s).

        Raises `Unavailable` if the present state cannot be read in that time and in `FIRST_READ_S`.
        """
        name = _checked(request.name)
        # ToTimedelta refuses some of the durations that a client may send.
        given = request.timeout.seconds + request.timeout.nanos / 1e9 if request.HasField("timeout") else LONGEST_WAIT_S
        remaining = context.time_remaining()
        remaining = LONGEST_WAIT_S if remaining is None else remaining - ANSWER_S
        wait_s = min(given, remaining, LONGEST_WAIT_S - 1)
        if wait_s <= 0:
            return await asyncio.to_thread(self._source.get, name)
        now = asyncio.get_running_loop().time()
        until = now + wait_s
        async with self._watches.watching(name) as watch:
            try:
                async with asyncio.timeout_at(now + min(max(wait_s, FIRST_READ_S), remaining)):
                    operation = await watch.first()
            except TimeoutError:
                raise unresponsive_store(name) from None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    while not operation.done:
                        operation = await watch.next()
        return operation

    async def CancelOperation(self, request: Any, context: Context) -> empty_pb2.Empty:
        await asyncio.to_thread(self._source.cancel, _checked(request.name))
        return empty_pb2.Empty()

    async def DeleteOperation(self, request: Any, context: Context) -> empty_pb2.Empty:
        raise Unimplemented("operations are kept as history; delete the resource that it made")

    def _list(self, page_size: int, page_token: str) -> operations_pb2.ListOperationsResponse:
        """Return one page, which ends early if its operations exceed one message."""
        size, after = names.checked_size(page_size), names.key_of(page_token)
        if after and not names.ID.fullmatch(after):
            raise invalid_field("page_token", page_token, "send a next_page_token as it came, or none")
        found = self._source.ids_after(after, size + 1)
        ids = found[:size]
        answer = operations_pb2.ListOperationsResponse(
            next_page_token=names.token_of(ids[-1]) if len(found) > size else ""
        )
        size_bytes, last = 0, ""
        for start in range(0, len(ids), READ_AT_ONCE):
            some = ids[start : start + READ_AT_ONCE]
            for one, operation in zip(some, self._pool.map(self._find, some), strict=True):
                if operation is None:
                    continue
                size_bytes += operation.ByteSize()
                if answer.operations and size_bytes > names.PAGE_BYTES:
                    answer.next_page_token = names.token_of(last)
                    return answer
                answer.operations.append(operation)
                last = one
        return answer

    def _find(self, operation_id: str) -> operations_pb2.Operation | None:
        try:
            return self._source.get(f"operations/{operation_id}", brief=True)
        except NotFound:  # the caller died before it created the job
            return None


def _checked(name: str) -> str:
    names.parse("name", name, "operations/{o}")
    return name


def operation_ids_after(store: ObjectStore, prefixes: Iterable[str], after: str, most: int) -> list[str]:
    """Return the next ids with one of these prefixes, beyond the id `after` and in order, at most `most`.

    Each operation has a folder below `operations/`, with those of all services.
    """
    found: list[str] = []
    for prefix in sorted(prefixes):
        if len(found) < most and (after < prefix or after.startswith(prefix)):
            ids = store.folders_after("operations", max(after, prefix), most - len(found))
            found += itertools.takewhile(lambda one, prefix=prefix: one.startswith(prefix), ids)  # type: ignore[misc]
    return found
