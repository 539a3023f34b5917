"""A `grpc.aio` server that asks gRPC's core for many calls at a time.

`grpc.aio` asks core for one call, and for the next one when the event loop has taken the first. Each call so costs a
round through core's polling thread and the event loop, and calls wait in core while the event loop has time to spare.
With `ACCEPTS` requests outstanding, one pass of the event loop takes all the calls that have arrived.

This is the only file that uses private parts of gRPC (1.85): `AioServer._request_call`, which its main loop calls for
each call, `AioServer.is_running`, and the constructor of `aio._server.Server`. If a release renames the first, the
server works as `grpc.aio`'s own and the tests of this file fail. If one changes the others, no server serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, cast

from grpc import aio
from grpc._cython import cygrpc
from grpc.aio import _server

ACCEPTS = 64

# Core writes a call into the variables of the coroutine that asked for it, so a coroutine must not be freed before core
# has answered: that would crash the process. It is kept here, and not run as a task, because a task can be cancelled.
_OUTSTANDING: set[Coroutine[Any, Any, Any]] = set()


class ConcurrentAccepts(cygrpc.AioServer):  # type: ignore[misc]
    """Keeps `ACCEPTS` requests for a call outstanding, and takes calls in the order in which core hands them out."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Requests that the main loop has not taken yet, answered or not.
        self._requested = 0
        # The states of calls, or the errors of requests that core refused since the server stops.
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        # Whether the main loop has taken its last answer.
        self._has_ended = False

    async def _request_call(self) -> Any:
        """Return the state of the next call. The main loop of gRPC's server runs this once for each call."""
        while self._requested < ACCEPTS:
            self._requested += 1
            self._begin_request()
        answer = await self._answers.get()
        self._requested -= 1
        if not self.is_running():
            self._drop_answers()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _drop_answers(self) -> None:
        """Cancel the calls that core has handed out and that the main loop takes no more, since the server stops.

        Core cancels a call whose state is freed. Else the stop would wait for them until its grace is over.
        """
        self._has_ended = True
        while not self._answers.empty():
            self._answers.get_nowait()

    def _begin_request(self) -> None:
        """Ask core for one call."""
        coroutine = super()._request_call()

        def finish(_: asyncio.Future[Any]) -> None:
            _OUTSTANDING.discard(coroutine)
            try:
                coroutine.send(None)
            except StopIteration as end:
                if not self._has_ended:
                    self._answers.put_nowait(end.value)
            except Exception as error:
                self._answers.put_nowait(error)

        # The first step asks core, and yields the future that core's answer sets.
        answered = coroutine.send(None)
        _OUTSTANDING.add(coroutine)
        answered.add_done_callback(finish)


class _Server(_server.Server):
    def __init__(self, options: Sequence[tuple[str, Any]], maximum_concurrent_rpcs: int) -> None:
        # The parent's constructor would make grpc.aio's own server. Its other methods use only these two attributes.
        self._loop = cygrpc.get_working_loop()
        self._server = ConcurrentAccepts(
            self._loop,
            None,
            (),
            None,
            _server._augment_channel_arguments(tuple(options), None),
            maximum_concurrent_rpcs,
        )


def concurrent_server(options: Sequence[tuple[str, Any]], maximum_concurrent_rpcs: int) -> aio.Server:
    """Return what `aio.server` would with these arguments, with concurrent accepts. Runs on the current event loop."""
    return cast(aio.Server, _Server(options, maximum_concurrent_rpcs))
