"""A client in a process of its own that begins to make a version, tells its operation, and waits for it.

    python -m tests.support.waiting_client ADDRESS < request

The request is the SerializeToString() of an ImportVersionRequest or a TransformVersionRequest, behind its name's line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc as pb_grpc

METHODS = {"ImportVersionRequest": "ImportVersion", "TransformVersionRequest": "TransformVersion"}


def main() -> None:
    name, _, data = sys.stdin.buffer.read().partition(b"\n")
    request = getattr(pb, name.decode()).FromString(data)
    with grpc.insecure_channel(sys.argv[1], options=[("grpc.enable_http_proxy", 0)]) as channel:
        begin = getattr(pb_grpc.DataServiceStub(channel), METHODS[name.decode()])
        operation: operations_pb2.Operation = begin(request, timeout=60)
        print(operation.SerializeToString().hex(), flush=True)
        wait = operations_pb2_grpc.OperationsStub(channel).WaitOperation
        while not operation.done:
            operation = wait(operations_pb2.WaitOperationRequest(name=operation.name), timeout=120)


@contextmanager
def waiting(
    address: str, request: pb.ImportVersionRequest | pb.TransformVersionRequest
) -> Iterator[tuple[operations_pb2.Operation, subprocess.Popen[bytes]]]:
    """The operation, and the process that waits for it, which is killed where the body has not done so."""
    command = [sys.executable, "-m", "tests.support.waiting_client", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        try:
            client.stdin.write(type(request).__name__.encode() + b"\n" + request.SerializeToString())
            client.stdin.close()
            begun = bytes.fromhex(client.stdout.readline().decode())
            yield operations_pb2.Operation.FromString(begun), client
        finally:
            client.kill()


if __name__ == "__main__":
    main()
