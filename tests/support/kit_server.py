"""`python -m tests.support.kit_server host:port folder`: a server of the kit whose one call waits for `folder`/go."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from grpc import aio

from millrace.data.v1 import data_service_pb2_grpc, resources_pb2
from shared.grpc_server import serve
from shared.logging_and_tracing import configure_logging


class Waiting(data_service_pb2_grpc.DataServiceServicer):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def GetDataset(self, request: Any, _: Any) -> resources_pb2.Dataset:  # noqa: N802
        (self._folder / "began").touch()
        while not (self._folder / "go").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        return resources_pb2.Dataset(name=request.name)


def main(address: str, folder: Path) -> None:
    def register(server: aio.Server) -> list[str]:
        data_service_pb2_grpc.add_DataServiceServicer_to_server(Waiting(folder), server)
        return ["millrace.data.v1.DataService"]

    configure_logging("kit", "INFO")
    # However long a busy machine takes over the last call: the test lets it end.
    asyncio.run(serve(address, register, grace_s=240.0))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
